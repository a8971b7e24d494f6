"""The training step: gradients of a mini-batch, then one update.

    (*state, *x, *targets) -> (*state, loss, *aux)

All of it is one program: the schedule, the update of each parameter where it is, and
the keys of the step. It is compiled once per signature of state and batch. A state that
the step returned itself is not checked again: see `StateOrigin`.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from .._arguments import _microbatch, _signature, _stacked, _variables
from .._arguments._cache import RecentCache
from .._arguments._wrong_call import explain_call
from .._instructions._garbage_collector import pause_collector
from .._instructions._graph import OUTSIDE, Graph, Value
from .._instructions._interrupts import Interrupts
from .._instructions._program import Program
from .._jaxprs import _jaxpr, _nan_location
from .._jaxprs._computation import Computation
from .._layers import _rng
from .._pipelined._specialization import Specialization
from .._placed._mesh_context import outside_of_meshes
from .._placed._mirrored_places import ArgumentLeaf
from ._optimizer import Optimizer
from ._pipelined_loss import PipelinedLoss
from ._train_state import (
    StateOrigin,
    TrainState,
    become,
    check_apart,
    check_state,
    set_origin,
)

PyTree = Any
# Arguments that a step does not take -> what to type.
_ADVICE_ON = {
    "rngs": "the keys of a step follow from state.rng and state.step: "
    "pipe.init_train_state(key, x, tx, rngs=...) names them",
    "train": "a step trains; pipe.apply(variables, x) evaluates",
}


@dataclass(eq=False, repr=False)
class TrainStep:
    """``step(state, x, targets) -> (state, metrics)``; made by `Pipeline.train_step`.

    Attributes:
      pipelined_loss: ``(variables, x, targets, rng, *, train) -> specialization``.
      tx: the optimizer.
      has_aux: True if the loss function returns aux beside the loss.
      feed: ``(x, targets) -> (x, targets)``, with specs for what this process lacks.
      donate: True if the state is overwritten.
      by_layer: True if states have an entry for each layer.
    """

    pipelined_loss: PipelinedLoss
    tx: optax.GradientTransformation
    has_aux: bool
    feed: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    donate: bool
    by_layer: bool

    def __post_init__(self) -> None:
        # (settings, signature index of the state) -> optimizer
        self._optimizers = RecentCache[Any, Optimizer]()
        # (settings, signature index of the state, signature of the batch) -> step
        self._lowered_steps = RecentCache[Any, _LoweredStep]()
        # (structure, keys of the avals) of a state -> signature index
        self._signature_indices = RecentCache[Any, int]()
        self._next_signature_index = itertools.count()

    @explain_call("step(state, x, targets)", _ADVICE_ON)
    def __call__(
        self, state: TrainState, x: PyTree, targets: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step. Returns as soon as the work is dispatched.

        Args:
          state: the state; its arrays are donated, unless ``donate=False``.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.

        Returns:
          The new state, and ``{"loss": ...}`` with ``"aux"`` where there is one.

        Raises:
          KeyboardInterrupt: as ever; then ``state`` is as it was, or, if it was being
            overwritten, what the step would have returned: ``state.step`` tells.
          ValueError: if the state or the batch does not fit; nothing is changed.
          TypeError: if a leaf of the batch is not an array; nothing is changed.
        """
        # The new state, as soon as there is one: an interrupt may come when the old one
        # is overwritten and the new one has not reached the caller.
        new_states: list[TrainState] = []
        try:
            return self._take(state, x, targets, new_states=new_states)
        except BaseException:
            if new_states and self._may_donate():
                become(state, new_states[0])
            raise

    @outside_of_meshes
    def _take(
        self,
        state: TrainState,
        x: PyTree,
        targets: PyTree,
        *,
        new_states: list[TrainState],
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step; appends the new state to ``new_states`` before it returns."""
        check_state(state, by_layer=self.by_layer)
        x, targets = self.feed(x, targets)
        leaves, structure = jax.tree.flatten(state)
        origin = state.origin
        if origin is not None and not origin.matches(self, leaves):
            origin = None
        if origin is None:
            signature_index = self.signature_index(structure, leaves)
        else:
            signature_index = origin.signature_index
        _variables.check_alive(leaves)

        step = self._lower(signature_index, state, x, targets)
        if origin is None:
            _variables.check_concrete(leaves)
            inner_state = step.open_state(state)
            leaves = jax.tree.leaves(inner_state)
            variables = [leaves[i] for i in step.variable_indices]
            step.specialization.layout.check(variables, "state")
            step.optimizer.check_places(inner_state.opt_state)
            check_apart(inner_state, step.program)
        else:
            leaves = origin.inner_leaves
        batch = jax.tree.leaves((x, targets))
        _variables.check_concrete(batch)

        with Interrupts() as interrupts:
            outputs = step.program([*leaves, *batch], overwriting=interrupts.hold)
            new_state, metrics = step.result(outputs, self)
            new_states.append(new_state)
        return new_state, metrics

    @outside_of_meshes
    def program(self, state: TrainState, x: PyTree, targets: PyTree) -> Program:
        """The program that a call with these arguments runs."""
        check_state(state, by_layer=self.by_layer)
        leaves, structure = jax.tree.flatten(state)
        signature_index = self.signature_index(structure, leaves)
        return self._lower(signature_index, state, x, targets).program

    def signature_index(self, structure: Any, leaves: Sequence[Any]) -> int:
        """The index of the signature of a state: its structure, avals and memories."""
        avals = _signature.aval_keys(leaves)
        signature = structure, avals, _signature.memory_key(leaves)
        if signature not in self._signature_indices:
            self._signature_indices[signature] = next(self._next_signature_index)
        return self._signature_indices[signature]

    def _may_donate(self) -> bool:
        """True if a state is overwritten: not if a program is expected to fail.

        A state that was overwritten when the program failed could not be restored.
        """
        return self.donate and not _nan_location.is_checking()

    def _lower(
        self, signature_index: int, state: TrainState, x: PyTree, targets: PyTree
    ) -> "_LoweredStep":
        """Lowers the step for the signature of a state and a batch; checks all shapes.

        Each signature is lowered once. XLA compiles the program when it runs first.

        Args:
          signature_index: see `signature_index`.
          state: the state.
          x: the input of the mini-batch.
          targets: its targets.
        """
        state_key = _signature.settings(), signature_index
        key = state_key, _signature.tree_signature(x, targets)
        if key not in self._lowered_steps:
            specialization = self.pipelined_loss(
                state.variables, x, targets, state.rng, train=True
            )
            # Another batch size needs another specialization, not another optimizer.
            if state_key not in self._optimizers:
                self._optimizers[state_key] = _make_optimizer(
                    self.tx, state, specialization
                )
            optimizer = self._optimizers[state_key]
            self._lowered_steps[key] = _LoweredStep(
                specialization,
                optimizer,
                state,
                has_aux=self.has_aux,
                donate=self._may_donate(),
            )
        return self._lowered_steps[key]


class _LoweredStep:
    """A step for one signature of state and batch, as one program.

    Attributes:
      specialization: the loss and its gradients for one signature.
      optimizer: the update.
      variable_indices: the index of each leaf of the variables among those of a state
        that `open_state` returns.
      program: ``(*state, *x, *targets) -> (*state, loss, *aux)``, of these leaves.
    """

    def __init__(
        self,
        specialization: Specialization,
        optimizer: Optimizer,
        state: TrainState,
        *,
        has_aux: bool,
        donate: bool,
    ) -> None:
        self.specialization = specialization
        self.optimizer = optimizer
        self._has_aux = has_aux
        state = self.open_state(state)
        self._structure = jax.tree.structure(state)
        # A state whose leaves are their indices.
        indices = jax.tree.unflatten(self._structure, range(self._structure.num_leaves))
        self.variable_indices = jax.tree.leaves(indices.variables)
        self._signature_index: int | None = None
        self.program = self._lower(state, indices, donate=donate)

    def open_state(self, state: TrainState) -> TrainState:
        """A user's state, with a node of pieces for each leaf in pieces."""
        if not self.specialization.layout.pieces:
            return state
        variables = self.specialization.layout.open_params(state.variables)
        return state.replace(
            params=_variables.params(variables),
            opt_state=self.optimizer.open_state(state.opt_state),
            model_state=_variables.model_state(variables),
        )

    @pause_collector()
    def _lower(self, state: TrainState, indices: Any, *, donate: bool) -> Program:
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
        batch = self.specialization.batch_arguments(graph, (x, targets))

        rng_indices = jax.tree.leaves(indices.rng)
        rngs_and_step = [*(inputs[i] for i in rng_indices), inputs[indices.step]]
        advance = Computation(
            "advance", _advance, [graph.specs[value] for value in rngs_and_step]
        )
        first_place = self.specialization.placement.place(0)
        *rngs, next_step = graph.call_in_processes(advance, first_place, rngs_and_step)

        loss, aux, grads, changed = self.specialization.into(
            graph, variables, [*batch, *rngs]
        )

        param_indices = jax.tree.leaves(indices.params)
        pairs = zip(param_indices, layout.is_param_trained, strict=True)
        trained_indices = [i for i, is_trained in pairs if is_trained]
        updated_indices = [*trained_indices, *jax.tree.leaves(indices.opt_state)]
        updated = self.optimizer.update.into(
            graph,
            [
                *(inputs[i] for i in updated_indices),
                *(grads[i] for i in layout.params if i in grads),
            ],
        )

        # index of a leaf of the state -> its new value
        new_state: dict[int, Any] = dict(enumerate(inputs))
        new_state |= zip(updated_indices, updated, strict=True)
        for leaf, value in changed.items():
            new_state[self.variable_indices[leaf]] = value
        new_state[indices.step] = graph.bring_to_processes(next_step)
        metrics = map(graph.bring_to_processes, graph.as_own_arrays([*loss, *aux]))
        return Program(graph, [*new_state.values(), *metrics])

    def _add_state(
        self, graph: Graph, state: TrainState, indices: Any, *, donate: bool
    ) -> list[Value]:
        """Adds the leaves of a state, in order, to the arguments of a graph."""
        # index of a leaf of the state -> its spec, and its place
        leaves: dict[int, ArgumentLeaf] = {}
        layout = self.specialization.layout
        for index, spec, place, sharding in zip(
            self.variable_indices,
            layout.specs,
            layout.places,
            layout.shardings,
            strict=True,
        ):
            leaves[index] = ArgumentLeaf(
                "state", (), spec, place=place, sharding=sharding
            )
        opt_state_indices = jax.tree.leaves(indices.opt_state)
        leaves |= zip(opt_state_indices, self.optimizer.state, strict=True)
        # Keys and the number of the step come from outside, and are not overwritten.
        rng_indices = jax.tree.leaves(indices.rng)
        scalars = dict(zip(rng_indices, jax.tree.leaves(state.rng), strict=True))
        scalars[indices.step] = state.step
        for index, array in scalars.items():
            spec = _jaxpr.spec(jax.typeof(array))
            leaves[index] = ArgumentLeaf("state", (), spec, place=OUTSIDE)

        arguments: list[Value] = []
        for path, index in jax.tree_util.tree_leaves_with_path(indices):
            leaf = leaves[index]
            argument = graph.argument(
                leaf.value,
                leaf.place,
                name=f"state{jax.tree_util.keystr(path)}",
                donated=donate and index not in scalars,
                sharding=leaf.sharding,
            )
            arguments.append(argument)
        return arguments

    def result(
        self, outputs: Sequence[Any], train_step: "TrainStep"
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state and the metrics that a step returns, from the program's outputs."""
        num_leaves = self._structure.num_leaves
        inner_leaves = outputs[:num_leaves]
        leaves = inner_leaves
        state = jax.tree.unflatten(self._structure, inner_leaves)
        if self.specialization.layout.pieces:
            state = _stacked.close_tree(state)
            leaves = jax.tree.leaves(state)
        if self._signature_index is None:  # weak types may differ from the input's
            structure = jax.tree.structure(state)
            self._signature_index = train_step.signature_index(structure, leaves)
        origin = StateOrigin(
            train_step=weakref.ref(train_step),
            signature_index=self._signature_index,
            leaves=leaves,
            inner_leaves=inner_leaves,
        )
        set_origin(state, origin)

        loss, aux, _ = self.specialization.split_outputs(outputs[num_leaves:])
        metrics = {"loss": loss}
        if self._has_aux:
            metrics["aux"] = aux
        return state, metrics


def _make_optimizer(
    tx: optax.GradientTransformation, state: TrainState, specialization: Specialization
) -> Optimizer:
    """The optimizer of the parameters of a state."""
    layout = specialization.layout
    specs = _microbatch.array_specs(state.variables, "params")
    return Optimizer(
        tx,
        params=_variables.params(layout.open_params(specs)),
        trained=layout.is_param_trained,
        placement=specialization.placement,
        locations=layout.param_locations,
        opt_state=state.opt_state,
    )


def _advance(*rngs_and_step: jax.Array) -> tuple[jax.Array, ...]:
    """The keys of a step, and the number of the next one."""
    *rngs, step = rngs_and_step
    return *_rng.step_keys(rngs, step), step + 1
