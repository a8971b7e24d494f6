"""The optimizer of a train step: its state, and its update in the step's graph."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._faults import refuse
from .._instructions import _transfer
from .._instructions._bytes import nbytes
from .._instructions._program import Program
from .._instructions._sharding import WHOLE, Sharding
from .._layers._stage import shapes
from .._placed._by_path import ByPath, located
from .._placed._function import PlacedFunction
from .._run import _signature, _variables
from .._run._facts import of_layers
from .._run._pipe import Pipe
from ._transformation import Transformation, of_init, of_update

PyTree = Any
# Stages, and shardings there.
Locations = Sequence[tuple[int, Sharding]]

_BY_HAND = (
    "type pipe.value_and_grad and tx = pipe.optimizer(tx), and call tx.update in a "
    "loop of your own"
)
_ADVICE = (
    f"a train step gives tx.update the gradients, the state and the parameters; for an "
    f"optimizer that needs more, {_BY_HAND}"
)


class Optimizer:
    """An optimizer whose state and updates are where the parameters are.

    The state is that of ``tx.init`` on all parameters at once, keyed by layer: it does
    not depend on the number of stages. What is not trained, as no leaf of integers is,
    the optimizer does not see, ``None`` in its place, and the update does not change.

    Args:
      tx: the optax transformation.
      params: specs of the parameters.
      trained: whether each of their leaves is trained.
      pipe: the stages, and where they run.
      locations: the stage of each leaf, and its sharding there.

    Attributes:
      state: the leaves of the state, as specs, where they belong.
      update: ``(params, state, grads) -> (params, state)``, of what is trained.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: PyTree,
        trained: Sequence[bool],
        pipe: Pipe,
        locations: Locations,
    ) -> None:
        self._own = own = Transformation(tx, _ADVICE)

        def update(params: PyTree, state: PyTree, grads: PyTree) -> Any:
            # Parameters come first: of what may be overwritten, they are.
            updates, new = own.update(grads, state, params)
            if _form(new) != _form(state):
                raise ValueError(
                    f"tx.update returns a state {shapes(new)}, tx.init made one "
                    f"{shapes(state)}: a train step needs one structure and fixed "
                    f"shapes; {_BY_HAND}"
                )
            return optax.apply_updates(params, updates), new

        self._trained, self._pipe = trained, pipe
        self._free = free = _hide_frozen(params, trained)
        own_locations = _selected(locations, trained)
        where = [(pipe.place(stage), sharding) for stage, sharding in own_locations]
        leaves = located(0, free, where)
        state = jax.eval_shape(own.init, free)
        self.state = ByPath(leaves).located(1, state)
        self._params, self._form = leaves, _form(state)
        grads = [leaf._replace(of=2) for leaf in leaves]
        placement = of_update([*leaves, *self.state, *grads])
        specs = [free, state, free]
        self.update = PlacedFunction(update, specs, placement, "optimizer_update")

    def init(self, params: PyTree) -> PyTree:
        """The optimizer's state for parameters that are in place."""
        graph = self._pipe.graph()
        known = {"parameters": shapes(self._free)}
        graph.facts |= of_layers(self._pipe, self._free) if self._pipe.layers else known
        function = PlacedFunction(
            self._own.init, [self._free], of_init(self._params), "optimizer_init"
        )
        outputs = function.into(graph, [leaf.argument(graph) for leaf in self._params])
        program = Program(graph, outputs)
        own = _selected(jax.tree.leaves(params), self._trained)
        return jax.tree.unflatten(self._form[0], program(own))

    def check_places(self, state: PyTree) -> None:
        """Checks that a state of this optimizer is in place.

        Raises:
          ValueError: if it is not.
        """
        places = self._pipe.places
        pairs = zip(jax.tree.leaves(state), self.state, strict=True)
        if not all(_transfer.is_at(x, places[y.place], y.sharding) for x, y in pairs):
            raise ValueError(
                "state.opt_state is not in place; type state = pipe.place(state)"
            )

    def check(self, state: PyTree) -> None:
        """Checks that a state is one of this optimizer.

        Raises:
          ValueError: with what is different, if it is that of another one.
        """
        if _form(state) == self._form:
            return
        other = "{path}: given {found}, needs {wanted}"
        own = jax.tree.unflatten(self._form[0], [leaf.value for leaf in self.state])
        faults = _variables.differences(_kinds(own), _kinds(state), other)
        if jax.tree.structure(state) == self._form[0]:
            title = (
                "state.opt_state does not fit the optimizer of this step; write "
                "hyperparameters as jnp.asarray(value, dtype)"
            )
        else:
            is_selected = _with_gaps(state) == _with_gaps(own)
            title = (
                "state.opt_state is not that of the optimizer of this step; give the "
                "same tx and the same trainable= to Pipeline.init_train_state and "
                "Pipeline.train_step"
                + "; the state was made to train other parameters"
                * is_selected
            )
        refuse(title, faults or ["its leaves are in other containers"])


def state_bytes(
    tx: optax.GradientTransformation,
    params: PyTree,
    trained: Sequence[bool],
    layers: Sequence[int],
    count: int,
) -> list[int]:
    """The bytes of an optimizer's state that belong to each of some layers.

    Args:
      tx: the optax transformation.
      params: specs of the parameters.
      trained: whether each of their leaves is trained.
      layers: the layer of each.
      count: how many layers there are.
    """
    free = _hide_frozen(params, trained)
    state = jax.eval_shape(Transformation(tx, _ADVICE).init, free)
    own = [(layer, WHOLE) for layer in _selected(layers, trained)]
    like = ByPath(located(0, free, own))
    found = [0] * count
    for leaf in like.located(1, state):
        found[leaf.place] += nbytes(leaf.value)
    return found


def place_state(
    state: PyTree, params: PyTree, pipe: Pipe, locations: Locations
) -> PyTree:
    """Puts an optimizer's state where its parameters belong.

    Args:
      state: the state, on the host or any devices.
      params: the parameters.
      pipe: the stages, and where they run.
      locations: the stage of each leaf of the parameters, and its sharding there.

    Returns:
      The same values; what belongs to no parameter is on the first device.
    """
    where = [(pipe.place(stage), sharding) for stage, sharding in locations]
    like = ByPath(located(0, params, where))
    placed = [
        _transfer.put_one(leaf.value, pipe.places[leaf.place], leaf.sharding)
        for leaf in like.located(1, state)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def _selected(leaves: Sequence[Any], trained: Sequence[bool]) -> list[Any]:
    """The leaves that are trained."""
    return [leaf for leaf, yes in zip(leaves, trained, strict=True) if yes]


def _hide_frozen(params: PyTree, trained: Sequence[bool]) -> PyTree:
    """The parameters, ``None`` in place of those that are not trained."""
    leaves, tree = jax.tree.flatten(params)
    pairs = zip(leaves, trained, strict=True)
    return jax.tree.unflatten(tree, [leaf if yes else None for leaf, yes in pairs])


def _form(state: PyTree) -> Any:
    leaves, tree = jax.tree.flatten(state)
    return tree, _signature.shapes(leaves)


def _with_gaps(tree: PyTree) -> Any:
    """The structure of a tree in which ``None`` is a leaf."""
    return jax.tree.structure(tree, is_leaf=lambda x: x is None)


def _kinds(state: PyTree) -> dict[str, str]:
    """The shape and dtype of each leaf of a state, by its path."""
    return {
        f"opt_state{jax.tree_util.keystr(path)}": shapes(leaf)
        if hasattr(leaf, "shape")
        else f"a Python {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
