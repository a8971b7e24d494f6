"""Former names of methods and arguments: errors that say the line to type instead."""

from typing import TYPE_CHECKING, Any

_KNOWS = "what a function was told, it knows: type"
# former attribute of what users hold -> what to type
_ADVICE_ON_ATTRIBUTE = {
    "profile_step": f"{_KNOWS} step.profile(state, x, targets) of step = "
    f"pipe.train_step(loss_fn, tx)",
    "program": "type compile, with the arguments of a call, for a report on what it "
    "runs",
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


class FormerNames:
    """Answers former names of attributes with what to type."""

    if not TYPE_CHECKING:  # for which every attribute would exist

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ADVICE_ON_ATTRIBUTE:
                text = f"{text}; {_ADVICE_ON_ATTRIBUTE[name]}"
            raise AttributeError(text, name=name, obj=self)
