"""How a user is asked what of a layer is trained, with what to type."""

from typing import Any, NamedTuple

from . import _switches
from ._watch import Call, Place


class Fault(NamedTuple):
    """Parts of a layer that do not do what is meant.

    Attributes:
      parts: what they are, and where in the layer.
      call: the call whose parameter was left open; ``None`` if the user froze the parts
        and the layer is told to train them.
      name: that parameter; or what the layer would be told to evaluate them.
      default: its default, which decided.
      right: a value for which the parts do what is meant.
    """

    parts: list[tuple[str, Place]]
    call: Call | None
    name: str
    default: Any
    right: Any


def ask(faults: list[Fault], train: bool, listed: str) -> ValueError:
    """The question.

    Args:
      faults: all that was found in a layer.
      train: whether this is training.
      listed: how the layer calls its module, as ``"module"`` or ``"module.head"``;
        empty if it is not a method of a module.
    """
    lines = dict.fromkeys(  # a call that went through nn.remat was met twice
        _open(fault, fault.call, train, listed)
        if fault.call
        else _thawed(fault, listed or "module")
        for fault in faults
    )
    when = "training" if train else "evaluation"
    return ValueError(
        f"it is unclear what of this layer is trained; in {when}:\n"
        + "\n".join(f"  * {line}" for line in lines)
    )


def _thawed(fault: Fault, called: str) -> str:
    return (
        f"{_parts(fault)}, which the module holds set to evaluation, would be trained "
        f"by what the layer is told; to freeze all, list jpipe.layer(module, lambda "
        f"module, x: {called}(x, {fault.name})); to freeze that alone, let the module "
        f"not pass the switch on to it; to train it, call its train() before"
    )


def _open(fault: Fault, call: Call, train: bool, listed: str) -> str:
    path, kind, method, _ = call.place
    name, default = fault.name, fault.default
    told = f"{name}={_told(fault, train)}"
    if default is None:
        default = not fault.right
    given, meant = (
        f"{name}={default!r}",
        "to freeze it" if train else "if that is meant",
    )
    does = "does what evaluation does" if train else "does what training does"
    what = (
        f"{_parts(fault)} {does}, as nobody fills {name}={fault.default!r} of "
        f"{_named(path, kind)}.{method}; "
    )
    line = "jpipe.layer(module, lambda module, x"
    if listed and not call.parents:
        return (
            f"{what}list {line}, train: {listed}(x, {told})); {meant}, {line}: "
            f"{listed}(x, {given}))"
        )
    if not call.parents:
        return (
            f"{what}let the function that calls it name train, and write {told} "
            f"there; {meant}, {given}"
        )
    around, around_kind, *_ = call.parents[-1].place
    if around_kind != "Sequential":
        where = _named(around, around_kind)
        return f"{what}where {where} calls it, write {told}; {meant}, {given}"
    alone = f"and this as {line}, train: module(x, {told}))"
    if name in _switches.switches(True):
        alone = f"where this is told {name}"
    return (
        f"{what}list what the Sequential holds one by one, {alone}; {meant}, {line}: "
        f"module(x, {given}))"
    )


def _told(fault: Fault, train: bool) -> str:
    """An expression in train that gives the right value in training and evaluation."""
    if isinstance(fault.right, bool):
        return "train" if fault.right == train else "not train"
    yes, no = ("...", repr(fault.default))[:: 1 if train else -1]
    return f"{yes} if train else {no}"


def _parts(fault: Fault) -> str:
    """Such as ``dropout block/Dropout_0 and batch norm norm``."""
    names = {f"{kind} {'/'.join(map(str, path))}".strip() for kind, path in fault.parts}
    return " and ".join(sorted(names))


def _named(path: Place | None, kind: str) -> str:
    name = "/".join(map(str, path or ()))
    return f"{kind} ({name})" if name else kind
