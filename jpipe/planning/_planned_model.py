"""A model on abstract devices: traced layer by layer, and as a step of a plan.

A plan counts in layers of a list, or in sections of one model, which end at gaps
between equations that few bytes cross. A model is cut into sections once, on the first
micro-batch that it is traced on; the cut points mean the same on micro-batches of other
sizes. Of a scan over layers each iteration may be a section; those of one stage are one
scan again (see `CutPoints.select`).
"""

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
from .._layers._text import abbreviate
from .._model._model import Model
from .._partition import _balanced_cuts
from .._partition._cut_points import CutPoints
from .._partition._options import Options
from .._partition._partition import Partition
from .._partition._remat_mode import NONE
from .._partition._scan_division import divide_by_iteration
from .._pipelined import _model_functions
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization
from .._pipelined._user_function import StateUse
from .._stage._stage_names import name_stages
from .._trace._layer_scans import UNDIVIDED
from ..schedules import gpipe
from ._describe import describe, describe_function
from ._plan_record import Plan
from ._request import Request
from ._space import Choice
from ._traced_layers import TracedLayers

PyTree = Any
# A model is cut as finely as for about so many stages.
_NUM_SECTIONS = 16


class PlannedModel:
    """A list of layers, or one model as sections between which few bytes cross.

    Args:
      layers: the layers or the model, as `jpipe.pipeline` takes them.
    """

    def __init__(self, layers: Any) -> None:
        self._is_model = is_model(layers)
        self._layers = adapt_layers([layers] if self._is_model else layers)
        # The names of the layers or sections.
        self._names = [layer.name for layer in self._layers]
        # The ends of all sections of one model; None before it was traced.
        self._sections: CutPoints | None = None
        # The model of the last step; one model is the same in all steps.
        self._model: Model | None = None

    def traced(self, request: Request) -> TracedLayers:
        """Traces each layer or section as a stage, on the first micro-batch.

        Raises:
          ValueError: as a pipeline of them.
          TypeError: likewise.
        """
        with Progress("models traced") as progress:
            progress.show(0, 1)
            one_microbatch = request.resized(request.batch().sizes[0])
            num_layers = len(self._names)
            is_first_trace = self._is_model and self._sections is None
            if is_first_trace:
                self._sections = self._find_sections(one_microbatch)
            if self._sections is not None:
                num_layers = len(self._sections.positions) + 1
            specialization, variables = self._specialize(
                one_microbatch, _one_layer_per_stage(num_layers), cuts=self._sections
            )
            if is_first_trace:  # sections have one name in all traces
                modules = name_stages(specialization.stages, specialization.layout.keys)
                self._names = [
                    abbreviate(names) or f"section {index}"
                    for index, names in enumerate(modules)
                ]
            return TracedLayers(tuple(self._names), specialization, variables)

    def describe_step(self, request: Request, choice: Choice) -> Plan:
        """Describes a training step on abstract devices, without a forecast."""
        cuts = None
        if self._sections is not None:
            cuts = _stage_cuts(self._sections, choice.balance)
        specialization, _ = self._specialize(request.with_loss(), choice, cuts=cuts)
        ends = [0, *itertools.accumulate(choice.balance)]
        names = [self._names[begin:end] for begin, end in itertools.pairwise(ends)]
        info = describe_function(specialization)
        modules = info.names if self._is_model else ()
        return describe(info._replace(names=names, modules=modules))

    def _find_sections(self, one_microbatch: Request) -> CutPoints:
        """Finds the gaps of a model that few bytes cross."""
        # The model is one stage, but its calls of `jax.checkpoint` are opened as for as
        # many as there may be sections, so that sections may end within them.
        whole = CutPoints.without_cuts(_NUM_SECTIONS)
        one_stage = _one_layer_per_stage(1)
        specialization, _ = self._specialize(one_microbatch, one_stage, cuts=whole)
        division = divide_by_iteration(specialization.stages.traced(), _NUM_SECTIONS)
        if division != UNDIVIDED:
            whole = CutPoints.without_cuts(_NUM_SECTIONS, division)
            specialization, _ = self._specialize(one_microbatch, one_stage, cuts=whole)
        traced = specialization.stages.traced()
        section_starts = _balanced_cuts.find_sections(traced, _NUM_SECTIONS)
        cuts = CutPoints.from_trace(
            traced,
            section_starts,
            num_params=len(specialization.layout.specs),
            num_traced_stages=_NUM_SECTIONS,
            division=division,
        )
        return cuts.select(range(len(section_starts)))

    def _specialize(
        self, request: Request, choice: Choice, *, cuts: CutPoints | None
    ) -> tuple[Specialization, PyTree]:
        """Returns the model's function in stages, and specs of its variables.

        Args:
          request: the inputs and the loss.
          choice: the stages and the schedule.
          cuts: the cut points of the stages; ``None`` of a list.
        """
        schedule = choice.schedule
        options = Options(
            num_microbatches=schedule.num_microbatches,
            devices=[
                AbstractDevice(rank, choice.num_shards)
                for rank in range(schedule.num_ranks)
            ],
            schedule=schedule,
            remat=choice.remat,
            cuts=cuts,
        )
        groups = None
        if not self._is_model:
            groups = group_layers(self._layers, choice.balance)
        partition = Partition(options, groups)
        model = self._model
        # The marks of a list depend on the balance.
        if model is None or not self._is_model:
            model = Model(self._layers, request.axes, partition.stage_of_layer)
            self._model = model

        # No caller receives the state that is written, so no warning is due.
        user_function = replace(
            _model_functions.forward_function(model, train=request.train),
            state_use=StateUse.DROP,
        )
        args: list[PyTree] = [request.x, request.rngs]
        if request.objective is not None:
            user_function = _model_functions.loss_function(
                model, request.objective, [], train=request.train
            )
            args = [request.x, request.targets, request.rngs]
        trainable = Trainable(request.trainable, by_layer=model.is_list)

        def trained(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(model.is_trained(variables, trainable))

        initial = model.initial(model.sample_batch(request.x, partition))
        variables = model.from_entries(initial.specs)
        function = PipelinedFunction(user_function, partition, trained)
        specialization = function.specialize(variables, *args)
        return specialization, specialization.layout.split_params(variables)


def _stage_cuts(sections: CutPoints, balance: Sequence[int]) -> CutPoints:
    """The cut points of stages that have so many sections."""
    ends = itertools.accumulate(balance[:-1])
    return sections.select([end - 1 for end in ends])


def _one_layer_per_stage(num_layers: int) -> Choice:
    """A choice in which each layer is a stage, and all micro-batches are one."""
    return Choice(
        balance=(1,) * num_layers,
        remat=(NONE.name,) * num_layers,
        schedule=gpipe(num_layers, 1),
    )
