"""`pipe.jit`: functions of trees whose leaves are on several devices, compiled."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from .._faults import refuse
from .._instructions._graph import NOWHERE, OUTSIDE, Graph, Place
from .._instructions._program import Program
from .._instructions._sharding import WHOLE, Sharding
from .._instructions._transfer import Device, devices_of, sharding_of
from .._jaxprs import _jaxpr
from .._layers._stage import shapes
from .._processes._elsewhere import is_copied
from .._run import _signature, _variables
from .._run._context import outside_of_meshes
from .._run._recent import Recent
from ._by_path import Leaf
from ._function import PlacedFunction, Placement, where_computed
from ._static import Static, without_statics

PyTree = Any
# What a function is given: by position, and by name.
Given = tuple[tuple[Any, ...], dict[str, Any]]
# Of the leaves of the arguments, where they and the results belong.
Rule = Callable[[Sequence[Leaf]], Placement]

# Whether such a function is being traced: another one inside is a part of it.
_tracing = ContextVar("tracing", default=False)


@dataclass(eq=False, repr=False)
class Jitted:
    """A function evaluated where its arguments are, compiled once for each kind.

    Attributes:
      function: of any pytrees.
      devices: the places.
      name: how profiles and errors call it.
      blame: a note for an error that the function raises.
      donate: the positions of arguments that may be overwritten.
      rule: where leaves and results belong.
    """

    function: Callable[..., Any]
    devices: Sequence[Device]
    name: str
    blame: str
    donate: Sequence[int] = ()
    rule: Rule = where_computed

    def __post_init__(self) -> None:
        self.devices = tuple(dict.fromkeys(self.devices))
        self._number = {devices_of(own): i for i, own in enumerate(self.devices)}
        # The structure of the result, and the program, for each kind of arguments.
        self._programs = Recent[Any, tuple[Any, Program]]()

    @outside_of_meshes
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the function. Never waits."""
        if _tracing.get():
            args, kwargs = without_statics((args, kwargs))
            return self.function(*args, **kwargs)
        given = args, kwargs
        leaves, tree = jax.tree.flatten(given)
        _variables.check_alive(leaves)
        kind, known = _signature.call(tree, leaves), self._programs
        if kind not in known:
            known[kind] = self._compile(given)
        tree, program = known[kind]
        if self.donate and len(set(map(id, leaves))) < len(leaves):
            self._check_donated(given)
        return jax.tree.unflatten(tree, program(leaves))

    def _compile(self, given: Given) -> tuple[Any, Program]:
        """The structure of the result, and the program; all checks are here."""
        _variables.check_concrete(jax.tree.leaves(given))
        leaves, tree = self._located(given), jax.tree.structure(given)
        specs = jax.tree.unflatten(tree, [leaf.value for leaf in leaves])
        function = PlacedFunction(self._traced, specs, self.rule(leaves), self.name)
        graph = Graph(self.devices)
        pairs = zip(leaves, self._donated(leaves, given), strict=True)
        arguments = [leaf.argument(graph, donated) for leaf, donated in pairs]
        outputs: list[Any] = function.into(graph, arguments)
        results, tree = jax.tree.flatten(function.result)
        for i, (leaf, place) in enumerate(zip(results, function.places, strict=True)):
            # What is logged is wanted in each process.
            if place < 0 and not leaf.shape and graph.places[outputs[i]] >= 0:
                outputs[i] = graph.everywhere(outputs[i])
        return tree, Program(graph, outputs)

    def _traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function as the trace sees it."""
        token = _tracing.set(True)
        try:
            given, named = without_statics((args, kwargs))
            return self.function(*given, **named)
        except Exception as error:
            listed = shapes((*args, kwargs) if kwargs else args)
            error.add_note(f"{self.blame}; its arguments were {listed}")
            raise
        finally:
            _tracing.reset(token)

    def _donated(self, leaves: Sequence[Leaf], given: Given) -> list[bool]:
        """Whether each leaf may be overwritten."""
        count = len(given[0])
        donated = {i % count for i in self.donate if -count <= i < count}
        return [leaf.of in donated for leaf in leaves]

    def _check_donated(self, given: Given) -> None:
        """Checks that no array is given twice of which a program may overwrite one."""
        leaves = _leaves(given)
        flat = [(leaf.name, leaf.value) for leaf in leaves]
        twice = _variables.twice(flat, self._donated(leaves, given))
        if twice:
            raise ValueError(
                f"{'; '.join(twice)}: one array, which donate_argnums lets "
                f"{self.name} overwrite; give it a copy (jnp.copy), or do not donate"
            )

    def _located(self, given: Given) -> list[Leaf]:
        """Specs of the leaves of the arguments, where they are.

        Raises:
          TypeError: if one is neither an array nor a number.
          ValueError: if one is on several devices that are not those of a place.
        """
        found, others, spread = list[Leaf](), list[str](), list[str]()
        for leaf in _leaves(given):
            try:
                spec = _jaxpr.spec(jax.typeof(leaf.value))
            except TypeError:
                others.append(f"{leaf.name} is a {type(leaf.value).__name__}")
                continue
            place, sharding = self._place(leaf.value)
            if sharding is None:
                spread.append(f"{leaf.name} is on {len(leaf.value.devices())} devices")
            else:
                found.append(Leaf(leaf.of, leaf.path, spec, place, sharding))
        refuse(
            f"{self.name} takes pytrees of arrays and numbers; name what is none in "
            f"static_argnums",
            others,
            TypeError,
        )
        refuse(
            f"{self.name} takes arrays that are each on one device, or on those of "
            f"one stage, in its mesh; type pipe.place(variables) or "
            f"jax.device_put(array, device)",
            spread,
        )
        return found

    def _place(self, leaf: Any) -> tuple[Place, Sharding | None]:
        """The place of a leaf, and its sharding there; ``None`` if it has none.

        What is elsewhere is brought to whoever reads it.
        """
        if not getattr(leaf, "committed", False):
            return NOWHERE, WHOLE
        devices = frozenset(leaf.devices())
        place = self._number.get(devices, OUTSIDE)
        sharding = sharding_of(leaf, self.devices[place]) if place >= 0 else None
        is_whole = len(devices) == 1 or is_copied(leaf)
        return place, sharding or (WHOLE if is_whole else None)


def _leaves(given: Given) -> list[Leaf]:
    """The leaves of arguments, in order."""
    return [
        Leaf(getattr(key, "idx", getattr(key, "key", "")), tuple(path), leaf)
        for (_, key, *path), leaf in jax.tree_util.tree_leaves_with_path(given)
    ]


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
    blame = f"raised by {name}, which pipe.jit traces as jax.jit does"
    jitted = Jitted(function, devices, name, blame, donate)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return jitted(*_with_statics(args, static, name), **kwargs)

    return run


def _with_statics(
    args: Sequence[Any], static: Sequence[int], name: str
) -> Sequence[Any]:
    """The arguments, of which some are static: their positions are given."""
    given = list(args)
    for i in static:
        if -len(args) <= i < len(args):
            at = i % len(args)
            note = f"argument {at} of {name} is in static_argnums"
            given[i] = Static.of(args[i], note)
    return given


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(argnums, Sequence):
        return tuple(map(operator.index, argnums))
    return (operator.index(argnums),)
