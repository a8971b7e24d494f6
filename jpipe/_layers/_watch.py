"""What dropouts and batch norms do, and who told them, seen while layers are traced.

Seen is each call of a method of a linen module, by `flax.linen.intercept_methods`, and
what `_nnx_watch` notes of nnx modules. At run time nothing of it is left.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flax import linen

from . import _switches, _traced
from ._others import others

Place = tuple[Any, ...]
# The parameters of calls that are filled to see what they decide, by call.
Fills = Mapping[Place, Mapping[str, Any]]


class Call(NamedTuple):
    """A call of a method of a module, inside a layer.

    Attributes:
      place: what tells it from other calls: the path and the class of the module, the
        method, and how manyth call of it this is.
      told: what somebody said, by an argument or an attribute, about whether it is
        trained; both, if it cannot be known; nothing, if nobody did.
      left_open: the parameters that nobody filled, with what was taken instead.
      parents: the calls around it, the outermost first.
    """

    place: Place
    told: frozenset[bool]
    left_open: Mapping[str, Any]
    parents: tuple["Call", ...]


@dataclass
class Met:
    """A dropout or a batch norm that ran.

    Attributes:
      path: where it is in the layer.
      kind: what it is.
      trained: whether it did what is done in training.
      frozen: whether the user set it to evaluation before.
      calls: the calls around it, the outermost first.
    """

    path: Place
    kind: str
    trained: bool
    frozen: bool
    calls: tuple[Call, ...]


@dataclass
class Record:
    """What was seen of a layer in one trace.

    Attributes:
      train: whether this is training.
      fills: the parameters that are filled to see what they decide.
      told: the switches that the layer was given, by name.
      calls: the calls met, by their places.
      stack: those that are running.
      met: the dropouts and batch norms that ran, with how manyth time.
      failed: whether the trace ended in an exception.
      traced: what the layer does, if it was traced for that.
    """

    train: bool
    fills: Fills = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    calls: dict[Place, Call] = field(default_factory=dict)
    stack: list[Call] = field(default_factory=list)
    met: dict[Place, Met] = field(default_factory=dict)
    failed: bool = False
    traced: _traced.Traced | None = None

    @property
    def wrong(self) -> dict[Place, Met]:
        """Those that do not do what is meant, but for what the user froze."""
        return {
            at: met
            for at, met in self.met.items()
            if met.trained != self.train and not (self.train and met.frozen)
        }

    @property
    def thawed(self) -> list[Met]:
        """Those that the user froze and that what the layer is told has trained."""
        if not self.train or not self.told:
            return []
        return [met for met in self.met.values() if met.frozen and met.trained]

    @property
    def active(self) -> set[tuple[Place, str]]:
        """Those that ran as in training: the paths, and what they are."""
        return {(met.path, met.kind) for met in self.met.values() if met.trained}


_current: ContextVar[Record | None] = ContextVar("jpipe_watch", default=None)


@contextmanager
def watching(record: Record, also: Callable[..., Any]) -> Iterator[None]:
    """The scope in which a layer is seen; ``also`` intercepts methods of linen too."""
    token = _current.set(record)
    try:
        with linen.intercept_methods(_intercept), linen.intercept_methods(also):
            yield
    finally:
        _current.reset(token)


def current() -> Record | None:
    """What is seen of the layer that is being traced, if one is."""
    return _current.get()


def told(names: Iterable[str]) -> None:
    """Says by which switches the layer is told whether it is trained."""
    if record := _current.get():
        record.told = frozenset(names) & set(_switches.switches(True))


# -------------------------------------------------------------------- what was seen

# What is watched of linen: the switch by which it is told, and how much it drops.
_LINEN: tuple[tuple[type[linen.Module], str, str, str], ...] = (
    (linen.Dropout, "dropout", "deterministic", "rate"),
    (linen.BatchNorm, "batch norm", "use_running_average", ""),
    (linen.MultiHeadDotProductAttention, "attention", "deterministic", "dropout_rate"),
)


def _intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: notes each call of a method."""
    record, module = _current.get(), context.module
    if record is None or module.scope is None:  # of no module that has variables
        return call(*args, **keywords)
    chosen = [
        _switches.means_training(name, value)
        for name in _switches.switches(True)
        if _switches.is_set(module, name)
        and not _switches.is_default(module, name)
        and isinstance(value := getattr(module, name), _switches.BOOL)
    ]
    path = tuple(module.path)
    if context.method_name == "__call__":
        for kind, text, switch, rate in _LINEN:
            if isinstance(module, kind):
                bound = bind(context.orig_method, args, keywords)
                value = bound and bound.arguments.get(switch)
                value = getattr(module, switch) if value is None else value
                note(record, path, text, value, getattr(module, rate, 1.0))
                break
    own = getattr(context.orig_method, "func", context.orig_method)
    return enter(
        record,
        (path, type(module).__name__, context.method_name),
        chosen,
        own,
        bind(context.orig_method, args, keywords),
        lambda args, keywords: call(*args, **keywords),
        (args, keywords),
    )


def note(
    record: Record, path: Place, kind: str, switch: Any, rate: Any, frozen: bool = False
) -> None:
    """Says that a dropout or a batch norm runs, and how its switch stands."""
    if not isinstance(switch, _switches.BOOL) or (
        isinstance(rate, int | float) and rate == 0
    ):
        return
    count = sum(met.path == path for met in record.met.values())
    met = Met(path, kind, not switch, frozen, tuple(record.stack))
    record.met[*path, count] = met


def enter(
    record: Record,
    what: Place,
    chosen: list[bool],
    function: Callable[..., Any],
    bound: inspect.BoundArguments | None,
    run: Callable[[Any, Any], Any],
    given: tuple[Any, Any],
) -> Any:
    """Runs a call of a method of a module, as a part of what is seen.

    Args:
      record: what was seen so far.
      what: the path and the class of the module, and the method.
      chosen: what the attributes of the module say about whether it is trained.
      function: the method.
      bound: its arguments; ``None`` if they do not fit.
      run: calls it with arguments by position and by name.
      given: those that it was given.

    Returns:
      Its result.
    """
    if bound is None:
        return run(*given)
    place = (*what, sum(place[:-1] == what for place in record.calls))
    call = Call(
        place,
        _told(bound) or frozenset(chosen),
        {} if is_flax(function) else _left_open(bound),
        tuple(record.stack),
    )
    record.calls[place] = call
    if place in record.fills:
        given = _filled(bound, record.fills[place])
    record.stack.append(call)
    try:
        return run(*given)
    finally:
        record.stack.pop()


def is_flax(function: Any) -> bool:
    """Whether a function or a class is Flax's own."""
    own = getattr(inspect.unwrap(function), "__module__", None) or ""
    return own.split(".")[0] == "flax"


def bind(
    function: Callable[..., Any], args: Any, keywords: Any
) -> inspect.BoundArguments | None:
    """The arguments of a call by name; ``None`` if they do not fit."""
    try:
        return inspect.signature(function).bind(*args, **keywords)
    except (TypeError, ValueError):
        return None


def _told(bound: inspect.BoundArguments) -> frozenset[bool]:
    said: set[bool] = set()
    for name in _switches.switches(True):
        value = bound.arguments.get(name)
        if isinstance(value, _switches.BOOL):
            said.add(_switches.means_training(name, value))
        elif value is not None:  # a tracer, say
            said |= {True, False}
    return frozenset(said)


def _left_open(bound: inspect.BoundArguments) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in bound.signature.parameters.items()
        if name not in bound.arguments and others(parameter.default)
    }


def _filled(
    bound: inspect.BoundArguments, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with others; by position where they can be, as for nn.remat."""
    bound.arguments.update(values)
    last = max(list(bound.signature.parameters).index(name) for name in values)
    for parameter in list(bound.signature.parameters.values())[:last]:
        if parameter.default is not inspect.Parameter.empty:
            bound.arguments.setdefault(parameter.name, parameter.default)
    return bound.args, bound.kwargs
