"""Several processes about to run a list of instructions: they compare it first.

Compared are the *facts*: text by name, of what the instructions were made of, and the
instructions themselves. Whoever lowers a program adds its facts to the graph.
"""

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax
import jax
import numpy as np
import optax

from .. import _compat
from .._jaxprs._computation import Computation
from .._processes._digest import array_digest, digest
from .._processes._group import group
from .._processes._transport import Crossing
from ._instruction import Instruction

PyTree = Any
# An address in the memory of one process, in the text of a jaxpr.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# A set, such as of names in a policy of `jax.checkpoint`, whose order differs too.
_SET = re.compile(r"frozenset\(\{(.*?)\}\)")
# Settings of JAX that change numbers; some are seen in no jaxpr.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)


def agree(
    instructions: Sequence[Instruction],
    facts: Mapping[str, str],
    compile_local: Callable[[], None],
) -> None:
    """Opens the moves between processes, once all run the same and have compiled it.

    Args:
      instructions: all that the processes are about to run.
      facts: the origin of the instructions, in words.
      compile_local: compiles the programs of this process.

    Raises:
      ValueError: with what differs, and between whom.
      TimeoutError: with the processes that do not come.
    """
    peers = group()
    number = peers.next_number()
    settings = _compat.settings()
    compared = {
        "Python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (jax, flax, optax, np)},
        **{name: str(settings.get(name)) for name in _SETTINGS},
        **facts,
        **_digests(instructions),
    }
    peers.agree(compared, f"program {number}")

    compile_local()
    peers.gather({}, f"the first run of program {number}, compiled")

    for instruction in instructions:
        crossing = instruction.run
        if isinstance(crossing, Crossing) and crossing.is_local_part:
            instruction.run = crossing.connect(number)


def _digests(instructions: Sequence[Instruction]) -> dict[str, str]:
    """Digests of the functions that are called, by name, and of the instructions."""
    # name of a function -> the text of all functions of this name
    code: dict[str, list[str]] = {}
    functions = dict.fromkeys(instruction.function for instruction in instructions)
    for function in filter(None, functions):
        lines = code.setdefault(f"operations of {function.name}", [])
        lines += _text(function)

    digests = {name: digest(lines) for name, lines in code.items()}
    digests["instructions"] = digest(
        f"{i.label} {i.place} {i.source} {i.reads} {i.donates} {i.writes}"
        for i in instructions
    )
    return digests


def _text(function: Computation) -> list[str]:
    """A function in words that are equal in all processes."""
    lines = [function.name, str(function.results)]
    if function.closed is not None:
        text = _ADDRESS.sub("", str(function.closed.jaxpr))
        lines.append(_SET.sub(lambda match: _sort_items(match[1]), text))
        lines += map(array_digest, function.closed.consts)
    return lines


def _sort_items(items: str) -> str:
    """The items of a set, in the order of their texts."""
    return ", ".join(sorted(items.split(", ")))
