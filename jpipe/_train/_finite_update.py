"""An update that is left out where a gradient or the loss is NaN or Inf.

All stages do the same, so all gradients are read before the first update:

    place 0                 place 1                 last place
    is_finite(grads)        is_finite(grads)
            └───────────────────────┴───────────▶   is_finite = all of these
            ┌───────────────────────┬───────────────────────┘
    update or keep          update or keep          update or keep

Two scalars cross for each place. An update writes over what it reads, as it does
without this, so it takes no more memory. Nothing waits for the host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._instructions._graph import Graph, Value
from .._jaxprs import _inlining, _jaxpr
from .._jaxprs._computation import Computation

PyTree = Any
# The spec of the flag.
FLAG = jax.ShapeDtypeStruct((), jnp.bool_)


class FiniteFlag(NamedTuple):
    """The flag of a step, which changes its state or leaves it.

    Attributes:
      is_finite: the flag, in the last place.
      num_skipped: 0 where it is true, else 1.
    """

    is_finite: Value
    num_skipped: Value


def update_if_finite(
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    is_finite: jax.Array,
    params: PyTree,
    state: PyTree,
    grads: PyTree,
) -> tuple[PyTree, PyTree]:
    """The results of an update where all is finite; else the parameters and the state.

    Each result is selected where it is computed, and read so by what follows:

        momentum = select(is_finite, update of momentum, momentum)
        params = select(is_finite, params - rate * momentum, params)

    XLA then writes it over the old one; selected at the end, the update of the momentum
    would need memory of its own until ``params`` has read it.
    """
    old_leaves = jax.tree.leaves((params, state))
    specs = jax.tree.map(lambda x: _jaxpr.spec(jax.typeof(x)), (params, state, grads))
    closed, result = _inlining.trace(update, *specs)
    leaves = list(zip(closed.jaxpr.outvars, old_leaves, strict=True))
    # variable that an equation computes -> the old value of the leaf that it becomes
    old_values: dict[Any, jax.Array] = {}
    computed = set(_jaxpr.outvars_of(closed.jaxpr.eqns))
    for var, old in leaves:
        if not isinstance(var, core.Literal) and var in computed:
            old_values.setdefault(var, old)

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return new if new is old else jnp.where(is_finite, new, old)

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if old_values.keys().isdisjoint(eqn.outvars):
            return None

        def run(operands: Sequence[Any]) -> list[Any]:
            results = _jaxpr.bind(closed.jaxpr, eqn, operands)
            return [
                select(value, old_values[var]) if var in old_values else value
                for var, value in zip(eqn.outvars, results, strict=True)
            ]

        return run

    arguments = [*old_leaves, *jax.tree.leaves(grads)]
    selected = _jaxpr.evaluate(closed, arguments, rule)
    for i, (var, old) in enumerate(leaves):
        # A constant, an argument, or the result of another leaf was not selected so.
        if isinstance(var, core.Literal) or old_values.get(var) is not old:
            selected[i] = select(selected[i], old)
    return jax.tree.unflatten(jax.tree.structure(result), selected)


def write_flag(graph: Graph, values: Sequence[Value]) -> FiniteFlag:
    """Writes into a graph the flag of a step: true if all values are finite.

    Args:
      graph: the graph.
      values: the gradients and the loss.
    """
    flags = list[Value]()
    places = dict.fromkeys(graph.places[value] for value in values)
    for place in places:
        place_values = [value for value in values if graph.places[value] == place]
        flags += _call(graph, "is_finite", _are_finite, place_values)
    return FiniteFlag(*_call(graph, "all_finite", _combine, flags[::-1]))


def write_selection(
    graph: Graph, flag: FiniteFlag, new: Mapping[int, Value], old: Sequence[Value]
) -> dict[int, Value]:
    """Writes into a graph what is kept of leaves that micro-batches write.

    Args:
      graph: the graph.
      flag: the flag of the step.
      new: index of a leaf -> its new value.
      old: the value of each leaf before the step.
    """
    selected: dict[int, Value] = {}
    for index, value in new.items():
        selected[index] = value
        if value != old[index]:
            arguments = [value, old[index], flag.is_finite]
            (selected[index],) = _call(graph, "keep_state", _select_leaf, arguments)
    return selected


def _call(
    graph: Graph, name: str, function: Any, values: Sequence[Value]
) -> list[Value]:
    """Calls a function where its first argument is; a result is sharded as that is."""
    computation = Computation.from_function(
        name, function, *[graph.specs[value] for value in values]
    )
    sharding = graph.shardings[values[0]]
    return graph.call(
        computation,
        graph.places[values[0]],
        values,
        shardings=[sharding] * len(computation.results),
    )


def _are_finite(*values: jax.Array) -> list[jax.Array]:
    flags = [jnp.isfinite(value).all() for value in values]
    return [jnp.stack(flags).all()]


def _combine(*flags: jax.Array) -> list[jax.Array]:
    is_finite = jnp.stack(flags).all()
    return [is_finite, 1 - is_finite.astype(jnp.int32)]


def _select_leaf(
    new: jax.Array, old: jax.Array, is_finite: jax.Array
) -> list[jax.Array]:
    return [jnp.where(is_finite, new, old)]
