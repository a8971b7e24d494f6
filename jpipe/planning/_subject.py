"""What is planned: a list of layers, or one model that is divided into pieces."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from .._functions import _remat
from .._functions._trainable import Trainable
from .._instructions._progress import Progress
from .._instructions._transfer import OnPaper
from .._layers._layer import adapt_layers, is_model
from .._layers._skip import label
from .._layers._stage import abbreviate, fuse
from .._run._pipe import Pipe
from .._slices import _cut, _model_functions
from .._slices._built import Built
from .._slices._cuts import Cuts
from .._slices._division import ByLayer, Division
from .._slices._model import Model
from .._slices._names import modules
from .._slices._sliced import Sliced
from ..schedules import Schedule, gpipe
from ._describe import describe, of_function
from ._plan import Plan
from ._request import Request, any_loss
from ._traced import Traced

PyTree = Any
_NO_TARGETS = (
    "loss= was given and no targets=: the loss was called with () in their place"
)
# A model is divided as finely as for about so many stages.
_PIECES = 16


class Subject:
    """A list of layers, or one model as pieces between which few bytes cross.

    The pieces are those of the first micro-batch that it is traced on.

    Args:
      given: as `jpipe.pipeline` takes it.
    """

    def __init__(self, given: Any) -> None:
        self._is_model = is_model(given)
        self._layers = adapt_layers([given] if self._is_model else given)
        self._names = [layer.name for layer in self._layers]
        # Of a model: where its pieces end, and it as a function.
        self._pieces: Cuts | None = None
        self._model: Model | None = None

    def traced(self, request: Request) -> Traced:
        """Each layer or piece as a stage, on the first micro-batch.

        Raises:
          ValueError: as a pipeline of them.
          TypeError: likewise.
        """
        with Progress("models traced") as progress:
            progress.show(0, 1)
            return self._traced(request)

    def _traced(self, request: Request) -> Traced:
        one = request.resized(request.batch().sizes[0])
        if self._is_model and self._pieces is None:
            self._pieces = self._divide(one)
        count = len(self._names)
        if self._pieces is not None:
            count = len(self._pieces.positions) + 1
        each = [1] * count, "none", gpipe(count, 1)
        function, divided, variables = self._divided(one, *each)
        if self._is_model:
            pieces = enumerate(modules(divided.stages, divided.layout.keys))
            self._names = [abbreviate(own) or f"piece {i}" for i, own in pieces]
        skips = function.name_skips(divided.stages) if function.is_list else {}
        return Traced(tuple(self._names), divided, variables, skips)

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
        function, divided, _ = self._divided(request, balance, remat, schedule, data)
        known = of_function(divided)
        ends = itertools.accumulate(balance)
        names = [
            self._names[end - size : end]
            for size, end in zip(balance, ends, strict=True)
        ]
        if not function.is_list:
            return describe(known._replace(names=names, modules=known.names))
        skips = [(label(r.key), r.source, r.target) for r in function.routes]
        return describe(known._replace(names=names, skips=skips))

    def _divide(self, one: Request) -> Cuts:
        """Divides a model into its pieces."""
        self._pieces = Cuts.none(_PIECES)
        _, whole, variables = self._divided(one, [1], "none", gpipe(1, 1))
        program, count = whole.stages.first, len(jax.tree.leaves(variables))
        return Cuts.of(program, _cut.pieces(program, _PIECES), count, _PIECES)

    def _divided(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> tuple[Model, Built, PyTree]:
        """The layers as functions; these, divided; specs of their variables."""
        ranks = tuple(OnPaper(rank, data) for rank in range(schedule.num_ranks))
        division: Division | ByLayer
        if self._is_model:
            self._model = self._model or Model(self._layers, request.axes)
            own, chosen = self._model, self._cuts(balance)
            division = Division(
                num_microbatches=schedule.num_microbatches,
                num_stages=None,
                devices=ranks,
                choose=lambda _: ranks,
                schedule=schedule,
                remat=remat,
                cuts=chosen,
            )
        else:
            stages = fuse(self._layers, balance)
            modes = _remat.per_stage(remat, len(stages))
            pipe = Pipe(stages, ranks, schedule, modes)
            own = Model(self._layers, request.axes, pipe.stage_of_layer)
            division = ByLayer(pipe)
        args: tuple[PyTree, ...] = request.sample, request.rngs
        # Nobody is given what is written, and nobody waits for it.
        work = _model_functions.forward(own, train=request.train)
        work = replace(work, discards=lambda *_: None)
        if request.objective is not None:
            args = request.sample, request.targets, request.rngs
            work = _model_functions.loss(
                own, request.objective, [], train=request.train
            )
        trainable = Trainable(request.trainable, by_layer=own.is_list)

        def trained(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(own.marks(variables, trainable))

        try:
            initial = own.initial(own.sample(request.sample, division))
            variables = own.from_entries(initial.specs)
            built = Sliced(work, division, trained)(variables, *args)
        except Exception as error:
            has_loss = request.loss not in (None, any_loss)
            if has_loss and not jax.tree.leaves(request.targets):
                error.add_note(_NO_TARGETS)
            raise
        return own, built, variables

    def _cuts(self, balance: Sequence[int]) -> Cuts:
        """Where a model is divided into stages of so many pieces."""
        assert self._pieces is not None
        ends = itertools.accumulate(balance[:-1])
        return self._pieces.some([end - 1 for end in ends])
