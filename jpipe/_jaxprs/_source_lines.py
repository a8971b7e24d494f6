"""The lines of a user's program that equations come from."""

import os
import sysconfig
from pathlib import Path
from typing import Any

import jax
from jax.extend import core, source_info_util

_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    # Not always among the folders of `sysconfig`: JAX may be another environment's.
    f"{Path(jax.__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(key)}{os.sep}" for key in ("purelib", "platlib", "stdlib")),
)


def source_line(eqn: core.JaxprEqn) -> str:
    """The file, line and function of an equation, outside of libraries if possible."""
    return _user_line(eqn) or source_info_util.summarize(eqn.source_info)


def with_lines_of(call: core.JaxprEqn, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The jaxpr of a call, with the line of the call where it has none of a user.

    JAX traces a function of its own, such as `jax.numpy.sort`, once for all callers.
    """
    if not closed.jaxpr.eqns or _user_line(closed.jaxpr.eqns[0]):
        return closed
    traceback = call.source_info.traceback
    eqns = [
        eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))
        for eqn in closed.jaxpr.eqns
    ]
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def _user_line(eqn: core.JaxprEqn) -> str:
    """The line outside of libraries; empty if there is none."""
    traceback: Any = eqn.source_info.traceback
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""
