"""What a function of a pipeline runs, and what it holds, instruction by instruction.

This is the one file of tests that knows the inside of that list, so that another inside
is another file here and nothing else. What can be seen from outside is tested there:
results by the methods of a pipeline, bytes and actions by `print(step)`, `step.plan`,
`step.compile` and `Schedule.simulate`. Not seen there is whether the bytes that the
list says are those of the arrays that JAX has, and which arrays an instruction reads.
"""

import math

import jax

from jpipe._arguments import _stacked
from jpipe._instructions import _memory
from jpipe._instructions._memory import peak_bytes
from jpipe._instructions._transfer import devices_of
from jpipe.schedules import Action

from . import reference as ref

__all__ = [
    "actions",
    "check_exact",
    "counted",
    "gradient_of",
    "leaves_of",
    "live",
    "moves",
    "peak_bytes",
    "plan_of_gradient",
    "program_of",
]


def live(program):
    """The bytes of each place before the first instruction, then after each."""
    return [*_memory.live_bytes(program)]


def leaves_of(tree):
    """The arrays that a list is given for a tree: a stack in pieces is several."""
    return jax.tree.leaves(_stacked.split_placed(tree))


def gradient_of(pipe, x, targets, rngs=None, loss=ref.mse, **options):
    """The list of the gradients of a mini-batch, and the leaves that it is given."""
    given = pipe.init(jax.random.key(0), x), x, targets
    find = pipe.value_and_grad(loss, **options)
    return program_of(find, *given, rngs=rngs), jax.tree.leaves((*given, rngs))


def program_of(function, *args, **kwargs):
    """The list that a call of a step or of gradients runs; it need not run."""
    return function._program(*args, **kwargs)


def plan_of_gradient(pipe, x, targets, rngs=None, loss=ref.mse, **options):
    """The plan of the gradients of a mini-batch, which need not run."""
    find = pipe.value_and_grad(loss, **options)
    program_of(find, pipe.init(jax.random.key(0), x), x, targets, rngs=rngs)
    return find.plan


def actions(program):
    """The actions of each place in order, without what stands beside them."""
    rows = [[] for _ in program.devices]
    for instruction in program.instructions:
        if isinstance(instruction.label, Action) and not instruction.is_move:
            rows[instruction.place].append(str(instruction.label))
    return rows


def moves(program):
    """Each move between places: its label, both places, and its bytes."""
    moves = [move for move in program.instructions if move.is_move and move.source >= 0]
    return [
        (str(x.label), x.source, x.place, sum(program.nbytes[i] for i in x.writes))
        for x in moves
    ]


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
        counts.append([_same_on_all(now, place) for place in program.devices])

    outputs = program(leaves, observe=observe)
    del outputs
    return counts


def _same_on_all(bytes_of, place):
    """The bytes that each device of a place holds, which are as many on all."""
    (nbytes,) = {bytes_of[device] for device in devices_of(place)}
    return nbytes


def check_exact(pipe, x, targets, rngs=None, **options):
    """The bytes of the list, instruction by instruction, against those of a run."""
    program, leaves = gradient_of(pipe, x, targets, rngs, **options)
    assert counted(program, leaves) == live(program)[1:]
    names = map(str, program.devices)
    peaks = tuple(zip(names, peak_bytes(program), strict=True))
    plan = plan_of_gradient(pipe, x, targets, rngs, **options)
    assert plan.peak_bytes == peaks
    return plan
