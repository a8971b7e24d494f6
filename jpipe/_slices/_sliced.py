"""A function of parameters and a mini-batch as a program over many devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from .._functions import _microbatch
from .._functions._batch import Batch
from .._instructions import _transfer
from .._instructions._collector import paused
from .._instructions._sharding import Sharding
from .._run import _resting
from .._run._pipe import Pipe
from . import _arguments, _composed, _meshes, _order, _program, _summands
from ._built import Built, Divided, TreeLayout
from ._division import Division
from ._join import Join
from ._program import Traced
from ._programs import Programs
from ._stages import Stages
from ._state import State, Written, without_the_rest, written_by

PyTree = Any


@dataclass(frozen=True)
class Work:
    """What is computed.

    Attributes:
      function: ``(params, *args) -> loss``, ``(loss, aux)`` or ``aux``.
      joins: of a trace and the sizes of micro-batches, how aux is joined.
      in_axes: where the examples are in the arguments after ``params``.
      has_loss: whether it returns a loss, which is differentiated.
      has_aux: whether it returns something besides the loss.
      reduction: what the loss is: see `jpipe.value_and_grad`.
      has_input: whether the first argument after ``params`` is the input of a model.
      is_of_model: whether its aux is a pair, of aux and of what a model writes.
      owner: the module that holds the parameters, if one does.
      inside: of what they are a part: ``("params",)`` of parameters alone.
      names: how errors call the arguments.
      advice: what to type where parameters are not in place.
      writes: of a trace and specs of the parameters, the number of the first leaf of
        aux that is written to one of these, and which they are; ``None``: none is.
      left: is given the trace and these, where they are left as they were given.
    """

    function: Callable[..., Any]
    joins: Callable[[Traced, Sequence[int]], list[Join]]
    in_axes: Any = 0
    has_loss: bool = True
    has_aux: bool = False
    reduction: str = "mean"
    has_input: bool = False
    is_of_model: bool = False
    owner: Any = None
    inside: tuple[str, ...] = ()
    names: Sequence[str] = ()
    advice: str = "params = grad_fn.place(params, *args)"
    writes: Callable[[Traced, PyTree], tuple[int, list[Written]]] | None = None
    left: Callable[[Traced, int, list[Written]], None] | None = None


class _Call(NamedTuple):
    """Arguments of one kind.

    Attributes:
      specs: of the parameters.
      trained: whether each has a gradient.
      batch: the other arguments.
    """

    specs: PyTree
    trained: list[bool]
    batch: Batch


class Sliced:
    """``(params, *args)``, divided in stages; compiled once for each kind of arguments.

    Args:
      work: what is computed.
      division: in which stages.
      trained: of specs of the parameters whether each leaf has a gradient.
    """

    def __init__(
        self,
        work: Work,
        division: Division,
        trained: Callable[[PyTree], list[bool]] = lambda specs: [],
    ) -> None:
        self._work, self._division, self._trained = work, division, trained
        self.build = Programs(self._built)
        # How it was divided without a whole mini-batch.
        self._located: Divided | None = None

    @property
    def last(self) -> Divided | None:
        """What was divided last; without arguments of a call it is not built."""
        return self.build.last or self._located

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the stage where it stays."""
        built = self.build(params, *args)
        locations = zip(built.layout.owner_stages, built.layout.shardings, strict=True)
        return _transfer.put_each(params, built.pipe.devices, [*locations])

    def part(self, args: Sequence[PyTree]) -> Sequence[PyTree]:
        """Specs of the first micro-batch; there may be few examples."""
        return self._batch(args, True).first

    def locate(
        self, params: PyTree, args: Sequence[PyTree]
    ) -> list[tuple[int, Sharding]]:
        """The owner stage and sharding of each parameter, the same for all functions.

        Args:
          params: the parameters, or specs of them.
          args: a mini-batch, or specs; it may have few examples.
        """
        division = self._division
        if division.owner_stages is None:
            call = self._called(params, args, True)
            self._located = self._divided(call, is_called=False)
        assert division.cuts is not None
        assert division.owner_stages is not None
        pipe = division.pipe(len(division.cuts.positions) + 1)
        shardings = self._shardings(pipe, params, division.owner_stages)
        return [*zip(division.owner_stages, shardings, strict=True)]

    def _shardings(
        self, pipe: Pipe, params: PyTree, stages: Sequence[int]
    ) -> list[Sharding]:
        """The sharding of each parameter in its stage."""
        devices, work = [pipe.devices[stage] for stage in stages], self._work
        known = work.owner, (), work.inside
        return _resting.of_tree(pipe, params, devices, *known)

    @property
    def devices(self) -> Sequence[Any]:
        """One for each rank."""
        return self._division.devices

    @property
    def reduction(self) -> str:
        """What the loss is."""
        return self._work.reduction

    def num_examples(self, params: PyTree, args: Sequence[PyTree]) -> int:
        """How many there are in a mini-batch."""
        batch = self._called(params, args, True).batch
        return sum(batch.sizes) * batch.num_shards

    def composed(
        self, params: PyTree, args: Sequence[PyTree], sizes: Sequence[int]
    ) -> Callable[[PyTree, Sequence[PyTree]], jax.Array]:
        """``(params, args) -> loss``, on one device, of micro-batches of such sizes."""
        specs, trained, batch = self._called(params, args, True)
        batch = replace(batch, sizes=tuple(sizes), num_shards=1)
        programs = self._traced(_Call(specs, trained, batch))

        def loss(params: PyTree, args: Sequence[PyTree]) -> jax.Array:
            return _composed.loss(programs, batch, jax.tree.leaves(params), args)

        return loss

    def _called(
        self, params: PyTree, args: Sequence[PyTree], few: bool = False
    ) -> _Call:
        """Checks what is given."""
        specs = _microbatch.specs(params, "params")
        trained = self._trained(specs) or [False] * len(jax.tree.leaves(specs))
        return _Call(specs, trained, self._batch(args, few))

    def _batch(self, args: Sequence[PyTree], few: bool) -> Batch:
        """Checks the arguments after the parameters."""
        names = self._work.names or [f"argument {i + 1}" for i in range(len(args))]
        given = tuple(map(_microbatch.specs, args, names))
        axes = _arguments.axes_of(self._work.in_axes, given, names)
        count = self._division.num_microbatches
        size, shards = _arguments.batch_size(given, axes, 1 if few else count, names), 1
        if not few or size >= count * self._division.num_shards:
            shards = self._division.num_shards
            size = _microbatch.shard(size, count, shards)
        sizes = _microbatch.sizes(size, min(size, count))
        flat = [axis for own in axes for axis in own]
        return Batch(given, flat, (), [], None, sizes, shards)

    def _divided(self, call: _Call, is_called: bool = True) -> Divided:
        division, sizes = self._division, call.batch.sizes
        programs = self._traced(call)
        state = State()
        if writes := self._work.writes:
            written = programs[sizes[0]], *writes(programs[sizes[0]], call.specs)
            if self._work.left is None:
                state = written_by(*written)
            elif is_called:
                self._work.left(*written)
            for n, one in programs.items():
                programs[n] = without_the_rest(one, *writes(one, call.specs), state)
        count = len(call.trained)
        cuts, positions = division.positions(programs, count)
        pipe = division.pipe(len(positions[sizes[0]]) + 1)
        known = call.trained, division.owner_stages or (), state
        stages = Stages(programs, positions, sizes, pipe.remat, *known)
        if division.is_lasting:
            division.owner_stages = stages.owner[:count]
        owner_stages, work = stages.owner[:count], self._work
        shardings = self._shardings(pipe, call.specs, owner_stages)
        known = call.trained, not work.inside, work.advice
        layout = TreeLayout(pipe, call.specs, owner_stages, shardings, *known)
        return Divided(pipe, stages, layout, cuts)

    @paused()
    def _built(self, params: PyTree, *args: PyTree) -> Divided:
        call = self._called(params, args)
        divided, batch = self._divided(call), call.batch
        pipe, stages, layout, *_ = divided
        sizes = [size for size in batch.sizes for _ in range(batch.num_shards)]
        joins = self._work.joins(stages.first, sizes)
        aux = stages.first.aux
        if self._work.is_of_model:
            aux, _ = aux
        built = Built(pipe, stages, batch, layout, joins, aux)
        return divided._replace(built=built)

    def _traced(self, call: _Call) -> dict[int, Traced]:
        """The function on micro-batches of each size."""
        work, batch, sizes = self._work, call.batch, call.batch.sizes
        split, share = [axis is not None for axis in batch.x_axes], 1 / batch.num_parts
        whole = sum(sizes) * batch.num_shards
        programs = {}
        for n in dict.fromkeys(sizes):
            is_weighted = work.reduction == "weighted"
            part, kind = batch.part(n), (work.has_aux, work.has_loss, is_weighted)
            about = self._division.about
            traced = _program.traced(work.function, call.specs, part, about, *kind)
            _meshes.check(traced.closed, self._division.places)
            if work.has_input:
                count = len(jax.tree.leaves(part[0]))
                traced = replace(traced, num_inputs=count)
            if work.has_loss:
                scale = {"mean": n / whole, "sum": 1.0, "weighted": 1.0}
                by = scale.get(work.reduction, share)
                traced = _summands.apart(traced, split, by, share)
            programs[n] = traced
        return _order.late(programs)
