"""What a user is asked where nobody said whether a part of a layer is trained.

A layer is told whether it is trained by parameters of known names. One that asks by
another name, or passes nothing on, would be evaluated in training, or the reverse, and
nobody would doubt its numbers. So what each dropout, each batch norm and each attention
with dropout does is compared with what is meant. Where that differs, somebody may have
written it down: a constant, an attribute, an argument. Or a parameter on the way was
left open, and its default decided. Which of them it was is found by trying: the layer
is traced again with the parameter filled, and nothing but the answer is kept.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from . import _batchnorm, _bridge, _skip, _switches
from ._watch import Call, Fills, Met, Place, Record, others, watching

PyTree = Any
Apply = Callable[..., tuple[PyTree, dict[str, PyTree]]]

# What JAX has traced before it does not run again, unless this differs. What was met
# in training once was compared then, and so in evaluation.
_seen = jax.make_user_context()
_numbers = itertools.count(2)


class Looking(NamedTuple):
    """How all calls inside a layer are seen.

    Attributes:
      scope: the scope in which they are.
      needed: whether a part of the layer may be one that training should switch on.
    """

    scope: Callable[[], AbstractContextManager[Any]]
    needed: Callable[[], bool]


def watched(
    apply: Apply,
    listed: str = "",
    looking: Looking | None = None,
) -> Apply:
    """The ``apply`` of a layer, where it is asked whether it does what is meant.

    Args:
      apply: ``(variables, x, rngs, train) -> (y, changed)``.
      listed: how the layer calls its module, as ``"module"`` or ``"module.head"``;
        empty if it is not a method of a module.
      looking: how all calls inside the layer are seen, if they are not otherwise.

    Returns:
      The same function.
    """

    def run(
        variables: PyTree, x: PyTree, rngs: PyTree, train: bool
    ) -> tuple[PyTree, dict[str, PyTree]]:
        rehearsal = _skip.rehearsal()

        def again(fills: Fills) -> Record:
            record = Record(train, fills)

            def call(*args: PyTree) -> PyTree:
                with (
                    rehearsal(),
                    _batchnorm.recording(),
                    watching(record, _bridge.intercept),
                ):
                    return apply(*args, train)

            with _seen(next(_numbers)), looking.scope() if looking else nullcontext():
                try:
                    record.y, _ = jax.eval_shape(call, variables, x, rngs)
                except Exception:  # what it says depends on what was filled
                    record.failed = True
            return record

        record = Record(train)
        try:
            with _seen(int(train)), watching(record, _bridge.intercept):
                y, changed = apply(variables, x, rngs, train)
        except Exception as error:
            seen = record.wrong or record.thawed
            if faults := _faults(record, again) if seen else []:
                raise _ask(faults, train, listed) from error
            raise
        hidden = train and looking is not None and looking.needed()
        if faults := _faults(record, again, hidden):
            raise _ask(faults, train, listed)
        return y, changed

    return run


# ------------------------------------------------------------------ what decided it


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


class _Trials:
    """What a layer does where parameters are filled that nobody filled.

    Args:
      again: traces the layer with parameters filled.
    """

    def __init__(self, again: Callable[[Fills], Record]) -> None:
        self._again = again
        self._known: dict[tuple[Place, str], list[tuple[Any, Record]]] = {}

    def of(self, call: Call, name: str) -> list[tuple[Any, Record]]:
        """The values that a parameter may take, and what was seen with each."""
        known = call.place, name
        if known not in self._known:
            self._known[known] = [
                (value, self._again({call.place: {name: value}}))
                for value in others(call.left_open[name])
            ]
        return self._known[known]


def _faults(
    record: Record, again: Callable[[Fills], Record], hidden: bool = False
) -> list[Fault]:
    """What of a layer does not do what is meant, because nobody said it.

    Args:
      record: what was seen of it.
      again: traces it again, with parameters filled, and sees all its calls.
      hidden: whether calls that were not seen may be such as leave something open.
    """
    thawed = [(met.kind, met.path) for met in record.thawed]
    names = ", ".join(
        f"{name}={_switches.switches(False)[name]}" for name in sorted(record.told)
    )
    faults = [Fault(thawed, None, names, True, False)] if thawed else []
    if not record.wrong and not hidden and not _switchable(record):
        return faults
    base, trials = again({}), _Trials(again)
    found: dict[tuple[Place, str], Fault] = {}

    def add(path: Place, kind: str, call: Call, name: str, right: Any) -> None:
        fault = Fault([], call, name, call.left_open[name], right)
        found.setdefault((call.place, name), fault).parts.append((kind, path))

    for at, met in base.wrong.items():
        for call, name in _suspects(met):
            tried = trials.of(call, name)
            right = [v for v, other in tried if _mends(at, base, other, name)]
            if right:
                add(met.path, met.kind, call, name, right[0])
                break
    for call, name in _switchable(base, again):
        for value, other in trials.of(call, name):
            for path, kind in other.active - base.active:
                add(path, kind, call, name, value)
    return [*faults, *found.values()]


def _switchable(
    record: Record, again: Callable[[Fills], Record] | None = None
) -> list[tuple[Call, str]]:
    """Which parameters may switch on in training what was not met.

    Such as ``if train: x = dropout(x)``. Most switch on nothing: filling all at once
    tells.
    """
    found = [
        (call, name)
        for call in record.calls.values()
        if record.train
        for name, default in call.left_open.items()
        if isinstance(default, bool)
        and not call.told
        and next((c.told for c in reversed(call.parents) if c.told), {True}) != {False}
    ]
    if not found or again is None:
        return found
    fills: dict[Place, dict[str, Any]] = {}
    for call, name in found:
        fills.setdefault(call.place, {})[name] = not call.left_open[name]
    together = again(fills)
    return found if together.failed or together.active - record.active else []


def _suspects(met: Met) -> list[tuple[Call, str]]:
    """Which parameters may have decided what a dropout or a batch norm does.

    Whoever says the nearest it takes it upon him.
    """
    found: list[tuple[Call, str]] = []
    for call in reversed(met.calls):
        if call.told:
            return [] if met.trained in call.told else found
        found += [(call, name) for name in call.left_open]
    return found


def _mends(at: Place, base: Record, other: Record, name: str) -> bool:
    """Whether what was seen with a parameter filled is what is meant.

    Args:
      at: the dropout or the batch norm that does not do what is meant.
      base: what was seen with nothing filled.
      other: what was seen with the parameter filled.
      name: the parameter.
    """
    if at in other.met:
        return other.met[at].trained == other.train
    known = name in _switches.MISNAMED or name in _switches.switches(True)
    if other.failed:  # a transformation, say, that takes no such argument
        return known
    # In evaluation, not to run is to do nothing.
    return not other.train and (known or _leaves_all_else(base, other))


def _leaves_all_else(base: Record, other: Record) -> bool:
    """Whether only dropouts and batch norms, and what holds them, do not run.

    What says whether a layer is trained leaves the rest as it is; a parameter that does
    not, such as ``features_only``, is for something else.
    """
    gone = [met for at, met in base.met.items() if at not in other.met]
    paths = {met.path for met in gone}
    places = {call.place for met in gone for call in met.calls}
    return jax.tree.flatten(base.y) == jax.tree.flatten(other.y) and all(
        place[0] in paths or place in places
        for place in base.calls.keys() - other.calls.keys()
    )


# ---------------------------------------------------------------------- what to say


def _ask(faults: list[Fault], train: bool, listed: str) -> ValueError:
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
    meant = f"{'to freeze it' if train else 'if that is meant'}, {{}}{name}={default!r}"
    does = "does what evaluation does" if train else "does what training does"
    what = (
        f"{_parts(fault)} {does}, as nobody fills {name}={fault.default!r} of "
        f"{_named(path, kind)}.{method}; "
    )
    line = "jpipe.layer(module, lambda module, x"
    if listed and not call.parents:
        return (
            f"{what}list {line}, train: {listed}(x, {told})); "
            + meant.format(f"{line}: {listed}(x, ")
            + "))"
        )
    if not call.parents:
        return (
            f"{what}let the function that calls it name train, and write {told} "
            f"there; {meant.format('')}"
        )
    around, around_kind, *_ = call.parents[-1].place
    if around_kind != "Sequential":
        where = _named(around, around_kind)
        return f"{what}where {where} calls it, write {told}; {meant.format('')}"
    alone = f"and this as {line}, train: module(x, {told}))"
    if name in _switches.switches(True):
        alone = f"where this is told {name}"
    return (
        f"{what}list what the Sequential holds one by one, {alone}; "
        + meant.format(f"{line}: module(x, ")
        + "))"
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
