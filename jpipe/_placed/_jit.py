"""`pipe.jit`: functions of trees whose leaves are on several devices, compiled."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._arguments import _signature, _stacked, _variables
from .._arguments._cache import RecentCache
from .._arguments._static import StaticArgument, without_statics
from .._instructions._graph import NOWHERE, OUTSIDE, Graph, Place
from .._instructions._program import Program
from .._instructions._sharding import WHOLE, Sharding
from .._instructions._transfer import Device, devices_of, sharding_of
from .._jaxprs import _jaxpr
from .._layers._text import shape_text
from .._messages import raise_all, source_text
from .._processes._arrays import is_replicated
from ._mesh_context import outside_of_meshes
from ._mirrored_places import ArgumentLeaf
from ._placed_function import LeafPlacement, PlacedFunction, place_results

PyTree = Any
# The arguments of a call: by position, and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# ``leaves of the arguments -> places`` of these and of the leaves of the result.
Rule = Callable[[Sequence[ArgumentLeaf]], LeafPlacement]

# True while such a function is traced: calls of others in it are a part of its trace.
_tracing = ContextVar("tracing", default=False)


@dataclass(eq=False, repr=False)
class Jitted:
    """A function evaluated where its arguments are, compiled once per signature.

    Attributes:
      function: a function of any pytrees.
      devices: the devices of the places.
      name: the name in profiles and errors.
      blame: a note for an error that the function raises.
      donate: the positions of arguments that may be overwritten.
      rule: the places of leaves and results.
    """

    function: Callable[..., Any]
    devices: Sequence[Device]
    name: str
    blame: str
    donate: Sequence[int] = ()
    rule: Rule = place_results

    def __post_init__(self) -> None:
        self.devices = tuple(dict.fromkeys(self.devices))
        # devices of an array -> place
        self._place_of = {
            devices_of(device): place for place, device in enumerate(self.devices)
        }
        # signature of the arguments -> the function lowered for it
        self._lowered = RecentCache[Any, _Lowered]()

    @outside_of_meshes
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the function. Never waits."""
        if _tracing.get():
            args, kwargs = without_statics((args, kwargs))
            return self.function(*args, **kwargs)

        arguments = (args, kwargs)
        leaves, structure = jax.tree.flatten(arguments)
        _variables.check_alive(leaves)
        signature = _signature.call_signature(structure, leaves)
        if signature not in self._lowered:
            _variables.check_concrete(leaves)
            self._lowered[signature] = self._lower(_stacked.split_placed(arguments))
        lowered = self._lowered[signature]
        if self.donate and len(set(map(id, leaves))) < len(leaves):
            self._check_donated(arguments)
        if not lowered.has_pieces:
            return lowered.result_structure.unflatten(lowered.program(leaves))
        leaves = jax.tree.leaves(_stacked.split_placed(arguments))
        result = lowered.result_structure.unflatten(lowered.program(leaves))
        return _stacked.join_pieces(result)

    def _lower(self, arguments: Arguments) -> "_Lowered":
        """Checks arguments, and writes the program for them.

        XLA compiles it when it runs first.

        Args:
          arguments: the arguments, with nodes for leaves in pieces.
        """
        leaves = self._located(arguments)
        structure = jax.tree.structure(arguments)
        specs = jax.tree.unflatten(structure, [leaf.value for leaf in leaves])

        @functools.wraps(self.function)
        def traced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self._traced(args, kwargs)

        function = PlacedFunction(traced, specs, self.rule(leaves), self.name)
        graph = Graph(self.devices)
        is_donated = self._donated(leaves, arguments)
        inputs = [
            leaf.add_to(graph, donated=donated)
            for leaf, donated in zip(leaves, is_donated, strict=True)
        ]
        outputs: list[Any] = function.into(graph, inputs)
        results, result_structure = jax.tree.flatten(function.result)
        for i, (spec, place) in enumerate(zip(results, function.places, strict=True)):
            # Each process may log a scalar, so each gets a copy.
            is_computed = graph.places[outputs[i]] >= 0
            if place < 0 and is_computed and not spec.shape:
                outputs[i] = graph.bring_to_processes(outputs[i])
        has_pieces = bool(_stacked.pieces_of_leaves(specs))
        return _Lowered(result_structure, Program(graph, outputs), has_pieces)

    def _traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function, as it is traced."""
        token = _tracing.set(True)
        try:
            positional, named = without_statics((args, kwargs))
            return self.function(*positional, **named)
        except Exception as error:
            arguments = (*args, kwargs) if kwargs else args
            error.add_note(f"{self.blame}; its arguments were {shape_text(arguments)}")
            raise
        finally:
            _tracing.reset(token)

    def _donated(
        self, leaves: Sequence[ArgumentLeaf], arguments: Arguments
    ) -> list[bool]:
        """One bool per leaf; True if it may be overwritten."""
        num_args = len(arguments[0])
        donated = {i % num_args for i in self.donate if -num_args <= i < num_args}
        return [leaf.argument_key in donated for leaf in leaves]

    def _check_donated(self, arguments: Arguments) -> None:
        """Checks that no array which may be overwritten stands twice in arguments."""
        leaves = _leaves(arguments)
        named_leaves = [(leaf.name, leaf.value) for leaf in leaves]
        is_donated = self._donated(leaves, arguments)
        duplicates = _variables.overwritten_twice(named_leaves, is_donated)
        if duplicates:
            raise ValueError(
                f"{'; '.join(duplicates)}: one array, which donate_argnums lets "
                f"{self.name} overwrite; give it a copy (jnp.copy), or do not donate"
            )

    def _located(self, arguments: Arguments) -> list[ArgumentLeaf]:
        """Specs of the leaves of the arguments, with their places.

        Raises:
          TypeError: if one is neither an array nor a number.
          ValueError: if one is on devices that are not those of a place.
        """
        leaves: list[ArgumentLeaf] = []
        not_arrays: list[str] = []
        misplaced: list[str] = []
        for leaf in _leaves(arguments):
            try:
                spec = _jaxpr.spec(jax.typeof(leaf.value))
            except TypeError:
                not_arrays.append(f"{leaf.name} is a {type(leaf.value).__name__}")
                continue
            place, sharding = self._place(leaf.value)
            if sharding is None:
                num_devices = len(leaf.value.devices())
                misplaced.append(f"{leaf.name} is on {num_devices} devices")
            else:
                leaves.append(leaf._replace(value=spec, place=place, sharding=sharding))
        raise_all(
            f"{self.name} takes pytrees of arrays and numbers; name what is none in "
            f"static_argnums",
            not_arrays,
            error=TypeError,
        )
        raise_all(
            f"{self.name} takes arrays that are each on one device, or on those of "
            f"one stage, in its mesh; type pipe.place(variables) or "
            f"jax.device_put(array, device)",
            misplaced,
        )
        return leaves

    def _place(self, leaf: Any) -> tuple[Place, Sharding | None]:
        """The place of a leaf, and its sharding there; ``None`` if it has none.

        A leaf on devices of no place is outside: each reader gets a copy.
        """
        if not getattr(leaf, "committed", False):
            return NOWHERE, WHOLE
        devices = frozenset(leaf.devices())
        place = self._place_of.get(devices, OUTSIDE)
        sharding = sharding_of(leaf, self.devices[place]) if place >= 0 else None
        if sharding is None and (len(devices) == 1 or is_replicated(leaf)):
            sharding = WHOLE
        return place, sharding


class _Lowered(NamedTuple):
    """A function lowered for arguments of one signature.

    Attributes:
      result_structure: the structure of the result, with nodes for leaves in pieces.
      program: ``leaves of the arguments -> leaves of the result``.
      has_pieces: True if arguments are in pieces.
    """

    result_structure: Any
    program: Program
    has_pieces: bool


def _leaves(arguments: Arguments) -> list[ArgumentLeaf]:
    """The leaves of arguments, in order."""
    leaves: list[ArgumentLeaf] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        _, key, *inner_path = path
        argument_key = getattr(key, "idx", getattr(key, "key", ""))
        leaves.append(ArgumentLeaf(argument_key, tuple(inner_path), leaf))
    return leaves


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
    donate = _as_tuple(donate_argnums)
    static = _as_tuple(static_argnums)
    if both := set(donate) & set(static):
        raise ValueError(
            f"donate_argnums and static_argnums both name {sorted(both)}; a static "
            f"argument has no memory to give"
        )
    name = getattr(function, "__name__", type(function).__name__)
    jitted = Jitted(
        function,
        devices,
        name=name,
        blame=f"raised by {source_text(function)}, traced by pipe.jit as by jax.jit",
        donate=donate,
    )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return jitted(*_with_statics(args, static, name), **kwargs)

    return run


def _with_statics(
    args: Sequence[Any], static: Sequence[int], name: str
) -> Sequence[Any]:
    """The arguments, those at the static positions as `StaticArgument`."""
    args_with_statics = list(args)
    for i in static:
        if -len(args) <= i < len(args):
            position = i % len(args)
            note = f"argument {position} of {name} is in static_argnums"
            args_with_statics[position] = StaticArgument.of(args[i], note)
    return args_with_statics


def _as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(argnums, Sequence):
        return tuple(map(operator.index, argnums))
    return (operator.index(argnums),)
