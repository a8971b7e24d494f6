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

from . import _batchnorm, _bridge, _skip, _switches, _traced
from ._ask import Fault, ask
from ._others import may_switch, others
from ._watch import Call, Fills, Met, Place, Record, watching

PyTree = Any
Apply = Callable[..., tuple[PyTree, dict[str, PyTree]]]

# What JAX has traced before it does not run again, unless this differs. What was met
# in training once was compared then, and so in evaluation; after a question it differs,
# as what was asked about is asked about again.
_seen = jax.make_user_context()
_numbers = itertools.count()
_number = {train: next(_numbers) for train in (False, True)}


class Looking(NamedTuple):
    """How all calls inside a layer are seen.

    Attributes:
      scope: the scope in which they are.
      needed: whether a part of the layer may be such as training, or evaluation,
        should switch.
    """

    scope: Callable[[], AbstractContextManager[Any]]
    needed: Callable[[bool], bool]


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
                    record.traced = _traced.trace(call, variables, x, rngs)
                except Exception:  # what it says depends on what was filled
                    record.failed = True
            return record

        record = Record(train)
        try:
            with _seen(_number[train]), watching(record, _bridge.intercept):
                y, changed = apply(variables, x, rngs, train)
        except Exception as error:
            seen = record.wrong or record.thawed
            if faults := _faults(record, again) if seen else []:
                raise _asked(faults, train, listed) from error
            raise
        hidden = looking is not None and looking.needed(train)
        if faults := _faults(record, again, hidden):
            raise _asked(faults, train, listed)
        return y, changed

    return run


def _asked(faults: list[Fault], train: bool, listed: str) -> ValueError:
    """The question; what it is about is met anew by the next trace."""
    _number[train] = next(_numbers)
    return ask(faults, train, listed)


# ------------------------------------------------------------------ what decided it


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
    if not (record.wrong or hidden or _switchable(record) or _untold(record)):
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
            for path, kind in _switched_on(base, other):
                add(path, kind, call, name, value)
    for call, name in _untold(base):
        if (call.place, name) in found:
            continue
        right = _switches.meant(name, base.train)
        other = next(made for value, made in trials.of(call, name) if value == right)
        if not other.failed and _program(other) != _program(base):
            add(call.place[0] or (), call.place[1], call, name, right)
    return [*faults, *found.values()]


def _program(record: Record) -> Any:
    return record.traced and record.traced.program


def _switched_on(base: Record, other: Record) -> set[tuple[Place, str]]:
    """What runs as in training, is written or drawn where a parameter is filled."""
    if (found := other.active - base.active) or not (base.traced and other.traced):
        return found
    written = other.traced.written - base.traced.written
    found = {(path, "what writes") for path in written}
    if other.traced.draws > base.traced.draws:
        found.add(((), "what draws random numbers"))
    return found


def _untold(record: Record) -> list[tuple[Call, str]]:
    """Which parameters of known names say what is not meant.

    What they decide may be neither a dropout nor a norm of Flax. Where nnx is told
    nothing, the attributes of its modules say it.
    """
    return [
        (call, name)
        for call in record.calls.values()
        for name, default in call.left_open.items()
        if _switches.is_amiss(name, default, record.train)
        and not (default is None and call.place[0] is None)
        and _is_open(call, record.train)
    ]


def _is_open(call: Call, train: bool) -> bool:
    """Whether nobody told a call what it is, and what is around it is as is meant."""
    around = (outer.told for outer in reversed(call.parents) if outer.told)
    return not call.told and train in next(around, {train})


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
        if record.train and _is_open(call, True)
        for name, default in call.left_open.items()
        if may_switch(default)
    ]
    if not found or again is None:
        return found
    fills: dict[Place, dict[str, Any]] = {}
    for call, name in found:
        fills.setdefault(call.place, {})[name] = others(call.left_open[name])[0]
    together = again(fills)
    return found if together.failed or _switched_on(record, together) else []


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
    if not (base.traced and other.traced):
        return False
    return jax.tree.flatten(base.traced.y) == jax.tree.flatten(other.traced.y) and all(
        place[0] in paths or place in places
        for place in base.calls.keys() - other.calls.keys()
    )
