"""The base of what users hold: answers attributes that it lacks with what to type."""

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from .._arguments._wrong_call import explain_call

_KNOWS = "what a function was told, it knows: type"
_PROFILE = (
    f"{_KNOWS} step.profile(state, x, targets) of step = pipe.train_step(loss_fn, tx), "
    f"or f.profile(variables, x, targets) of f = pipe.value_and_grad(loss_fn)"
)
_COMPILE = "type compile, with the arguments of a call, for a report on what it runs"
# Attribute that some handle lacks: one of former times, of another handle or of a
# function of JAX -> what to type.
_ADVICE_ON_ATTRIBUTE = {
    "profile_step": _PROFILE,
    "profile": _PROFILE,
    "program": _COMPILE,
    "lower": _COMPILE,
    "schedule": "type .plan.schedule, or .schedule of the pipeline",
    "num_stages": "type .plan.schedule.num_stages, or .num_stages of the pipeline",
    "num_microbatches": (
        "type .plan.schedule.num_microbatches, or .num_microbatches of the pipeline"
    ),
    "devices": "type .devices of the pipeline",
}
CHECK_ADVICE = (
    f"{_KNOWS} step.check(state, x, targets) of step = pipe.train_step(loss_fn, tx), "
    f"or f.check(variables, x, targets) of f = pipe.value_and_grad(loss_fn); "
    f"pipe.check(variables, x) checks the layers alone"
)
COMPILE_ADVICE = (
    f"{_KNOWS} step.compile(state, x, targets) of step = pipe.train_step(loss_fn, tx), "
    f"or f.compile(variables, x, targets) of f = pipe.value_and_grad(loss_fn); "
    f"pipe.compile(variables, x) compiles what pipe.apply runs"
)
# former argument of `Pipeline.check` -> what to type
CHECK_ADVICE_ON: dict[str, str] = dict.fromkeys(
    ("targets", "loss_fn", "reduction", "has_aux"), CHECK_ADVICE
)


class Handle:
    """A pipeline, or one of its functions, as users hold it."""

    @property
    def _input_names(self) -> Collection[str]:
        """The names of the arguments that its model takes by name."""
        return ()

    if not TYPE_CHECKING:  # for which every attribute would exist

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError of its own: raises it again.
                return object.__getattribute__(self, name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ADVICE_ON_ATTRIBUTE:
                text = f"{text}; {_ADVICE_ON_ATTRIBUTE[name]}"
            raise AttributeError(text, name=name, obj=self)


def _input_names(handle: Handle) -> Collection[str]:
    return handle._input_names


# `explain_call` for the methods of a handle.
explain_method = functools.partial(explain_call, input_names=_input_names)
