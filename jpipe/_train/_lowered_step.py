"""A training step for one signature of state and batch, as one program.

    (*state, *x, *targets) -> (*state, loss, *aux, *skipped)

It is the schedule, the update of each parameter where it is, and the keys of the step.
A step has two programs: this one runs; `Specialization.program`, of the gradients
alone, is what ``print``, ``profile`` and the actions of a plan are read off.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._arguments import _microbatch, _stacked, _variables
from .._arguments._signature import SignatureIndices
from .._instructions._garbage_collector import pause_collector
from .._instructions._graph import OUTSIDE, Graph, Place, Value
from .._instructions._program import Program
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Computation
from .._layers import _rng
from .._pipelined._specialization import Specialization
from ._finite_update import write_flag, write_selection
from ._optimizer import Optimizer
from ._train_state import StateOrigin, TrainState, set_origin

PyTree = Any


class LoweredStep:
    """A step for one signature of state and batch, as one program.

    Args:
      specialization: the loss and its gradients for one signature.
      optimizer: the update.
      state: a state of this signature.
      signature_indices: the indices of signatures in the step.
      has_aux: True if the loss function returns aux beside the loss.
      donate: True if the step overwrites its state.

    Attributes:
      specialization: likewise.
      optimizer: likewise.
      variable_indices: the index of each leaf of the variables among those of a state
        that `split_state` returns.
      program: ``(*state, *x, *targets) -> (*state, loss, *aux, *skipped)``, of these
        leaves.
    """

    def __init__(
        self,
        specialization: Specialization,
        optimizer: Optimizer,
        state: TrainState,
        *,
        signature_indices: SignatureIndices,
        has_aux: bool,
        donate: bool,
    ) -> None:
        self.specialization = specialization
        self.optimizer = optimizer
        self._signature_indices = signature_indices
        self._has_aux = has_aux
        state = self.split_state(state)
        self._structure = jax.tree.structure(state)
        # A state whose leaves are their indices.
        indices = jax.tree.unflatten(self._structure, range(self._structure.num_leaves))
        self.variable_indices = jax.tree.leaves(indices.variables)
        # That of the states that it returns, after the first one.
        self._signature_index: int | None = None
        self.program = self._write_program(state, indices, donate=donate)

    def split_state(self, state: TrainState) -> TrainState:
        """A user's state, with a node of pieces for each leaf in pieces."""
        if not self.specialization.layout.pieces:
            return state
        variables = self.specialization.layout.split_params(state.variables)
        return state.replace(
            params=_variables.params(variables),
            opt_state=self.optimizer.split_state(state.opt_state),
            model_state=_variables.model_state(variables),
        )

    @pause_collector()
    def _write_program(
        self, state: TrainState, indices: Any, *, donate: bool
    ) -> Program:
        """Writes the step into a graph.

        Args:
          state: a state, with nodes of pieces.
          indices: a state whose leaves are their indices.
          donate: True if the step overwrites its state.
        """
        layout = self.specialization.layout
        graph = self.specialization.placement.graph()
        inputs = self._add_state(graph, state, indices, donate=donate)
        variables = [inputs[i] for i in self.variable_indices]
        x, targets, _ = self.specialization.batch.args
        batch = self.specialization.write_batch_arguments(graph, (x, targets))

        rng_indices = jax.tree.leaves(indices.rng)
        rngs_and_step = [*(inputs[i] for i in rng_indices), inputs[indices.step]]
        advance = Computation(
            "advance", _advance, [graph.specs[value] for value in rngs_and_step]
        )
        first_place = self.specialization.placement.place_of(0)
        *rngs, next_step = graph.call_in_processes(advance, first_place, rngs_and_step)

        results = self.specialization.write(graph, variables, [*batch, *rngs])

        param_indices = jax.tree.leaves(indices.params)
        pairs = zip(param_indices, layout.is_param_trained, strict=True)
        trained_indices = [i for i, is_trained in pairs if is_trained]
        updated_indices = [*trained_indices, *jax.tree.leaves(indices.opt_state)]
        grads = results.grads
        new_variables = results.new_state
        skipped = list[Value]()
        arguments = [inputs[i] for i in updated_indices]
        arguments += [grads[i] for i in layout.param_indices if i in grads]
        if self.optimizer.skips_nonfinite:
            flag = write_flag(graph, [*grads.values(), *results.loss])
            arguments.append(flag.is_finite)
            new_variables = write_selection(graph, flag, new_variables, variables)
            skipped.append(flag.num_skipped)
        updated = self.optimizer.update.write(graph, arguments)

        # index of a leaf of the state -> its new value
        new_state: dict[int, Any] = dict(enumerate(inputs))
        new_state |= zip(updated_indices, updated, strict=True)
        for leaf, value in new_variables.items():
            new_state[self.variable_indices[leaf]] = value
        new_state[indices.step] = graph.bring_to_processes(next_step)
        metrics = graph.as_own_arrays([*results.loss, *results.aux, *skipped])
        metrics = map(graph.bring_to_processes, metrics)
        return Program(graph, [*new_state.values(), *metrics])

    def _add_state(
        self, graph: Graph, state: TrainState, indices: Any, *, donate: bool
    ) -> list[Value]:
        """Adds the leaves of a state, in order, to the arguments of a graph."""
        # index of a leaf of the state -> its spec, its place and its sharding there
        leaves: dict[int, tuple[Any, Place, Sharding]] = {}
        layout = self.specialization.layout
        for index, spec, place, sharding in zip(
            self.variable_indices,
            layout.specs,
            layout.places,
            layout.shardings,
            strict=True,
        ):
            leaves[index] = spec, place, sharding
        opt_state_indices = jax.tree.leaves(indices.opt_state)
        for index, leaf in zip(
            opt_state_indices, self.optimizer.state_leaves, strict=True
        ):
            leaves[index] = leaf.value, leaf.place, leaf.sharding
        # Keys and the number of the step come from outside, and are not overwritten.
        rng_indices = jax.tree.leaves(indices.rng)
        scalars = dict(zip(rng_indices, jax.tree.leaves(state.rng), strict=True))
        scalars[indices.step] = state.step
        for index, array in scalars.items():
            spec = _jaxpr.spec(jax.typeof(array))
            leaves[index] = spec, OUTSIDE, WHOLE

        arguments: list[Value] = []
        for path, index in jax.tree_util.tree_leaves_with_path(indices):
            spec, place, sharding = leaves[index]
            argument = graph.argument(
                spec,
                place,
                name=f"state{jax.tree_util.keystr(path)}",
                donated=donate and index not in scalars,
                sharding=sharding,
            )
            arguments.append(argument)
        return arguments

    def result(
        self, outputs: Sequence[Any], train_step: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state and the metrics that a step returns, from the program's outputs.

        Args:
          outputs: the outputs.
          train_step: the step, which the state remembers: see `StateOrigin`.
        """
        num_leaves = self._structure.num_leaves
        inner_leaves = outputs[:num_leaves]
        leaves = inner_leaves
        state = jax.tree.unflatten(self._structure, inner_leaves)
        if self.specialization.layout.pieces:
            state = _stacked.join_pieces(state)
            leaves = jax.tree.leaves(state)
        if self._signature_index is None:  # weak types may differ from the input's
            structure = jax.tree.structure(state)
            self._signature_index = self._signature_indices(structure, leaves)
        origin = StateOrigin(
            train_step=weakref.ref(train_step),
            signature_index=self._signature_index,
            leaves=leaves,
            inner_leaves=inner_leaves,
        )
        set_origin(state, origin)

        loss, *leaves = outputs[num_leaves:]
        num_aux = self.specialization.aux_tree.num_leaves
        metrics = {"loss": loss}
        if self._has_aux:
            metrics["aux"] = self.specialization.aux_tree.unflatten(leaves[:num_aux])
        if self.optimizer.skips_nonfinite:
            (metrics["skipped"],) = leaves[num_aux:]
        return state, metrics


def make_optimizer(
    tx: optax.GradientTransformation,
    state: TrainState,
    specialization: Specialization,
    *,
    skip_nonfinite: bool,
) -> Optimizer:
    """Makes the optimizer of the parameters of a state."""
    layout = specialization.layout
    specs = _microbatch.array_specs(state.variables, "params")
    return Optimizer(
        tx,
        params=_variables.params(layout.split_params(specs)),
        trained=layout.is_param_trained,
        placement=specialization.placement,
        stage_shardings=layout.param_stage_shardings,
        opt_state=state.opt_state,
        skip_nonfinite=skip_nonfinite,
    )


def _advance(*rngs_and_step: jax.Array) -> tuple[jax.Array, ...]:
    """The keys of a step, and the number of the next one."""
    *rngs, step = rngs_and_step
    return *_rng.step_keys(rngs, step), step + 1
