"""The optimizer of a train step: its state, and its update in the step's graph."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._arguments import _signature, _stacked, _variables
from .._instructions import _transfer
from .._instructions._garbage_collector import pause_collector
from .._instructions._program import Program
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs._host_memory import in_memory_of
from .._jaxprs._jaxpr import nbytes
from .._layers._text import shape_text
from .._messages import raise_all
from .._partition._stage_placement import StagePlacement
from .._placed._mirrored_places import (
    ArgumentLeaf,
    MirroredPlaces,
    leaves_at,
    mirrored_pieces,
)
from .._placed._placed_function import PlacedFunction
from ._finite_update import FLAG, update_if_finite
from ._transformation import Transformation, place_init, place_update

PyTree = Any
# The stage of each leaf, and its sharding there.
StageShardings = Sequence[tuple[int, Sharding]]

_ADVICE_TO_LOOP = (
    "type pipe.value_and_grad and tx = pipe.optimizer(tx), and call tx.update in a "
    "loop of your own"
)
_ADVICE = (
    f"a train step gives tx.update the gradients, the state and the parameters; for an "
    f"optimizer that needs more, {_ADVICE_TO_LOOP}"
)


class Optimizer:
    """An optimizer whose state and updates are where the parameters are.

    The state is that of ``tx.init`` on all parameters at once, keyed by layer: it does
    not depend on the number of stages. The optimizer sees ``None`` in place of each
    leaf that is not trained, as no leaf of integers is, and the update leaves it as it
    is.

    Args:
      tx: the optax transformation.
      params: specs of the parameters, with a node of pieces for each in pieces.
      trained: one bool per leaf of these; True if it is trained.
      placement: the devices of the stages.
      stage_shardings: the stage of each leaf, and its sharding there.
      opt_state: a state that is to be updated; its leaves may be in another memory than
        those of ``tx.init``.
      skip_nonfinite: True if an update depends on a flag.

    Raises:
      ValueError: with the differences, if that is the state of another optimizer.

    Attributes:
      skips_nonfinite: True if an update depends on a flag.
      state_leaves: specs of the leaves of the state, with their places; a leaf in
        pieces is as many leaves here as it has pieces.
      update: ``(params, state, grads) -> (params, state)`` of the trained leaves; with
        ``skip_nonfinite`` the last argument is the flag ``is_finite``.
    """

    @pause_collector()
    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: PyTree,
        trained: Sequence[bool],
        placement: StagePlacement,
        stage_shardings: StageShardings,
        opt_state: PyTree = None,
        *,
        skip_nonfinite: bool = False,
    ) -> None:
        self._transformation = Transformation(tx, _ADVICE)
        self.skips_nonfinite = skip_nonfinite
        self._trained = trained
        self._placement = placement
        # ``None`` in place of leaves that are not trained.
        self._trained_params = _hide_frozen(params, trained)
        trained_locations = [
            (placement.place_of(stage), sharding)
            for stage, sharding in _selected(stage_shardings, trained)
        ]
        self._param_leaves = leaves_at(0, self._trained_params, trained_locations)
        self._init = PlacedFunction(
            self._transformation.init,
            [self._trained_params],
            place_init(self._param_leaves),
            "optimizer_init",
        )
        state = self._init.result
        self._state_structure = jax.tree.structure(state)
        self._state_pieces = _stacked.pieces_of_leaves(state)
        if opt_state is not None:
            _check_state(opt_state, _stacked.join_specs(state), self._param_leaves)
            state = jax.tree.map(in_memory_of, state, self.split_state(opt_state))
        self.state_leaves = MirroredPlaces(self._param_leaves).leaves_of(1, state)
        grad_leaves = [leaf._replace(argument_key=2) for leaf in self._param_leaves]
        specs = [self._trained_params, state, self._trained_params]
        leaves = [*self._param_leaves, *self.state_leaves, *grad_leaves]
        function = self._update
        if skip_nonfinite:
            # Where the flag is computed does not matter: each place reads a copy.
            specs.append(FLAG)
            leaves.append(ArgumentLeaf(3, (), FLAG))
            function = self._update_if_finite
        self.update = PlacedFunction(
            function, specs, place_update(leaves), "optimizer_update"
        )

    def _update(self, params: PyTree, state: PyTree, grads: PyTree) -> Any:
        """The new parameters and state.

        Parameters are the first argument, so that results overwrite them first.
        """
        updates, new_state = self._transformation.update(grads, state, params)
        if _signature_of(new_state) != _signature_of(state):
            raise ValueError(
                f"tx.update returns a state {shape_text(new_state)}, tx.init made "
                f"one {shape_text(state)}: a train step needs one structure and "
                f"fixed shapes; {_ADVICE_TO_LOOP}"
            )
        return optax.apply_updates(params, updates), new_state

    def _update_if_finite(
        self, params: PyTree, state: PyTree, grads: PyTree, is_finite: jax.Array
    ) -> Any:
        return update_if_finite(self._update, is_finite, params, state, grads)

    def split_state(self, state: PyTree) -> PyTree:
        """A user's state, with nodes of pieces for leaves in pieces."""
        return _stacked.split_pieces(state, self._state_pieces)

    def init(self, params: PyTree) -> PyTree:
        """The optimizer's state for parameters that are in place.

        Args:
          params: the parameters, with a node of pieces for each in pieces.
        """
        graph = self._placement.graph()
        if self._placement.layers:
            for i, (layer, params_of_layer) in enumerate(
                zip(self._placement.layers, self._trained_params, strict=True)
            ):
                graph.facts[f"layer {i}"] = (
                    f"{layer.name} {shape_text(params_of_layer)}"
                )
        else:
            graph.facts["parameters"] = shape_text(self._trained_params)
        inputs = [leaf.write_argument(graph) for leaf in self._param_leaves]
        program = Program(graph, self._init.write(graph, inputs))
        trained_leaves = _selected(jax.tree.leaves(params), self._trained)
        state = self._state_structure.unflatten(program(trained_leaves))
        return _stacked.join_pieces(state)

    def check_places(self, state: PyTree) -> None:
        """Checks that a state of this optimizer is in place.

        Args:
          state: the state, with a node of pieces for each leaf in pieces.

        Raises:
          ValueError: if it is not.
        """
        devices = self._placement.devices_of_places
        for array, leaf in zip(jax.tree.leaves(state), self.state_leaves, strict=True):
            if not _transfer.is_in_place(array, devices[leaf.place], leaf.sharding):
                raise ValueError(
                    "state.opt_state is not in place; type state = pipe.place(state)"
                )


def _check_state(
    state: PyTree, expected: PyTree, param_leaves: Sequence[ArgumentLeaf]
) -> None:
    """Checks that a state is one of this optimizer.

    Args:
      state: the state.
      expected: specs of the state that the optimizer makes.
      param_leaves: the parameters that are trained.

    Raises:
      ValueError: with the differences, if it is that of another one.
    """
    if _signature_of(state) == _signature_of(expected):
        return
    faults = _variables.differences(
        _descriptions(expected),
        _descriptions(state),
        "{path}: given {actual}, needs {expected}",
    )
    if jax.tree.structure(state) == jax.tree.structure(expected):
        title = (
            f"state.opt_state does not fit the optimizer of this step; "
            f"{_advice_on_dtypes(state, expected, param_leaves)}"
        )
    else:
        title = (
            "state.opt_state is not that of the optimizer of this step; give the "
            "same tx and the same trainable= to Pipeline.init_train_state and "
            "Pipeline.train_step"
        )
        if _structure_with_gaps(state) == _structure_with_gaps(expected):
            title += "; the state was made to train other parameters"
    raise_all(title, faults or ["its leaves are in other containers"])


def _advice_on_dtypes(
    state: PyTree, expected: PyTree, param_leaves: Sequence[ArgumentLeaf]
) -> str:
    """The advice on a state whose leaves have other dtypes or shapes.

    Args:
      state: the state.
      expected: specs of the state that the optimizer makes, of the same structure.
      param_leaves: the parameters that are trained.
    """
    mirrored = MirroredPlaces(param_leaves)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(state),
        strict=True,
    )
    for (path, spec), leaf in pairs:
        if mirrored.place_of(path) >= 0 and leaf.dtype != spec.dtype:
            return (
                "it was made for parameters of another dtype, or by another tx; "
                "make a new state, state = pipe.init_train_state(key, x, tx, "
                "variables=state.variables), or give the parameters their dtype"
            )
    return "write hyperparameters as jnp.asarray(value, dtype)"


def opt_state_bytes(
    tx: optax.GradientTransformation,
    params: PyTree,
    trained: Sequence[bool],
    layers: Sequence[int],
    count: int,
) -> list[int]:
    """The bytes of an optimizer's state that belong to each layer.

    Args:
      tx: the optax transformation.
      params: specs of the parameters, with a node of pieces for each in pieces.
      trained: one bool per leaf of these; True if it is trained.
      layers: the layer of each leaf.
      count: the number of layers.
    """
    trained_params = _hide_frozen(params, trained)
    # Layers in place of devices.
    locations = [(layer, WHOLE) for layer in _selected(layers, trained)]
    param_leaves = leaves_at(0, trained_params, locations)
    state = jax.eval_shape(
        Transformation(tx, _ADVICE).init, _stacked.join_pieces(trained_params)
    )
    inner = _split_mirrored(state, param_leaves)
    layer_bytes = [0] * count
    for leaf in MirroredPlaces(param_leaves).leaves_of(1, inner):
        layer_bytes[leaf.place] += nbytes(leaf.value)
    return layer_bytes


def place_opt_state(
    state: PyTree,
    params: PyTree,
    placement: StagePlacement,
    stage_shardings: StageShardings,
) -> PyTree:
    """Puts an optimizer's state where its parameters belong.

    Args:
      state: the state, on the host or any devices.
      params: the parameters, with a node of pieces for each in pieces.
      placement: the devices of the stages.
      stage_shardings: the stage of each leaf of the parameters, and its sharding there.

    Returns:
      The same values; a leaf that belongs to no parameter is on the first device.
    """
    param_locations = [
        (placement.place_of(stage), sharding) for stage, sharding in stage_shardings
    ]
    param_leaves = leaves_at(0, params, param_locations)
    inner = _split_mirrored(state, param_leaves)
    arrays = [
        _transfer.put_leaf(
            leaf.value, placement.devices_of_places[leaf.place], leaf.sharding
        )
        for leaf in MirroredPlaces(param_leaves).leaves_of(1, inner)
    ]
    return _stacked.join_pieces(jax.tree.structure(inner).unflatten(arrays))


def _split_mirrored(state: PyTree, param_leaves: Sequence[ArgumentLeaf]) -> PyTree:
    """A state, with nodes of pieces for leaves that mirror parameters in pieces."""
    result_pieces = mirrored_pieces(param_leaves)(state)
    pieces = {i: x for i, x in result_pieces.items() if x is not None}
    return _stacked.split_pieces(state, pieces)


def _selected(leaves: Sequence[Any], trained: Sequence[bool]) -> list[Any]:
    """The leaves that are trained."""
    pairs = zip(leaves, trained, strict=True)
    return [leaf for leaf, is_trained in pairs if is_trained]


def _hide_frozen(params: PyTree, trained: Sequence[bool]) -> PyTree:
    """The parameters, ``None`` in place of leaves that are not trained.

    Args:
      params: the parameters, with a node of pieces for each in pieces.
      trained: one bool per leaf; all pieces of a parameter are trained, or none is.
    """
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(leaves, trained, strict=True)
    return _stacked.drop_empty_nodes(
        structure.unflatten(
            [leaf if is_trained else None for leaf, is_trained in pairs]
        )
    )


def _signature_of(state: PyTree) -> Any:
    """The structure of a state, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(state)
    return structure, _signature.shape_keys(leaves)


def _structure_with_gaps(tree: PyTree) -> Any:
    """The structure of a tree in which ``None`` is a leaf."""
    return jax.tree.structure(tree, is_leaf=lambda x: x is None)


def _descriptions(state: PyTree) -> dict[str, str]:
    """The shape and dtype of each leaf of a state, by its path."""
    descriptions: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_array = hasattr(leaf, "shape")
        description = (
            shape_text(leaf) if is_array else f"a Python {type(leaf).__name__}"
        )
        descriptions[f"opt_state{jax.tree_util.keystr(path)}"] = description
    return descriptions
