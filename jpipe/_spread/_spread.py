"""Functions of trees that are spread over the devices of a pipeline."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from .._instructions._graph import NOWHERE, OUTSIDE, Graph, Place
from .._instructions._program import Program
from .._instructions._sharding import WHOLE
from .._instructions._transfer import Device, devices_of, lies
from .._jaxprs import _jaxpr
from .._layers._stage import shapes
from .._processes._elsewhere import is_copied
from .._run import _signature, _variables
from .._run._context import outside_of_meshes
from ._homes import Home, homes, paths, places, shardings
from ._placed import Placed, Placement

PyTree = Any
# Of the specs of ``(args, kwargs)``, and the place of each leaf.
FindPlacement = Callable[[PyTree, Sequence[Home]], Placement]

# How many programs a function keeps.
_MOST = 64
# Whether such a function is being traced: another one inside is a part of it.
_tracing = ContextVar("tracing", default=False)


def _as_found(arguments: PyTree, at: Sequence[Home]) -> Placement:
    """Leaves belong where they are, and results where they are computed.

    What follows from nothing placed belongs where an argument of its path is.
    """
    found = [path[2:] for path in paths(arguments)]
    place = places(zip(found, at, strict=True))
    return Placement(at, lambda result: homes(result, place), stay=True)


class Spread:
    """A function evaluated where its arguments are, compiled once for each kind.

    Args:
      function: of any pytrees.
      devices: the places.
      donate: the positions of arguments that may be overwritten.
      static: the positions of arguments that are not pytrees of arrays.
      find_placement: where leaves and results belong.
      name: how profiles and errors call it.
      blame: what to say of an error that the function raises.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        devices: Sequence[Device],
        *,
        donate: Sequence[int] = (),
        static: Sequence[int] = (),
        find_placement: FindPlacement = _as_found,
        name: str,
        blame: str,
    ) -> None:
        self._function = function
        self._devices = tuple(dict.fromkeys(devices))
        self._donate = donate
        self._static = static
        self._find_placement = find_placement
        self._blame = blame
        self._name = name
        self._programs: dict[Any, tuple[Any, Program]] = {}

    @outside_of_meshes
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the function. Never waits."""
        if _tracing.get():
            return self._function(*args, **kwargs)
        traced, statics = self._split(args) if self._static else (args, ())
        leaves, tree = jax.tree.flatten((traced, kwargs))
        _variables.check_alive(leaves)
        tree, program = self._found(traced, kwargs, statics, leaves, tree)
        if self._donate:
            self._check_donated(leaves, (_whole(traced, statics), kwargs))
        return jax.tree.unflatten(tree, program(leaves))

    @outside_of_meshes
    def program(self, *args: Any) -> Program:
        """What a call with such arrays runs."""
        return self._found(args, {}, (), *jax.tree.flatten((args, {})))[1]

    def _found(
        self, args: Any, kwargs: Any, statics: Any, leaves: Sequence[Any], tree: Any
    ) -> tuple[Any, Program]:
        """The structure of the result, and the program."""
        kind = _signature.call(tree, leaves, [value for _, value in statics])
        known = self._programs
        if kind not in known:
            known[kind] = self._compile(args, kwargs, statics)
            if len(known) > _MOST:  # a function made anew at each call, say
                del known[next(iter(known))]
        return known[kind]

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The arguments without the static ones, and these with their positions."""
        static = {i % len(args) for i in self._static if -len(args) <= i < len(args)}
        statics = tuple((i, args[i]) for i in sorted(static))
        for i, value in statics:
            try:
                hash(value)
            except TypeError as error:
                error.add_note(f"argument {i} of {self._name} is in static_argnums")
                raise
        return tuple(x for i, x in enumerate(args) if i not in static), statics

    def _compile(
        self, args: Sequence[Any], kwargs: dict[str, Any], statics: Sequence[Any]
    ) -> tuple[Any, Program]:
        """The structure of the result, and the program; all checks are here."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        named = _whole(args, statics), kwargs
        _variables.check_concrete(leaves)
        self._check_leaves(named)
        stored = [
            leaf.devices() if getattr(leaf, "committed", False) else None
            for leaf in leaves
        ]
        number = {devices_of(device): i for i, device in enumerate(self._devices)}
        at = [number.get(frozenset(devices or ())) for devices in stored]
        how = [
            (lies(leaf, self._devices[home]) or WHOLE) if home is not None else WHOLE
            for leaf, home in zip(leaves, at, strict=True)
        ]
        flat = [_jaxpr.spec(jax.typeof(leaf)) for leaf in leaves]
        specs = jax.tree.unflatten(tree, flat)
        placed = Placed(
            self._traced(statics), specs, self._find_placement(specs, at), self._name
        )
        processes = [device.process_index for device in self._devices]
        graph = Graph(processes, devices=self._devices)
        arguments = [
            graph.argument(spec, _place(device, home), yes, each)
            for spec, device, home, yes, each in zip(
                flat, stored, at, self._donated(named), how, strict=True
            )
        ]
        inner = [
            (path[2:], leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(specs)
        ]
        outputs: list[Any] = placed.into(
            graph, arguments, shardings(placed.result, inner, how)
        )
        for i in placed.scalars:
            if graph.places[outputs[i]] >= 0:
                outputs[i] = graph.everywhere(outputs[i])
        return placed.tree, Program(graph, outputs, self._devices)

    def _traced(self, statics: Sequence[Any]) -> Callable[..., Any]:
        """``(args, kwargs)`` to the result, as the trace sees the function."""

        def traced(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            given = _whole(args, statics)
            for i, value in statics:
                given[i] = value
            token = _tracing.set(True)
            try:
                return self._function(*given, **kwargs)
            except Exception as error:
                error.add_note(f"{self._blame}; its arguments were {shapes(args)}")
                raise
            finally:
                _tracing.reset(token)

        return traced

    def _donated(self, arguments: PyTree) -> list[bool]:
        """Whether each leaf may be overwritten."""
        count = len(arguments[0])
        donated = {i % count for i in self._donate if -count <= i < count}
        return [
            path[0].idx == 0 and path[1].idx in donated for path in paths(arguments)
        ]

    def _check_donated(self, leaves: Sequence[Any], arguments: PyTree) -> None:
        """Checks that no array is given twice of which a program may overwrite one."""
        if len(set(map(id, leaves))) == len(leaves):
            return
        names = map(_told, paths(arguments))
        flat = list(zip(names, leaves, strict=True))
        twice = _variables.twice(flat, self._donated(arguments))
        if twice:
            raise ValueError(
                f"{'; '.join(twice)}: one array, which donate_argnums lets "
                f"{self._name} overwrite; give it a copy (jnp.copy), or do not donate"
            )

    def _check_leaves(self, arguments: PyTree) -> None:
        """Checks that each leaf is an array, or a number, in one place."""
        strange, sharded = [], []
        places = {devices_of(device): device for device in self._devices}
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            try:
                jax.typeof(leaf)
            except TypeError:
                strange.append(f"{_told(path)} is a {type(leaf).__name__}")
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) == 1:
                continue
            if is_copied(leaf):
                continue
            place = places.get(frozenset(leaf.devices()))
            if place is None or lies(leaf, place) is None:
                sharded.append(f"{_told(path)} is on {len(leaf.devices())} devices")
        if strange:
            raise TypeError(
                f"{self._name} takes pytrees of arrays and numbers; name what is none "
                f"in static_argnums: {'; '.join(strange)}"
            )
        if sharded:
            raise ValueError(
                f"{self._name} takes arrays that are each on one device, or on those "
                f"of one stage, in its mesh; type pipe.place(variables) or "
                f"jax.device_put(array, device): "
                f"{'; '.join(sharded)}"
            )


def _place(device: Any, home: Home) -> Place:
    """The place of a leaf; what is elsewhere is brought to whoever reads it."""
    if device is None:
        return NOWHERE
    return OUTSIDE if home is None else home


def _whole(args: Sequence[Any], statics: Sequence[tuple[int, Any]]) -> list[Any]:
    """The arguments at their positions, with nothing in place of static ones."""
    given = list(args)
    for i, _ in statics:
        given.insert(i, None)
    return given


def _told(path: Any) -> str:
    """The path of a leaf of ``(args, kwargs)``."""
    which, first, *rest = path
    start = f"argument {first.idx}" if which.idx == 0 else f"argument {first.key!r}"
    return start + jax.tree_util.keystr(tuple(rest))


def jit(
    function: Callable[..., Any],
    devices: Sequence[Device],
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
) -> Callable[..., Any]:
    """See `Pipeline.jit`."""
    if not callable(function):
        raise TypeError(
            f"pipe.jit takes a function, not a {type(function).__name__}; type "
            f"pipe.jit(f) or @pipe.jit"
        )
    donate, static = _numbers(donate_argnums), _numbers(static_argnums)
    if both := set(donate) & set(static):
        raise ValueError(
            f"donate_argnums and static_argnums both name {sorted(both)}; a static "
            f"argument has no memory to give"
        )
    name = getattr(function, "__name__", type(function).__name__)
    spread = Spread(
        function,
        devices,
        donate=donate,
        static=static,
        name=name,
        blame=f"raised by {name}, which pipe.jit traces as jax.jit does",
    )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return spread(*args, **kwargs)

    return run


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(argnums, Sequence):
        return tuple(map(operator.index, argnums))
    return (operator.index(argnums),)
