"""What a step holds, byte by byte: by the list of instructions and by JAX."""

import math

import jax

from jpipe._functions._objective import Objective
from jpipe._functions._trainable import Trainable
from jpipe._instructions._bytes import live, peaks
from jpipe._instructions._transfer import devices_of

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
    before |= {
        id(leaf)
        for leaf, place in zip(leaves, program.places, strict=False)
        if place < 0
    }
    counts = []

    def observe(instruction, slots):
        now = dict.fromkeys(jax.devices(), 0)
        for leaf in jax.live_arrays():
            if id(leaf) in before or not leaf.size:
                continue
            shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
            for device in leaf.devices():
                now[device] += leaf.nbytes // leaf.size * shard
        counts.append([same_on_all(now, place) for place in program.devices])

    outputs = program(leaves, observe)
    del outputs
    return counts


def same_on_all(bytes_of, place):
    """The bytes that each device of a place holds, which are as many on all."""
    (nbytes,) = {bytes_of[device] for device in devices_of(place)}
    return nbytes


def check_exact(pipe, x, targets, rngs=None, **objective):
    """The bytes of the list, instruction by instruction, against those of a run."""
    gradient, leaves = gradient_of(pipe, x, targets, rngs, **objective)
    program = gradient.program
    assert counted(program, leaves) == live(program)[1:]
    assert pipe.plan.peak_bytes == tuple(
        zip(map(str, program.devices), peaks(program), strict=True)
    )
    return gradient
