"""A function of parameters and a mini-batch, and all that a pipeline knows of it."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_leaves_with_path

from .._arguments import _call, _microbatch, _variables
from .._arguments._batch import Batch
from .._instructions._sharding import Sharding
from .._jaxprs._pieces import Pieces, first_inner_indices
from .._layers import _rng
from .._lower._join import Join
from .._model._model import Model
from .._partition import _param_sharding
from .._partition._stage_placement import StagePlacement
from .._trace._microbatch_outputs import MicrobatchOutputs
from .._trace._state_updates import StateLeaf
from .._trace._traced_function import TracedFunction

PyTree = Any


class StateUse(enum.Enum):
    """The use of the state that a model writes."""

    RETURN = enum.auto()  # it is a result
    WARN = enum.auto()  # it is lost, and a warning says so
    DROP = enum.auto()  # it is lost: `planning` traces a function that nobody calls


@dataclass(frozen=True)
class FunctionSpec:
    """A function that is computed in stages.

    Attributes:
      function: ``(params, *args) -> loss``, ``(loss, aux)``, or without a loss ``aux``,
        its outputs; the last of ``args`` of a loss function is a dict of the arguments
        by name.
      make_joins: ``results of micro-batches besides the loss -> join of each leaf``.
      in_axes: the axes of the examples in the arguments after ``params``.
      has_loss: True if it returns a loss, which is differentiated.
      has_aux: True if it returns something besides the loss.
      reduction: the loss over the examples: see `jpipe.value_and_grad`.
      model: the model that it calls, if any: then its first argument after ``params``
        is the input, and its aux a pair, of aux and the state that the model writes.
      names: the names of the arguments in errors, for a model.
      argnums: the indices of the arguments of a loss function that are its parameters.
      state_use: the use of the state that the model writes.
      train: True if the model runs as in training.
      check: checks parameters and arguments of a new signature, before it is built.
      explain: ``(error, params, args)``; raises a better error than one that was raised
        on these parameters and arguments.
    """

    function: Callable[..., Any]
    make_joins: Callable[[MicrobatchOutputs], list[Join]]
    in_axes: Any = 0
    has_loss: bool = True
    has_aux: bool = False
    reduction: str = "mean"
    model: Model | None = None
    names: Sequence[str] = ()
    argnums: Sequence[int] = (0,)
    state_use: StateUse = StateUse.RETURN
    train: bool = True
    check: Callable[[PyTree, Sequence[PyTree]], None] | None = None
    explain: Callable[[Exception, PyTree, Sequence[PyTree]], None] | None = None

    @property
    def params_name(self) -> str:
        """The name of the parameters in errors."""
        return "params" if self.model is None else "variables"

    @property
    def advice(self) -> str:
        """The call to type where parameters are not in place."""
        if self.model is None:
            return "params = grad_fn.place(params, *args)"
        return self.model.advice

    def check_params(self, params: PyTree) -> None:
        """Checks that a tree may be one of parameters: arguments may be exchanged.

        Raises:
          ValueError: if it is none.
        """
        if self.model is None:
            _variables.check_params(params)
        else:
            self.model.entries(params)

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
        names = self.names
        in_axes = self.in_axes
        axes_advice = _microbatch.MODEL_AXES_ADVICE
        if self.model is None:
            *positional, keywords = args
            names = _call.argument_names(len(positional), self.argnums)
            in_axes = _call.axes_of_call(in_axes, positional, keywords)
            axes_advice = _microbatch.FUNCTION_AXES_ADVICE
        elif args[-1] is not None:
            _rng.check_rngs(args[-1])
        return _call.batch(
            args,
            in_axes,
            names,
            num_microbatches=num_microbatches,
            num_shards=num_shards,
            allows_unsplit=allows_unsplit,
            axes_advice=axes_advice,
        )

    def shardings(
        self, placement: StagePlacement, params: PyTree, owner_stages: Sequence[int]
    ) -> list[Sharding]:
        """Returns the sharding of each parameter in its stage."""
        if self.model is not None:
            return self.model.shardings(placement, params, owner_stages)
        devices = [placement.devices[stage] for stage in owner_stages]
        return _param_sharding.tree_shardings(
            placement, params, devices, inside=("params",)
        )

    def state_leaves(
        self, traced: TracedFunction, variables: PyTree
    ) -> tuple[int, list[StateLeaf]]:
        """The state that the model may write.

        Args:
          traced: a trace of the function.
          variables: specs of the variables.

        Returns:
          The index in aux of the first leaf that may be written, and these leaves.
        """
        if self.model is None:
            return 0, []
        aux, changed = traced.aux
        paths = [path for path, _ in tree_leaves_with_path(variables)]
        leaves = list[StateLeaf]()
        for i in sorted(changed):
            text = self.model.name_written(paths[i])
            leaves.append(StateLeaf(i, path=paths[i], text=text))
        return len(jax.tree.leaves(aux)), leaves

    def aux_in_pieces(
        self, traced: TracedFunction, pieces: Mapping[int, Pieces], *, num_params: int
    ) -> PyTree:
        """Specs of all results besides the loss, if parameters are in pieces.

        Args:
          traced: a trace of the function of whole parameters.
          pieces: index of a parameter -> its pieces.
          num_params: the number of whole parameters.
        """
        if self.model is None:
            return traced.aux
        aux, changed = traced.aux
        inner_indices = first_inner_indices(num_params, pieces)
        # index of a leaf of the parameters, of which each piece is one -> its new value
        changed_inside: dict[int, jax.ShapeDtypeStruct] = {}
        for i, spec in changed.items():
            specs = pieces[i].specs(spec) if i in pieces else [spec]
            changed_inside |= dict(enumerate(specs, inner_indices[i]))
        return aux, changed_inside

    def aux_of(self, traced: TracedFunction) -> PyTree:
        """Returns specs of aux (of outputs), without the state that a model writes."""
        return traced.aux if self.model is None else traced.aux[0]
