"""Several processes about to run a list of instructions: they compare it first."""

import platform
import re
from collections.abc import Callable, Mapping, Sequence

import flax
import jax
import numpy as np
import optax

from .. import _compat
from .._processes._digest import digest, fingerprint
from .._processes._group import group
from .._processes._transport import Crossing
from ._instruction import Instruction

# In the text of a jaxpr, where something is in the memory of one process.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Settings of JAX that numbers hang on; some are seen in no jaxpr.
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
    compile_own: Callable[[], None],
) -> None:
    """Opens the moves between processes, once all run the same and have compiled it.

    Args:
      instructions: what they are about to run, all of them.
      facts: what they were made of, in words.
      compile_own: compiles what this process runs.

    Raises:
      ValueError: with what differs, and between whom.
      TimeoutError: with the processes that do not come.
    """
    peers, settings = group(), _compat.settings()
    number = peers.next_number()
    every = {
        "Python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (jax, flax, optax, np)},
        **{name: str(settings.get(name)) for name in _SETTINGS},
        **facts,
        **_digests(instructions),
    }
    peers.agree(every, f"program {number}")
    compile_own()
    peers.gather({}, f"the first run of program {number}, compiled")
    for instruction in instructions:
        crossing = instruction.run
        if isinstance(crossing, Crossing) and crossing.concerns:
            instruction.run = crossing.opened(number)


def _digests(instructions: Sequence[Instruction]) -> dict[str, str]:
    """The list of instructions, and what each calls, in a few letters."""
    listed = (
        f"{i.label} {i.place} {i.source} {i.reads} {i.donates} {i.writes}"
        for i in instructions
    )
    code: dict[str, list[str]] = {}
    functions = dict.fromkeys(each.function for each in instructions)
    for function in filter(None, functions):
        lines = code.setdefault(f"operations of {function.name}", [])
        lines += function.name, str(function.results)
        for closed in function.parts:
            lines.append(_ADDRESS.sub("", str(closed.jaxpr)))
            lines += map(fingerprint, closed.consts)
    return {
        **{name: digest(lines) for name, lines in code.items()},
        "instructions": digest(listed),
    }
