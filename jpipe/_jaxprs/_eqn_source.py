"""The functions, modules and lines that equations come from, for messages."""

import posixpath
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from . import _jaxpr
from ._source_lines import source_line

# primitive -> the function that users type
_USER_FUNCTIONS = {
    "while": "while_loop",
    "remat2": "checkpoint",
    "custom_vjp_call": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
}


def user_function(eqn: core.JaxprEqn) -> str:
    """The name of the function that a user typed.

    A scan that counts, goes along no array and returns none was a `fori_loop`.
    """
    name = eqn.primitive.name
    if name == "scan":
        carry = _jaxpr.carry_slice(eqn)
        has_xs = len(eqn.invars) > carry.stop
        has_ys = len(eqn.outvars) > carry.stop - carry.start
        carried = eqn.invars[carry]
        if carried and not has_xs and not has_ys:
            counter: Any = carried[0].aval
            if str(counter.dtype) in ("int32", "int64") and not counter.shape:
                return "fori_loop"
    return _USER_FUNCTIONS.get(name, name)


def module_paths(eqn: core.JaxprEqn, outside: str = "") -> Iterator[str]:
    """The paths of the modules that call an equation, such as ``Model/Block_0``.

    Args:
      eqn: the equation. If its path has one name at most, those of the equations
        inside of it are taken.
      outside: the path of the equation that it is inside of.
    """
    name_stack = str(eqn.source_info.name_stack)
    # JAX writes the text of an einsum there.
    names = [name for name in f"{outside}/{name_stack}".split("/") if name]
    path = "/".join(name for name in names if "->" not in name)

    inner_eqns = _jaxpr.inner_eqns(eqn)
    if "/" in path or not inner_eqns:
        yield path
        return
    for inner_eqn in inner_eqns:
        yield from module_paths(inner_eqn, path)


def describe_eqn(eqn: core.JaxprEqn) -> str:
    """The function, module and line of an equation, for errors and warnings."""
    paths = [path for path in module_paths(eqn) if path]
    path = posixpath.commonpath(paths) if paths else ""
    of_module = f" of {path}" if path else ""
    line = source_line(eqn)
    at_line = f", at {line}," if line else ""
    return f"{user_function(eqn)}{of_module}{at_line}"
