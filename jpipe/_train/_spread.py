"""Functions of trees that are spread over the devices of a pipeline."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._functions._weights import is_inexact
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
from ._optimizer import explained
from ._placed import Placed, Placement
from ._step import check_optimizer

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
        kind = _signature.call(tree, leaves, [value for _, value in statics])
        program = self._programs.get(kind)
        if program is None:
            program = self._compile(traced, kwargs, statics)
            self._programs[kind] = program
            if len(self._programs) > _MOST:  # a function made anew at each call, say
                del self._programs[next(iter(self._programs))]
        if self._donate:
            self._check_donated(leaves, (_whole(traced, statics), kwargs))
        tree, program = program
        return jax.tree.unflatten(tree, program(leaves))

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


def optimizer(
    tx: Any, devices: Sequence[Device]
) -> optax.GradientTransformationExtraArgs:
    """See `Pipeline.optimizer`."""
    tx = check_optimizer(tx)
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    full = optax.with_extra_args_support(tx)

    def init_free(params: PyTree) -> PyTree:
        with explained("tx.init is given the parameters alone"):
            return full.init(_floating(params))

    def update_free(
        functions: Sequence[tuple[str, Any]],
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        extra: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        free = None if params is None else _floating(params)
        with explained(
            "what an optimizer needs beside gradients, state and parameters is given "
            "by name: tx.update(grads, state, params, value=loss)"
        ):
            updates, state = full.update(
                _floating(grads), state, free, **extra, **dict(functions)
            )
        return _with_integers(updates, grads, params), state

    spread_init = Spread(
        init_free,
        devices,
        find_placement=_of_init,
        name="optimizer_init",
        blame="raised by tx.init",
    )
    spread_update = Spread(
        update_free,
        devices,
        static=(0,),
        find_placement=_of_update,
        name="optimizer_update",
        blame="raised by tx.update",
    )

    def init(params: PyTree) -> PyTree:
        return spread_init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        functions = {name: value for name, value in extra.items() if _is_static(value)}
        given = {name: value for name, value in extra.items() if name not in functions}
        return spread_update(tuple(functions.items()), updates, state, params, given)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_static(value: Any) -> bool:
    """Whether something is a function, not a pytree that can be called."""
    return callable(value) and jax.tree.leaves(value) == [value]


def _floating(tree: PyTree) -> PyTree:
    """The tree with nothing in place of integers, which are not parameters."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def _with_integers(updates: PyTree, grads: PyTree, params: PyTree) -> PyTree:
    """Updates with zeros in place of what `_floating` left out."""
    if all(map(is_inexact, jax.tree.leaves((grads, params)))):
        return updates
    if params is None:
        raise ValueError(
            "a gradient of integers says neither their dtype nor their device; give "
            "the parameters too: tx.update(grads, state, params)"
        )
    return jax.tree.map(
        lambda own, leaf: (
            own if leaf is None or is_inexact(leaf) else jnp.zeros_like(leaf)
        ),
        updates,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


def _of_init(arguments: PyTree, at: Sequence[Home]) -> Placement:
    """The state of an optimizer is where its parameters are."""
    found = [path[2:] for path in paths(arguments)]
    place = places(zip(found, at, strict=True))
    return Placement(at, lambda state: homes(state, place))


def _of_update(arguments: PyTree, at: Sequence[Home]) -> Placement:
    """Updates and state are where the parameters are, or the gradients.

    A leaf of the state that belongs to none of them, such as a count, belongs to all.
    """
    grads, state, params, _ = range(4)
    flat = [(path[1].idx, path[2:]) for path in paths(arguments)]
    place = places(
        (path, home)
        for (number, path), home in zip(flat, at, strict=True)
        if number in (grads, params)
    )
    own = iter(homes(arguments[0][state], place))
    settled = [
        None if number == state and next(own) is None else home
        for (number, _), home in zip(flat, at, strict=True)
    ]
    return Placement(settled, lambda result: homes(result, place))


def step(tx: Any, devices: Sequence[Device], donate: bool) -> Spread:
    """``(grads, opt_state, params) -> (params, opt_state)``, where these are.

    Args:
      tx: the optimizer.
      devices: the places.
      donate: whether state and parameters are overwritten, beside the gradients.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        free = jax.tree.map(
            lambda grad, own: None if grad is None else own,
            grads,
            params,
            is_leaf=_is_none,
        )
        with explained("tx.update is given gradients, state and parameters"):
            updates, state = tx.update(grads, state, free)
        new = optax.apply_updates(free, updates)
        return jax.tree.map(
            lambda own, old: old if own is None else own, new, params, is_leaf=_is_none
        ), state

    return Spread(
        update,
        devices,
        donate=(0, 1, 2) if donate else (0,),
        find_placement=_of_update,
        name="update",
        blame="raised by tx.update",
    )


def chosen(params: PyTree, marks: PyTree) -> PyTree:
    """Parameters with nothing in place of those that are not trained."""
    return jax.tree.map(lambda leaf, yes: leaf if yes else None, params, marks)


def _is_none(leaf: Any) -> bool:
    return leaf is None
