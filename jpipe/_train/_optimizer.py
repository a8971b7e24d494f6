"""Any optax optimizer, applied where the parameters are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import optax

from .._instructions import _transfer
from .._instructions._bytes import nbytes
from .._instructions._graph import Graph, Value
from .._instructions._program import Program
from .._instructions._sharding import Sharding
from .._layers._stage import shapes
from .._run import _signature
from .._run._facts import of_layers
from .._run._pipe import Pipe
from .._spread._homes import Path, homes, paths, places, shardings
from .._spread._placed import Placed, Placement
from ._state import SHOWN

PyTree = Any

_BY_HAND = (
    "type pipe.value_and_grad and tx = pipe.optimizer(tx), and call tx.update in a "
    "loop of your own"
)


class Optimizer:
    """An optimizer whose state and updates are spread like the parameters.

    The state is that of ``tx.init`` on all parameters at once, keyed by layer: it does
    not depend on the number of stages. What is not trained, as no leaf of integers is,
    the optimizer does not see, ``None`` in its place, and the update does not change.

    Args:
      tx: the optax transformation.
      params: specs of the parameters.
      trained: whether each of their leaves is trained.
      pipe: the stages, and where they run.
      homes_of: the stage of each leaf.
      lie: how each lies there.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: PyTree,
        trained: Sequence[bool],
        pipe: Pipe,
        homes_of: Sequence[int],
        lie: Sequence[Sharding],
    ) -> None:
        self._trained = trained
        self._params_tree = jax.tree.structure(params)
        free = self._hide_frozen(params)
        at_home = [home for home, yes in zip(homes_of, trained, strict=True) if yes]
        place = places(zip(paths(free), at_home, strict=True))
        at = [pipe.place(s) for s in range(len(pipe.stages))]
        params_at = homes(free, place)
        placement = Placement(params_at, lambda state: homes(state, place), at)
        self._init = Placed(_making(tx), [free], placement, "optimizer_init")
        self._pipe = pipe
        self._free, self._params_places = free, [at[home or 0] for home in params_at]
        self.state = self._init.result
        self._state_tree = jax.tree.structure(self.state)

        state_at = homes(self.state, place)
        self._state_shapes = _signature.shapes(jax.tree.leaves(self.state))
        self.state_places = [at[home or 0] for home in state_at]
        self._params_lie = [x for x, yes in zip(lie, trained, strict=True) if yes]
        self.state_shardings = shardings(self.state, _flat(free), self._params_lie)
        self._state_at = [
            (pipe.places[place], how)
            for place, how in zip(self.state_places, self.state_shardings, strict=True)
        ]
        placement = Placement(
            [*params_at, *state_at, *params_at], lambda _: [*params_at, *state_at], at
        )
        trees = [free, self.state, free]
        self._update = Placed(_updating(tx), trees, placement, "optimizer_update")

    def init(self, params: PyTree) -> PyTree:
        """The optimizer's state for parameters that are in place."""
        graph = self._pipe.graph()
        if self._pipe.layers:
            graph.facts |= of_layers(self._pipe, self._free)
        elif self._pipe.copies is not None:
            graph.facts |= {"parameters": shapes(self._free)}
        leaves = jax.tree.leaves(self._hide_frozen(params))
        own = jax.tree.leaves(self._free), self._params_places, self._params_lie
        arguments = [
            graph.argument(spec, place, how=how)
            for spec, place, how in zip(*own, strict=True)
        ]
        outputs = self._init.into(graph, arguments, self.state_shardings)
        program = Program(graph, outputs, self._pipe.places)
        return jax.tree.unflatten(self._state_tree, program(leaves))

    def check(self, state: PyTree) -> None:
        """Checks that a state is one of this optimizer, in place.

        Raises:
          ValueError: if it is not.
        """
        leaves, tree = jax.tree.flatten(state)
        if tree != self._state_tree:
            raise ValueError(
                "state.opt_state is not that of the optimizer of this step; give the "
                "same tx and the same trainable= to Pipeline.init_train_state and "
                "Pipeline.train_step" + self._other_selection(state)
            )
        if _signature.shapes(leaves) != self._state_shapes:
            raise ValueError(
                "state.opt_state does not fit the optimizer of this step; write "
                "hyperparameters as jnp.asarray(value, dtype):\n" + self._misfits(state)
            )
        pairs = zip(leaves, self._state_at, strict=True)
        if not all(_transfer.is_at(leaf, *where) for leaf, where in pairs):
            raise ValueError(
                "state.opt_state is not in place; type state = pipe.place(state)"
            )

    def _other_selection(self, state: PyTree) -> str:
        """Which leaves differ, if the state was made to train other parameters."""
        (given, tree), (needed, own) = _with_gaps(state), _with_gaps(self.state)
        if tree != own:
            return ""
        faults = [
            f"opt_state{jax.tree_util.keystr(path)} is "
            f"{'missing' if leaf is None else 'surplus'}"
            for (path, leaf), (_, need) in zip(given, needed, strict=True)
            if (leaf is None) != (need is None)
        ]
        more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return (
            "; the state was made to train other parameters: "
            + ", ".join(faults[:SHOWN])
            + more
        )

    def _misfits(self, state: PyTree) -> str:
        """The leaves of a state that are of another kind than they should be."""
        found = jax.tree_util.tree_leaves_with_path(state)
        kinds = _signature.shapes(leaf for _, leaf in found)
        return "\n".join(
            f"  * opt_state{jax.tree_util.keystr(path)}: given {_told(*given)}, "
            f"needs {_told(*needed)}"
            for (path, _), given, needed in zip(
                found, kinds, self._state_shapes, strict=True
            )
            if given != needed
        )

    def update(
        self,
        graph: Graph,
        grads: Sequence[Value],
        state: Sequence[Value],
        params: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """Writes one update into a graph.

        Args:
          graph: the graph.
          grads: the gradients of the trainable leaves, in order.
          state: the leaves of the optimizer's state.
          params: all leaves of the parameters, in order.

        Returns:
          All leaves of the new parameters, and those of the new state.
        """
        free = [leaf for leaf, yes in zip(params, self._trained, strict=True) if yes]
        how = [*self._params_lie, *self.state_shardings]
        results = self._update.into(graph, [*free, *state, *grads], how)
        new = iter(results[: len(free)])
        leaves = [
            next(new) if yes else leaf
            for leaf, yes in zip(params, self._trained, strict=True)
        ]
        return leaves, results[len(free) :]

    def _hide_frozen(self, params: PyTree) -> PyTree:
        leaves = _hidden(jax.tree.leaves(params), self._trained)
        return jax.tree.unflatten(self._params_tree, leaves)


def state_bytes(
    tx: optax.GradientTransformation,
    params: PyTree,
    trained: Sequence[bool],
    at: Sequence[int],
    count: int,
) -> list[int]:
    """The bytes of an optimizer's state that belong to each of some layers.

    Args:
      tx: the optax transformation.
      params: specs of the parameters.
      trained: whether each of their leaves is trained.
      at: the layer of each.
      count: how many layers there are.
    """
    leaves, tree = jax.tree.flatten(params)
    free = jax.tree.unflatten(tree, _hidden(leaves, trained))
    state = jax.eval_shape(_making(tx), free)
    found = [0] * count
    free_at = [home for home, yes in zip(at, trained, strict=True) if yes]
    own = homes(state, places(zip(paths(free), free_at, strict=True)))
    for leaf, home in zip(jax.tree.leaves(state), own, strict=True):
        found[home or 0] += nbytes(leaf)
    return found


def _hidden(leaves: Sequence[Any], trained: Sequence[bool]) -> list[Any]:
    """The leaves, ``None`` in place of those that are not trained."""
    return [leaf if yes else None for leaf, yes in zip(leaves, trained, strict=True)]


def _with_gaps(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves with their paths, ``None`` among them, and the structure."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)


def _making(tx: optax.GradientTransformation) -> Callable[[PyTree], PyTree]:
    """``params -> state``, with errors that say what to type.

    A new function: JAX knows one by identity, which may read what was changed.
    """

    def init(params: PyTree) -> PyTree:
        with explained("tx.init is given the parameters alone"):
            return tx.init(params)

    return init


def _updating(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """``(params, state, grads) -> (params, state)``, with errors that say what to type.

    Parameters come first: of what may be overwritten, they are.
    """

    def update(params: PyTree, state: PyTree, grads: PyTree) -> Any:
        with explained(
            f"a train step gives tx.update the gradients, the state and the "
            f"parameters; for an optimizer that needs more, {_BY_HAND}"
        ):
            updates, new = tx.update(grads, state, params)
        if _form(new) != _form(state):
            raise ValueError(
                f"tx.update returns a state {shapes(new)}, tx.init made one "
                f"{shapes(state)}: a train step needs one structure and fixed shapes; "
                f"{_BY_HAND}"
            )
        return optax.apply_updates(params, updates), new

    return update


@contextmanager
def explained(missing: str) -> Iterator[None]:
    """Adds to an error of an optimizer what to type.

    Args:
      missing: the same, where it needs more arguments.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        is_missing = isinstance(error, TypeError) and "missing" in text
        if is_missing or "must be provided" in text:  # as optax says it
            error.add_note(missing)
        if "tuple" in text and any(w in text for w in ("dict", "indices", "'items'")):
            error.add_note(
                "parameters and gradients are a tuple with one entry per layer; what "
                "needs a dict, such as flatten_dict in a mask, takes each entry: "
                "mask=lambda params: tuple(map(mask_of_entry, params))"
            )
        raise


def _form(state: PyTree) -> Any:
    leaves, tree = jax.tree.flatten(state)
    return tree, _signature.shapes(leaves)


def place_state(
    state: PyTree,
    params: PyTree,
    pipe: Pipe,
    at: Sequence[int],
    lie: Sequence[Sharding],
) -> PyTree:
    """Puts an optimizer's state where its parameters belong.

    Args:
      state: the state, on the host or any devices.
      params: the parameters.
      pipe: the stages, and where they run.
      at: the stage of each leaf of the parameters.
      lie: how it lies there.

    Returns:
      The same values; what belongs to no parameter is on the first device.
    """
    leaves, tree = jax.tree.flatten(state)
    wanted = homes(state, places(zip(paths(params), at, strict=True)))
    found = shardings(state, _flat(params), lie)
    placed = [
        _transfer.put_one(leaf, pipe.devices[home or 0], how)
        for leaf, home, how in zip(leaves, wanted, found, strict=True)
    ]
    return jax.tree.unflatten(tree, placed)


def _flat(params: PyTree) -> list[tuple[Path, Any]]:
    return jax.tree_util.tree_leaves_with_path(params)


def _told(shape: tuple[int, ...] | None, dtype: Any) -> str:
    """The kind of a leaf: see `_signature.shapes`."""
    if shape is None:
        return f"a Python {dtype.__name__}"
    return f"{dtype}[{','.join(map(str, shape))}]"
