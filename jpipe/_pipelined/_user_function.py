"""A function of parameters and a mini-batch, and all that a pipeline knows of it.

It is a `PlainFunction` of a user, which reads parameters and any arguments, or a
`ModelFunction`, the outputs of a model or a loss of them.
"""

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.tree_util import tree_leaves_with_path

from .._arguments import _call, _microbatch, _variables
from .._arguments._batch import Batch
from .._arguments._mutable import NOTHING_MUTABLE, Mutable
from .._instructions._sharding import Sharding
from .._jaxprs._pieces import Pieces, first_inner_indices
from .._layers import _rng
from .._lower._join import Join
from .._lower._microbatch_outputs import MicrobatchOutputs
from .._model._model import Model
from .._model._state_axes import find_axes
from .._partition import _param_sharding
from .._partition._stage_placement import StagePlacement
from .._trace._discarded_state import check_discarded_state
from .._trace._example_state import with_state_inputs
from .._trace._state_updates import (
    StateLeaf,
    StateUpdate,
    drop_unwritten_aux,
    find_updates,
)
from .._trace._traced_function import TracedFunction
from ._captured_params import check_captured_params
from ._specialization import Specialization

PyTree = Any
# micro-batch size -> trace, that of the first micro-batch first
TracedFunctions = dict[int, TracedFunction]


class StateUse(enum.Enum):
    """The use of the state that a model writes."""

    RETURN = enum.auto()  # it is a result
    WARN = enum.auto()  # it is lost, and a warning says so
    JOIN = enum.auto()  # that of examples is a result, row by row; the rest is lost
    DROP = enum.auto()  # it is lost: `planning` traces a function that nobody calls


@dataclass(frozen=True)
class UserFunction(abc.ABC):
    """A function that is computed in stages.

    Attributes:
      call: ``(params, *args) -> loss``, ``(loss, aux)``, or without a loss ``aux``,
        its outputs.
      make_joins: ``results of micro-batches besides the loss -> join of each leaf``.
      in_axes: the axes of the examples in the arguments after ``params``.
      has_loss: True if it returns a loss, which is differentiated.
      has_aux: True if it returns something besides the loss.
      reduction: the loss over the examples: see `jpipe.value_and_grad`.
      check_signature: checks the arguments of a new signature before it is built;
        `PipelinedModel` sets that of a model.
      explain: ``(error, params, args)``; raises a better error than one that was raised
        on these parameters and arguments.
      params_name: the name of the parameters in errors.
      axes_advice: the advice on the axes of arguments in errors.
      has_collections: True if state stands beside the parameters.
      folds_params: True if keys among the parameters are folded for each micro-batch.
      may_have_penalty: True if the loss may have terms that follow from no example.
    """

    call: Callable[..., Any]
    make_joins: Callable[[MicrobatchOutputs], list[Join]]
    in_axes: Any = 0
    has_loss: bool = True
    has_aux: bool = False
    reduction: str = "mean"
    check_signature: Callable[[PyTree, Sequence[PyTree]], None] | None = None
    explain: Callable[[Exception, PyTree, Sequence[PyTree]], None] | None = None

    params_name: ClassVar[str]
    axes_advice: ClassVar[str]
    has_collections: ClassVar[bool]
    folds_params: ClassVar[bool]
    may_have_penalty: ClassVar[bool]

    @property
    @abc.abstractmethod
    def advice(self) -> str:
        """The call to type where parameters are not in place."""

    # ---------------------------------------------------------------------- arguments

    @abc.abstractmethod
    def check_params(self, params: PyTree) -> None:
        """Checks that a tree may be one of parameters: arguments may be exchanged.

        Raises:
          ValueError: if it is none.
        """

    @abc.abstractmethod
    def check_captured(self, params: PyTree, specialization: Specialization) -> None:
        """Checks what the function closes over.

        Args:
          params: the parameters of the call.
          specialization: the function, traced for them.
        """

    @abc.abstractmethod
    def axes_and_names(self, args: Sequence[PyTree]) -> tuple[Any, Sequence[str]]:
        """The axes of the examples in the arguments, and the names of these in errors.

        Raises:
          TypeError: if keys are none.
        """

    def batch(
        self,
        args: Sequence[PyTree],
        *,
        num_microbatches: int,
        num_shards: int,
        allows_unsplit: bool = False,
    ) -> Batch:
        """Checks the arguments after the parameters; returns them as a mini-batch.

        Args:
          args: the arguments.
          num_microbatches: the number of micro-batches.
          num_shards: the number of devices over which the examples of each are spread.
          allows_unsplit: see `_call.batch`.

        Raises:
          ValueError: if they cannot be split.
          TypeError: if a leaf is not an array, or keys are none.
        """
        in_axes, names = self.axes_and_names(args)
        return _call.batch(
            args,
            in_axes,
            names,
            num_microbatches=num_microbatches,
            num_shards=num_shards,
            allows_unsplit=allows_unsplit,
            axes_advice=self.axes_advice,
        )

    @abc.abstractmethod
    def shardings(
        self, placement: StagePlacement, params: PyTree, owner_stages: Sequence[int]
    ) -> list[Sharding]:
        """Returns the sharding of each parameter in its stage."""

    # --------------------- traces: here of a function without state, of any arguments

    def count_inputs(self, traced: TracedFunction, args: Any) -> TracedFunction:
        """Counts the leaves of an input, and those that the first or last stage reads.

        Args:
          traced: a trace of the function.
          args: specs of its arguments, of a micro-batch.
        """
        return traced

    def state_leaves(
        self, traced: TracedFunction, variables: PyTree
    ) -> tuple[int, list[StateLeaf]]:
        """The state that the function may write.

        Args:
          traced: a trace of the function.
          variables: specs of the variables.

        Returns:
          The index in aux of the first leaf that may be written, and these leaves.
        """
        return 0, []

    def param_axes(self, params: PyTree, batch: Batch) -> list[int | None]:
        """The axis of the examples in each parameter, which state of examples has.

        Args:
          params: specs of the parameters.
          batch: the mini-batch.
        """
        return [None] * len(jax.tree.leaves(params))

    def with_state_inputs(
        self, traced: TracedFunction, params: PyTree, num_args: int
    ) -> TracedFunction:
        """Makes state of examples an input of micro-batches: see `_example_state`.

        Args:
          traced: a trace of the function.
          params: specs of the parameters, with nodes for those in pieces.
          num_args: the number of leaves of its other arguments.
        """
        return traced

    def find_state(
        self, traced_functions: TracedFunctions, params: PyTree, *, runs: bool
    ) -> tuple[TracedFunctions, StateUpdate]:
        """Finds the state that the function writes.

        Args:
          traced_functions: the traces of the function.
          params: specs of the parameters, with nodes for those in pieces.
          runs: True if the mini-batch has enough examples to run.

        Returns:
          The traces without aux that could be written and is returned unchanged, and
          the state.
        """
        return traced_functions, StateUpdate()

    def aux_in_pieces(
        self, traced: TracedFunction, pieces: Mapping[int, Pieces], *, num_params: int
    ) -> PyTree:
        """Specs of all results besides the loss, if parameters are in pieces.

        Args:
          traced: a trace of the function of whole parameters.
          pieces: index of a parameter -> its pieces.
          num_params: the number of whole parameters.
        """
        return traced.aux

    def aux_of(self, traced: TracedFunction) -> PyTree:
        """Returns specs of aux (of outputs), without the state that is written."""
        return traced.aux

    def without_aux(self, traced: TracedFunction) -> PyTree:
        """Returns specs of what `TracedFunction.aux` holds besides that."""
        return ()


@dataclass(frozen=True)
class PlainFunction(UserFunction):
    """A loss function of a user; its last argument is a dict of those by name.

    Attributes:
      argnums: the indices of the arguments that are its parameters.
      argument_names: the names of its arguments by position, as far as they are known.
    """

    argnums: Sequence[int] = (0,)
    argument_names: Sequence[str] = ()

    params_name = "params"
    axes_advice = _microbatch.FUNCTION_AXES_ADVICE
    has_collections = False
    # It may have no keys but those among its parameters.
    folds_params = True
    may_have_penalty = True

    @property
    def advice(self) -> str:
        """The call to type where parameters are not in place."""
        return "params = grad_fn.place(params, *args)"

    def check_params(self, params: PyTree) -> None:
        """Checks that a tree may be one of parameters."""
        _variables.check_params(params)

    def check_captured(self, params: PyTree, specialization: Specialization) -> None:
        """Checks nothing: parameters from outside are constants, as for JAX."""

    def axes_and_names(self, args: Sequence[PyTree]) -> tuple[Any, Sequence[str]]:
        """The axes and names of positional arguments, and of those by name."""
        *positional, keywords = args
        in_axes = _call.axes_of_call(self.in_axes, positional, keywords)
        return in_axes, _call.argument_names(
            len(positional), self.argnums, self.argument_names
        )

    def shardings(
        self, placement: StagePlacement, params: PyTree, owner_stages: Sequence[int]
    ) -> list[Sharding]:
        """Returns the sharding of each parameter in its stage."""
        devices = [placement.devices[stage] for stage in owner_stages]
        return _param_sharding.tree_shardings(
            placement, params, devices, inside=("params",)
        )


@dataclass(frozen=True, kw_only=True)
class ModelFunction(UserFunction):
    """The forward pass of a model, or its loss.

    The first argument after the parameters is the input; aux is a pair, of aux (of
    outputs) and the state that the model writes.

    Attributes:
      model: the model that it calls.
      names: the names of the arguments in errors.
      state_use: the use of the state that the model writes.
      train: True if the model runs as in training.
      mutable: the collections of which it returns what it changes in evaluation.
      is_whole: True if it is traced on all examples at once, as a trace that only
        divides the model may be.
    """

    model: Model
    names: Sequence[str]
    state_use: StateUse
    train: bool
    mutable: Mutable = NOTHING_MUTABLE
    is_whole: bool = False

    params_name = "variables"
    axes_advice = _microbatch.MODEL_AXES_ADVICE
    has_collections = True
    # A model draws from the keys of a step, which are an argument; a key among its
    # variables is the same for all micro-batches.
    folds_params = False
    # Its loss is one of outputs and targets.
    may_have_penalty = False

    @property
    def advice(self) -> str:
        """The call to type where parameters are not in place."""
        return self.model.advice

    def check_params(self, params: PyTree) -> None:
        """Checks that a tree may be one of the variables of the model."""
        self.model.entries(params)

    def check_captured(self, params: PyTree, specialization: Specialization) -> None:
        """Checks that neither modules nor their loss close over variables."""
        check_captured_params(params, specialization, self.model)

    def axes_and_names(self, args: Sequence[PyTree]) -> tuple[Any, Sequence[str]]:
        """The axes and names of the input, maybe targets, and keys."""
        if args[-1] is not None:
            _rng.check_rngs(args[-1])
        return self.in_axes, self.names

    def batch(
        self,
        args: Sequence[PyTree],
        *,
        num_microbatches: int,
        num_shards: int,
        allows_unsplit: bool = False,
    ) -> Batch:
        """Checks the arguments after the variables; returns them as a mini-batch."""
        return super().batch(
            args,
            num_microbatches=1 if self.is_whole else num_microbatches,
            num_shards=1 if self.is_whole else num_shards,
            allows_unsplit=allows_unsplit,
        )

    def shardings(
        self, placement: StagePlacement, params: PyTree, owner_stages: Sequence[int]
    ) -> list[Sharding]:
        """Returns the sharding of each variable in its stage."""
        return self.model.shardings(placement, params, owner_stages)

    def count_inputs(self, traced: TracedFunction, args: Any) -> TracedFunction:
        """Counts the leaves of the input; of a list those that one stage alone reads.

        Args:
          traced: a trace of the function.
          args: specs of the input, maybe targets, and keys.
        """
        local_args = ()
        if self.model.is_list:
            local_args = args[:2] if self.has_loss else args[:1]
        return replace(
            traced,
            num_model_inputs=len(jax.tree.leaves(args[0])),
            num_uncopied_inputs=len(jax.tree.leaves(local_args)),
        )

    def state_leaves(
        self, traced: TracedFunction, variables: PyTree
    ) -> tuple[int, list[StateLeaf]]:
        """The state that the model may write, behind the index of its first leaf."""
        aux, changed = traced.aux
        paths = [path for path, _ in tree_leaves_with_path(variables)]
        leaves = list[StateLeaf]()
        for i in sorted(changed):
            text = self.model.name_written(paths[i])
            leaves.append(StateLeaf(i, path=paths[i], text=text))
        return len(jax.tree.leaves(aux)), leaves

    def param_axes(self, params: PyTree, batch: Batch) -> list[int | None]:
        """The axis of the examples in each variable that it returns."""
        if not self.mutable.names or batch.num_microbatch_shards == 1:
            return super().param_axes(params, batch)
        return find_axes(self.model, params, batch, self.mutable)

    def with_state_inputs(
        self, traced: TracedFunction, params: PyTree, num_args: int
    ) -> TracedFunction:
        """Makes state of examples an input of micro-batches."""
        if not self.mutable.names:
            return traced
        first_index, leaves = self.state_leaves(traced, params)
        return with_state_inputs(
            traced,
            first_index,
            leaves,
            collections=self.mutable.names,
            num_args=num_args,
        )

    def find_state(
        self, traced_functions: TracedFunctions, params: PyTree, *, runs: bool
    ) -> tuple[TracedFunctions, StateUpdate]:
        """Finds the state that the model writes."""
        state = StateUpdate()
        first = next(iter(traced_functions.values()))
        first_index, leaves = self.state_leaves(first, params)
        if self.state_use is StateUse.RETURN:
            state = find_updates(first, first_index, leaves)
        elif self.state_use is StateUse.WARN and runs:
            check_discarded_state(
                first, first_index, leaves, variables=params, train=self.train
            )
        joined = [state_input.aux_index for state_input in first.state_inputs]
        kept = {*state.aux_indices, *joined}
        written: TracedFunctions = {}
        for size, traced in traced_functions.items():
            first_index, leaves = self.state_leaves(traced, params)
            written[size] = drop_unwritten_aux(traced, first_index, leaves, kept=kept)
        return written, state

    def aux_in_pieces(
        self, traced: TracedFunction, pieces: Mapping[int, Pieces], *, num_params: int
    ) -> PyTree:
        """Specs of aux, and of state, each leaf in the pieces of its variable."""
        aux, changed = traced.aux
        inner_indices = first_inner_indices(num_params, pieces)
        # index of a leaf of the parameters, of which each piece is one -> its new value
        changed_inside: dict[int, jax.ShapeDtypeStruct] = {}
        for i, spec in changed.items():
            specs = pieces[i].specs(spec) if i in pieces else [spec]
            changed_inside |= dict(enumerate(specs, inner_indices[i]))
        return aux, changed_inside

    def aux_of(self, traced: TracedFunction) -> PyTree:
        """Returns specs of aux (of outputs), without the state that is written."""
        return traced.aux[0]

    def without_aux(self, traced: TracedFunction) -> PyTree:
        """Returns specs of what `TracedFunction.aux` holds besides that: the state."""
        _, changed = traced.aux
        return (), changed
