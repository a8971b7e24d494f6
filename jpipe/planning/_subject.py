"""What is planned: a list of layers, or one model that is divided into pieces."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from .._arguments._trainable import Trainable
from .._instructions._progress import Progress
from .._instructions._transfer import AbstractDevice
from .._layers._adapter import adapt_layers, is_model
from .._layers._layer_group import group_layers
from .._layers._skip import skip_name
from .._layers._text import abbreviate
from .._model._model import Model
from .._partition import _balanced_cuts
from .._partition._config import PipelineConfig
from .._partition._cut_points import CutPoints
from .._partition._partition import Partition
from .._pipelined import _model_functions
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization
from .._stage._stage_names import name_stages
from ..schedules import Schedule, gpipe
from ._describe import describe, describe_function
from ._plan import Plan
from ._request import Request, any_loss
from ._traced import TracedLayer

PyTree = Any
_NO_TARGETS = (
    "loss= was given and no targets=: the loss was called with () in their place"
)
# A model is divided as finely as for about so many stages.
_PIECES = 16


class PlannedModel:
    """A list of layers, or one model as pieces between which few bytes cross.

    The pieces are those of the first micro-batch that it is traced on.

    Args:
      given: as `jpipe.pipeline` takes it.
    """

    def __init__(self, given: Any) -> None:
        self._is_model = is_model(given)
        self._layers = adapt_layers([given] if self._is_model else given)
        self._names = [layer.name for layer in self._layers]
        # Where the pieces of one model end.
        self._pieces: CutPoints | None = None
        # What was planned last; one model is the same in all plans.
        self._model: Model | None = None

    def traced(self, request: Request) -> TracedLayer:
        """Each layer or piece as a stage, on the first micro-batch.

        Raises:
          ValueError: as a pipeline of them.
          TypeError: likewise.
        """
        with Progress("models traced") as progress:
            progress.show(0, 1)
            return self._traced(request)

    def _traced(self, request: Request) -> TracedLayer:
        one_microbatch = request.resized(request.batch().sizes[0])
        if self._is_model and self._pieces is None:
            self._pieces = self._divide(one_microbatch)
        count = len(self._names)
        if self._pieces is not None:
            count = len(self._pieces.positions) + 1
        model, divided, variables = self._divided(
            one_microbatch,
            balance=[1] * count,
            remat="none",
            schedule=gpipe(count, 1),
        )
        if self._is_model:
            pieces = enumerate(name_stages(divided.stages, divided.layout.keys))
            self._names = [abbreviate(names) or f"piece {i}" for i, names in pieces]
        skips = model.name_skips(divided.stages) if model.is_list else {}
        return TracedLayer(tuple(self._names), divided, variables, skips)

    def planned(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> Plan:
        """What is known of a step on devices that are not there."""
        request = request.with_loss()
        model, divided, _ = self._divided(
            request, balance=balance, remat=remat, schedule=schedule, data=data
        )
        known = describe_function(divided)
        ends = itertools.accumulate(balance)
        names = [
            self._names[end - size : end]
            for size, end in zip(balance, ends, strict=True)
        ]
        if not model.is_list:
            return describe(known._replace(names=names, modules=known.names))
        skips = [(skip_name(r.key), r.source, r.target) for r in model.routes]
        return describe(known._replace(names=names, skips=skips))

    def _divide(self, one_microbatch: Request) -> CutPoints:
        """Divides a model into its pieces."""
        self._pieces = CutPoints.none(_PIECES)
        _, whole, variables = self._divided(
            one_microbatch, balance=[1], remat="none", schedule=gpipe(1, 1)
        )
        program, count = whole.stages.first, len(jax.tree.leaves(variables))
        return CutPoints.of(
            program, _balanced_cuts.find_pieces(program, _PIECES), count, _PIECES
        )

    def _divided(
        self,
        request: Request,
        *,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> tuple[Model, Specialization, PyTree]:
        """Returns the model, its function in stages, and specs of its variables."""
        config = PipelineConfig(
            num_microbatches=schedule.num_microbatches,
            ranks=[AbstractDevice(rank, data) for rank in range(schedule.num_ranks)],
            schedule=schedule,
            remat=remat,
            cuts=self._cuts(balance) if self._is_model else None,
        )
        groups = None if self._is_model else group_layers(self._layers, balance)
        partition = Partition(config, groups)
        model = self._model
        if model is None or model.is_list:  # whose marks follow from the balance
            model = Model(self._layers, request.axes, partition.stage_of_layer)
            self._model = model
        args: tuple[PyTree, ...] = request.sample, request.rngs
        # Nobody is given what is written, and nobody waits for it.
        spec = _model_functions.forward_spec(model, train=request.train)
        spec = replace(spec, discards=lambda *_: None)
        if request.objective is not None:
            args = request.sample, request.targets, request.rngs
            spec = _model_functions.loss_spec(
                model, request.objective, [], train=request.train
            )
        trainable = Trainable(request.trainable, by_layer=model.is_list)

        def trained(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(model.marks(variables, trainable))

        try:
            initial = model.initial(model.sample(request.sample, partition))
            variables = model.from_entries(initial.specs)
            built = PipelinedFunction(spec, partition, trained)(variables, *args)
        except Exception as error:
            has_loss = request.loss not in (None, any_loss)
            if has_loss and not jax.tree.leaves(request.targets):
                error.add_note(_NO_TARGETS)
            raise
        return model, built, variables

    def _cuts(self, balance: Sequence[int]) -> CutPoints:
        """Where a model is divided into stages of so many pieces."""
        assert self._pieces is not None
        ends = itertools.accumulate(balance[:-1])
        return self._pieces.some([end - 1 for end in ends])
