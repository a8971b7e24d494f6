"""What a step holds, byte by byte: by the list of instructions and by JAX."""

import jax

from jpipe._functions._objective import Objective
from jpipe._functions._trainable import Trainable
from jpipe._instructions._bytes import live, peaks

from .. import reference as ref


def gradient_of(pipe, x, targets, rngs=None, **objective):
    """The gradient of a mini-batch, and what its program is given."""
    variables = pipe.init(jax.random.key(0), x)
    loss = objective.pop("loss", ref.mse)
    trainable = Trainable(objective.pop("trainable", None))
    find = pipe._cache.gradients(Objective(loss, **objective), trainable)
    gradient = find(variables, x, targets, rngs, True)
    return gradient, gradient.arguments(variables, x, targets, rngs)


def counted(program, leaves, ahead=True):
    """The bytes of all arrays on each device that were not there before a run.

    After each instruction; those that it is given in place are counted too.
    """
    if ahead:
        program.compile()
    given = {id(leaf) for leaf in program.start(leaves)}
    before = {id(leaf) for leaf in jax.live_arrays()} - given
    outside = {
        id(leaf)
        for leaf, place in zip(leaves, program.places, strict=False)
        if place < 0
    }
    counts = []

    def observe(instruction, slots):
        now = dict.fromkeys(program.devices, 0)
        for leaf in jax.live_arrays():
            if id(leaf) not in before | outside and leaf.device in now:
                now[leaf.device] += leaf.nbytes
        counts.append(list(now.values()))

    outputs = program(leaves, observe)
    del outputs
    return counts


def check_exact(pipe, x, targets, rngs=None, **objective):
    """The bytes of the list, instruction by instruction, against those of a run."""
    gradient, leaves = gradient_of(pipe, x, targets, rngs, **objective)
    program = gradient.program
    assert counted(program, leaves) == live(program)[1:]
    assert pipe.plan.peak_bytes == tuple(
        zip(map(str, program.devices), peaks(program), strict=True)
    )
    return gradient
