"""What is planned: a list of layers, or one model that is divided into pieces."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from .._functions import _remat
from .._functions._trainable import Trainable
from .._instructions._transfer import OnPaper
from .._layers._layer import as_layers, is_model
from .._layers._stage import abbreviate, fuse
from .._run._pipe import Pipe
from .._slices import _cut
from .._slices._built import Built
from .._slices._cuts import Cuts
from .._slices._division import ByLayer, Division
from .._slices._listed import Listed
from .._slices._model import Model
from .._slices._modules import Modules
from .._slices._names import modules
from .._slices._sliced import Sliced
from ..schedules import Schedule, gpipe
from ._request import Request
from ._traced import Traced

PyTree = Any
# A model is divided as finely as for about so many stages.
_PIECES = 16


def subject(given: Any) -> "Subject":
    """What is given as ``layers`` to `jpipe.profile` and `jpipe.plan`."""
    if isinstance(given, Subject):
        return given
    return OneModel(given) if is_model(given) else Layers(given)


class Subject(ABC):
    """What is planned, as neighbouring pieces."""

    @abstractmethod
    def traced(
        self, request: Request, balance: Sequence[int] | None, mode: str
    ) -> Traced:
        """The pieces as stages on the first micro-batch.

        Args:
          request: what is profiled.
          balance: how many pieces each stage has; ``None``: one.
          mode: which residuals stages store.

        Raises:
          ValueError: as a pipeline of them.
          TypeError: likewise.
        """

    @abstractmethod
    def cuts(self, balance: Sequence[int]) -> Cuts | None:
        """Where a model is divided; nothing of a list of layers."""

    def lowered(
        self,
        request: Request,
        balance: Sequence[int],
        remat: Sequence[str],
        schedule: Schedule,
        data: int,
    ) -> Built:
        """The loss and its gradients of a mini-batch, on devices that are not there."""
        return self._built(request, balance, remat, schedule, data)[0]

    @abstractmethod
    def _built(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> tuple[Built, PyTree, Mapping[Any, str]]:
        """The pieces, divided; specs of their variables; the names of skips."""


class Layers(Subject):
    """A list of layers.

    Args:
      given: as `jpipe.pipeline` takes them.
    """

    def __init__(self, given: Any) -> None:
        self._given = [*given] if hasattr(given, "__iter__") else given

    def traced(
        self, request: Request, balance: Sequence[int] | None, mode: str
    ) -> Traced:
        """The layers as stages: see `Subject`."""
        sizes = [1] * len(as_layers(self._given)) if balance is None else balance
        own, schedule = request.resized(request.batch().sizes[0]), gpipe(len(sizes), 1)
        built, *rest = self._built(own, sizes, mode, schedule)
        names = [abbreviate([x.name for x in s.layers]) for s in built.pipe.stages]
        return _as_traced(names, built, *rest)

    def cuts(self, balance: Sequence[int]) -> None:
        """Nothing."""
        del balance

    def _built(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> tuple[Built, PyTree, Mapping[Any, str]]:
        """The layers, divided: see `Subject`."""
        own, ranks = as_layers(self._given), _ranks(schedule, data)
        remat = _remat.per_stage(remat, len(balance))
        pipe = Pipe(fuse(own, tuple(balance)), ranks, schedule, remat)
        listed = Listed(pipe, request.axes)
        built, variables = _built(request, listed, ByLayer(pipe))
        return built, variables, listed.skips(built.stages)


class OneModel(Subject):
    """One model, as pieces between which few bytes cross.

    The pieces are those of the first micro-batch that it is traced on.

    Args:
      given: a module or a function.
    """

    def __init__(self, given: Any) -> None:
        (self._layer,) = as_layers([given])
        self._pieces: Cuts | None = None
        self._model: Model | None = None

    def traced(
        self, request: Request, balance: Sequence[int] | None, mode: str
    ) -> Traced:
        """The pieces as stages: see `Subject`."""
        own = request.resized(request.batch().sizes[0])
        if self._pieces is None:
            none = Cuts.none(_PIECES)
            whole, variables = self._cut(own, none, gpipe(1, 1), mode)
            program, count = whole.stages.first, len(jax.tree.leaves(variables))
            places = _cut.pieces(program, _PIECES)
            self._pieces = Cuts.of(program, places, count, _PIECES)
        cuts = self._pieces if balance is None else self.cuts(balance)
        stages = len(cuts.positions) + 1
        built, variables = self._cut(own, cuts, gpipe(stages, 1), mode)
        names = [
            abbreviate(names) or f"piece {i}"
            for i, names in enumerate(modules(built.stages))
        ]
        return _as_traced(names, built, variables, {})

    def cuts(self, balance: Sequence[int]) -> Cuts:
        """Where the model is divided."""
        assert self._pieces is not None
        ends = itertools.accumulate(balance[:-1])
        return self._pieces.some([end - 1 for end in ends])

    def _built(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> tuple[Built, PyTree, Mapping[Any, str]]:
        """The model, divided: see `Subject`."""
        return *self._cut(request, self.cuts(balance), schedule, remat, data), {}

    def _cut(
        self,
        request: Request,
        cuts: Cuts,
        schedule: Schedule,
        remat: str | Sequence[str],
        data: int = 1,
    ) -> tuple[Built, PyTree]:
        """The model divided at some cuts; and specs of its variables."""
        ranks, number = _ranks(schedule, data), schedule.num_microbatches
        given = number, None, ranks, lambda _: ranks, schedule, remat
        if self._model is None or self._model.axes != request.axes:
            self._model = Model(self._layer, request.axes)
        return _built(request, self._model, Division(*given, cuts=cuts))


def _built(
    request: Request, own: Modules, division: Division | ByLayer
) -> tuple[Built, PyTree]:
    """Modules that are divided; and specs of their variables."""
    args: tuple[PyTree, ...] = request.sample, request.rngs
    # Nobody is given what is written, and nobody waits for it.
    work = replace(own.forward(request.train), discards=_nothing)
    if request.objective is not None:
        args = request.sample, request.targets, request.rngs
        work = own.loss(request.objective, request.train, [])
    trainable = Trainable(request.trainable, by_layer=own.parent.is_list)

    def trained(variables: PyTree) -> list[bool]:
        return jax.tree.leaves(trainable.marks(own.layers, own.entries(variables)))

    initial = own.initial(own.sample(request.sample, division))
    variables = own.of_entries(initial.specs)
    return Sliced(work, division, trained)(variables, *args), variables


def _nothing(*_: Any) -> None:
    pass


def _as_traced(
    names: Sequence[str], built: Built, variables: PyTree, skips: Mapping[Any, str]
) -> Traced:
    own = built.batch, built.stages, built.layout.owner_stages
    return Traced(tuple(names), *own, variables, skips)


def _ranks(schedule: Schedule, data: int) -> tuple[OnPaper, ...]:
    return tuple(OnPaper(rank, data) for rank in range(schedule.num_ranks))
