"""The methods that `train_step` and `value_and_grad` of a pipeline have in common."""

from collections.abc import Collection, Sequence
from typing import Any

from .._check._report import CheckReport
from .._layers._rng import Rngs
from .._placed._mesh_context import outside_of_meshes
from .._train._pipelined_loss import PipelinedLoss
from ..planning._describe import describe_tail
from ..planning._plan_record import Plan
from ._handle import Handle
from ._pipelined_model import UNKNOWN, PipelinedModel

PyTree = Any


class LossMethods(Handle):
    """The plan, the description and the check of a function of a loss.

    Args:
      pipelined_model: the model.
      pipelined_loss: the loss and its gradients, in stages.
    """

    def __init__(
        self, pipelined_model: PipelinedModel, pipelined_loss: PipelinedLoss
    ) -> None:
        self._pipelined_model = pipelined_model
        self._pipelined_loss = pipelined_loss

    @property
    @outside_of_meshes
    def plan(self) -> Plan:
        """The plan of the pipeline with this loss, in names and numbers.

        After a call it has the bytes of a step too.

        Raises:
          ValueError: if the pipeline is of a model that was not divided yet.
        """
        return self._pipelined_model.plan(self._pipelined_loss.last_specialization)

    @property
    def _input_names(self) -> Collection[str]:
        return self._pipelined_model.input_names

    def __repr__(self) -> str:
        objective = self._pipelined_loss.objective
        loss_fn = objective.loss_fn
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        return (
            f"<jpipe.{type(self).__name__}: {name}, "
            f"{self._pipelined_model.num_microbatches} micro-batches, reduction "
            f"{objective.reduction!r}>"
        )

    @outside_of_meshes
    def __str__(self) -> str:
        if not self._pipelined_model.is_divided:
            return f"{self!r}\n{UNKNOWN}"
        reason = self._pipelined_loss.unchecked
        warning = f"\nthe loss was not checked: {reason}" if reason else ""
        tail = describe_tail(self._pipelined_loss.last_specialization)
        return f"{self.plan}{tail}{warning}"

    def _check(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs,
        train: bool,
        microbatch_sizes: Sequence[int] | None,
        tolerance: float | None,
    ) -> CheckReport:
        """Checks the layers and the loss: see `check_pipeline`."""
        from ._pipeline_check import check_pipeline  # which a step does not need

        return check_pipeline(
            self._pipelined_model,
            variables,
            (x, targets),
            pipelined_loss=self._pipelined_loss,
            rngs=rngs,
            train=train,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )
