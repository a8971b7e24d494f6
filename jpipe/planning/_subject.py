"""What is planned: a list of layers, or one model that is divided into pieces."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from .._functions import _remat
from .._functions._batch import Axes
from .._functions._trainable import Trainable
from .._instructions._transfer import OnPaper
from .._layers import _rng
from .._layers._layer import as_layers, is_model
from .._layers._sequence import Sequential
from .._layers._stage import abbreviate, fuse
from .._run import _signature
from .._run._pipe import Pipe
from .._slices import _cut
from .._slices._built import Built
from .._slices._cuts import Cuts
from .._slices._division import Division
from .._slices._initial import Initial
from .._slices._listed import Listed, layout_of, listed
from .._slices._model import Model
from .._slices._names import modules
from .._slices._results import gradient
from .._slices._sliced import Sliced
from ..schedules import Schedule, gpipe
from ._request import Request
from ._traced import Traced

PyTree = Any
# A model is divided as finely as for about so many stages.
_PIECES = 16


def subject(given: Any) -> "Layers | OneModel":
    """What is given as ``layers`` to `jpipe.profile` and `jpipe.plan`."""
    if isinstance(given, Layers | OneModel):
        return given
    return OneModel(given) if is_model(given) else Layers(given)


class Layers:
    """A list of layers.

    Args:
      given: as `jpipe.pipeline` takes them.
    """

    def __init__(self, given: Any) -> None:
        self._given = [*given] if hasattr(given, "__iter__") else given

    def traced(
        self, request: Request, balance: Sequence[int] | None, mode: str
    ) -> Traced:
        """The layers as stages on the first micro-batch.

        Args:
          request: what is profiled.
          balance: how many layers each stage has; ``None``: one.
          mode: which residuals stages store.

        Raises:
          ValueError: as a pipeline of these layers.
          TypeError: likewise.
        """
        layers = as_layers(self._given)
        sizes = [1] * len(layers) if balance is None else balance
        schedule = gpipe(len(sizes), 1)
        found, variables = self._listed(request, sizes, mode, schedule, 1)
        return Traced(
            tuple(abbreviate([x.name for x in s.layers]) for s in found.pipe.stages),
            found.batch,
            found.stages,
            found.layout.owner_stages,
            variables,
            found.skips,
        )

    def lowered(
        self,
        request: Request,
        balance: Sequence[int],
        remat: Sequence[str],
        schedule: Schedule,
        data: int,
    ) -> Built:
        """The loss and its gradients of a mini-batch, on devices that are not there."""
        assert request.objective is not None
        found, _ = self._listed(request, balance, remat, schedule, data)
        return gradient(found, request.objective)

    def cuts(self, balance: Sequence[int]) -> Cuts | None:
        """Where a model is divided; nothing of a list of layers."""
        del balance

    def _listed(
        self,
        request: Request,
        balance: Sequence[int],
        remat: str | Sequence[str],
        schedule: Schedule,
        data: int,
    ) -> tuple[Listed, tuple[PyTree, ...]]:
        """Stages on the first micro-batch, or on as many as a schedule has.

        And specs of the variables.
        """
        own = as_layers(self._given)
        pipe = Pipe(
            fuse(own, tuple(balance)),
            _ranks(schedule, data),
            schedule,
            _remat.per_stage(remat, len(balance)),
        )
        batch = request.batch(schedule.num_microbatches > 1, data)
        layers = Sequential(own, pipe.stage_of_layer)
        variables = Initial(layers, _rng.key_spec(), batch.first).specs
        marks = Trainable(request.trainable).marks(own, variables)
        layout = layout_of(pipe, variables, marks)
        how = {"train": request.train, "objective": request.objective}
        return listed(pipe, layers, layout, variables, batch, **how), variables


class OneModel:
    """One model, as pieces between which few bytes cross.

    The pieces are those of the first micro-batch that it is traced on.

    Args:
      given: a module or a function.
    """

    def __init__(self, given: Any) -> None:
        (self._layer,) = as_layers([given])
        self._pieces: Cuts | None = None
        # Specs of its variables, by the inputs that they are made for.
        self._variables: dict[Any, PyTree] = {}

    def traced(
        self, request: Request, balance: Sequence[int] | None, mode: str
    ) -> Traced:
        """The pieces as stages on the first micro-batch: see `Layers.traced`."""
        own = request.resized(request.batch().sizes[0])
        if self._pieces is None:
            none = Cuts.none(_PIECES)
            whole, variables = self._built(own, none, gpipe(1, 1), mode)
            program, count = whole.stages.first, len(jax.tree.leaves(variables))
            places = _cut.pieces(program, _PIECES)
            self._pieces = Cuts.of(program, places, count, _PIECES)
        cuts = self._pieces if balance is None else self.cuts(balance)
        stages = len(cuts.positions) + 1
        built, variables = self._built(own, cuts, gpipe(stages, 1), mode)
        return Traced(
            tuple(
                abbreviate(names) or f"piece {i}"
                for i, names in enumerate(modules(built.stages))
            ),
            built.batch,
            built.stages,
            built.layout.owner_stages,
            variables,
            {},
        )

    def lowered(
        self,
        request: Request,
        balance: Sequence[int],
        remat: Sequence[str],
        schedule: Schedule,
        data: int,
    ) -> Built:
        """The loss and its gradients of a mini-batch: see `Layers.lowered`."""
        return self._built(request, self.cuts(balance), schedule, remat, data)[0]

    def cuts(self, balance: Sequence[int]) -> Cuts:
        """Where the model is divided."""
        assert self._pieces is not None
        ends = itertools.accumulate(balance[:-1])
        return self._pieces.some([end - 1 for end in ends])

    def _built(
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
        division = Division(*given, cuts=cuts)
        axes = Axes(request.in_axes, request.target_axes, 0)
        model = Model(self._layer, axes, division.num_parts)
        args: tuple[PyTree, ...] = request.sample, request.rngs
        work = model.forward(request.train)
        if request.objective is not None:
            args = request.sample, request.targets, request.rngs
            work = model.loss(request.objective, request.train, [])
        trainable = Trainable(request.trainable, by_layer=False)

        def trained(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(trainable.marks([self._layer], (variables,)))

        sliced = Sliced(work, division, trained)
        part = sliced.part(args)[0]
        kind = _signature.of(part)
        if kind not in self._variables:
            (self._variables[kind],) = Initial(model, _rng.key_spec(), part).specs
        variables = self._variables[kind]
        return sliced.build(variables, *args), variables


def _ranks(schedule: Schedule, data: int) -> tuple[OnPaper, ...]:
    return tuple(OnPaper(rank, data) for rank in range(schedule.num_ranks))
