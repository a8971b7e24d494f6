"""Where equations stand in the program of a user."""

import os
import posixpath
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.extend import core, source_info_util

from . import _jaxpr

# primitive -> the function that users type
_CALLS = {
    "while": "while_loop",
    "remat2": "checkpoint",
    "custom_vjp_call": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
}
_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(x)}{os.sep}" for x in ("purelib", "platlib", "stdlib")),
)


def called(eqn: core.JaxprEqn) -> str:
    """The function that a user typed: a `fori_loop` of fixed length is a scan."""
    name = eqn.primitive.name
    if name == "scan":
        carry = _jaxpr.carry_slice(eqn)
        is_along_arrays = len(eqn.invars) > carry.stop
        is_collecting = len(eqn.outvars) > carry.stop - carry.start
        first: Any = eqn.invars[carry][0].aval if eqn.invars[carry] else None
        is_counting = first is not None and str(first.dtype) in ("int32", "int64")
        is_scalar = first is not None and not first.shape
        if is_counting and is_scalar and not is_along_arrays and not is_collecting:
            return "fori_loop"
    return _CALLS.get(name, name)


def modules(eqn: core.JaxprEqn, outside: str = "") -> Iterator[str]:
    """The paths of the modules that make an equation, such as ``Model/Block_0``.

    Args:
      eqn: the equation. Where it names none below the first, what is inside may.
      outside: the path of what it is inside of.
    """
    inner = str(eqn.source_info.name_stack)
    # JAX writes the text of an einsum there.
    names = [name for name in f"{outside}/{inner}".split("/") if name]
    path = "/".join(name for name in names if "->" not in name)
    inside = [e for closed in _jaxpr.inner_jaxprs(eqn) for e in closed.jaxpr.eqns]
    if "/" in path or not inside:
        yield path
        return
    for one in inside:
        yield from modules(one, path)


def line(eqn: core.JaxprEqn) -> str:
    """The file, line and function of an equation, outside of libraries if possible."""
    traceback: Any = eqn.source_info.traceback
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return source_info_util.summarize(eqn.source_info)


def told(eqn: core.JaxprEqn) -> str:
    """The function, module and line of an equation, for errors and warnings."""
    paths = [path for path in modules(eqn) if path]
    path = posixpath.commonpath(paths) if paths else ""
    where = f" of {path}" if path else ""
    return f"{called(eqn)}{where}, at {line(eqn)},"
