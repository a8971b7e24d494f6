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
from .._run import _resting, _signature, _variables
from .._run._feed import Feed
from .._run._pipe import Pipe
from . import _arguments, _composed, _meshes, _order, _program, _summands
from ._built import Built, TreeLayout
from ._division import Division
from ._join import Join
from ._program import Traced
from ._stages import Stages
from ._state import State, Written, without_the_rest, written_by

PyTree = Any
_MOST = 64


@dataclass(frozen=True)
class Work:
    """What is computed.

    Attributes:
      function: ``(params, *args) -> loss``, ``(loss, aux)`` or ``aux``.
      joins: of a trace and the sizes of micro-batches, how aux is joined.
      in_axes: where the examples are in the arguments after ``params``.
      has_loss: whether it returns a loss, which is differentiated.
      has_aux: whether it returns something beside the loss.
      reduction: what the loss is: see `jpipe.value_and_grad`.
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
    owner: Any = None
    inside: tuple[str, ...] = ()
    names: Sequence[str] = ()
    advice: str = "params = grad_fn.place(params, *args)"
    writes: Callable[[Traced, PyTree], tuple[int, list[Written]]] | None = None
    left: Callable[[Traced, int, list[Written]], None] | None = None


class Results(NamedTuple):
    """What a call gives.

    Attributes:
      loss: the loss, if there is one.
      aux: what is returned beside it; ``None`` for what is not written.
      grads: of each leaf of the parameters its gradient, or ``None``.
    """

    loss: Any
    aux: PyTree
    grads: list[Any]


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
    """``(params, *args) -> Results``, compiled once for each kind of arguments.

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
        self._known: dict[Any, Built] = {}
        # Compares what several processes are given.
        self._feed: Feed | None = None
        # What was divided last; without arguments of a call it is not built.
        self.last: tuple[Pipe, Stages, Built | None] | None = None

    def __call__(self, params: PyTree, *args: PyTree) -> Results:
        """Returns as soon as the work is dispatched."""
        built = self.build(params, args)
        given = self.arguments(built, params, args)
        if self._feed is None:
            self._feed = Feed(built.pipe)
        self._feed(args)
        found = iter(built.program(given))
        loss = next(found) if self._work.has_loss else None
        # What is written comes last in the order of parameters.
        aux: list[Any] = [next(found) for _ in range(built.num_joined)]
        aux += [None] * (built.aux_tree.num_leaves - len(aux))
        for _, leaf in built.written:
            aux[leaf] = next(found)
        trained = built.stages.trained[: len(built.layout.specs)]
        grads = [next(found) if yes else None for yes in trained]
        return Results(loss, jax.tree.unflatten(built.aux_tree, aux), grads)

    def arguments(
        self, built: Built, params: PyTree, args: Sequence[PyTree]
    ) -> list[Any]:
        """What a program is given, checked."""
        leaves, batch = jax.tree.leaves(params), jax.tree.leaves(args)
        _variables.check_concrete([*leaves, *batch])
        built.layout.check(leaves)
        return [*leaves, *batch]

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the stage where it stays."""
        built = self.build(params, args)
        homes = self._homes(built.pipe, params, built.layout.homes)
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten(
            [
                _transfer.put_one(leaf, *home)
                for leaf, home in zip(leaves, homes, strict=True)
            ]
        )

    def build(self, params: PyTree, args: Sequence[PyTree]) -> Built:
        """What runs for such arguments."""
        key = _signature.settings(), _signature.of(params, args)
        if key not in self._known:
            self._known[key] = self._built(params, args)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        built = self._known[key]
        self.last = built.pipe, built.stages, built
        return built

    def batch(self, params: PyTree, args: Sequence[PyTree]) -> Batch:
        """The arguments as a mini-batch."""
        return self._called(params, args).batch

    def part(self, args: Sequence[PyTree]) -> Sequence[PyTree]:
        """Specs of the first micro-batch; there may be few examples."""
        batch = self._called((), args, True).batch
        return batch.first

    def locate(
        self, params: PyTree, args: Sequence[PyTree]
    ) -> list[tuple[Any, Sharding]]:
        """The home of each parameter, where all functions are divided alike.

        Args:
          params: the parameters, or specs of them.
          args: a mini-batch, or specs; it may have few examples.
        """
        division = self._division
        if division.first is None:
            pipe, stages = self._stages(
                self._called(params, args, True), is_called=False
            )
            self.last = pipe, stages, None
        assert division.first is not None
        cuts, homes = division.first[1:]
        pipe = division.pipe(len(cuts) + 1)
        return self._homes(pipe, params, homes)

    def _homes(
        self, pipe: Pipe, params: PyTree, stages: Sequence[int]
    ) -> list[tuple[Any, Sharding]]:
        """The device of each parameter, and how it lies there."""
        devices, work = [pipe.devices[stage] for stage in stages], self._work
        known = work.owner, (), work.inside
        how = _resting.of_tree(pipe, params, devices, *known)
        return [*zip(devices, how, strict=True)]

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
        names = self._work.names or [f"argument {i + 1}" for i in range(len(args))]
        specs = _microbatch.specs(params, "params")
        trained = self._trained(specs) or [False] * len(jax.tree.leaves(specs))
        given = tuple(map(_microbatch.specs, args, names))
        axes = _arguments.axes_of(self._work.in_axes, given, names)
        count = self._division.num_microbatches
        size, shards = _arguments.batch_size(given, axes, 1 if few else count, names), 1
        if not few or size >= count * self._division.num_shards:
            shards = self._division.num_shards
            size = _microbatch.shard(size, count, shards)
        sizes = _microbatch.sizes(size, min(size, count))
        flat = [axis for own in axes for axis in own]
        return _Call(specs, trained, Batch(given, flat, (), [], None, sizes, shards))

    def _stages(self, call: _Call, *, is_called: bool) -> tuple[Pipe, Stages]:
        division, sizes = self._division, call.batch.sizes
        programs = self._traced(call)
        state = State()
        if writes := self._work.writes:
            own = programs[sizes[0]], *writes(programs[sizes[0]], call.specs)
            if self._work.left is None:
                state = written_by(*own)
            elif is_called:
                self._work.left(*own)
            for n, one in programs.items():
                programs[n] = without_the_rest(one, *writes(one, call.specs), state)
        first, count = programs[sizes[0]], len(call.trained)
        cuts = division.cuts(programs, count if division.is_lasting else None)
        pipe = division.pipe(len(cuts[sizes[0]]) + 1)
        homes = division.first[2] if division.first else ()
        known = call.trained, homes, state
        stages = Stages(programs, cuts, sizes, pipe.remat, *known)
        if division.is_lasting and division.first is None:
            division.first = first, cuts[sizes[0]], stages.owner[:count]
        return pipe, stages

    @paused
    def _built(self, params: PyTree, args: Sequence[PyTree]) -> Built:
        return self._divided(self._called(params, args))

    def _traced(self, call: _Call) -> dict[int, Traced]:
        """The function on micro-batches of each size."""
        work, batch, sizes = self._work, call.batch, call.batch.sizes
        split, share = [axis is not None for axis in batch.x_axes], 1 / batch.num_parts
        whole = sum(sizes) * batch.num_shards
        programs = {}
        for n in dict.fromkeys(sizes):
            is_weighted = work.reduction == "weighted"
            part, how = batch.part(n), (work.has_aux, work.has_loss, is_weighted)
            about = self._division.about
            traced = _program.traced(work.function, call.specs, part, about, *how)
            _meshes.check(traced.closed, self._division.places)
            if work.has_loss:
                scale = {"mean": n / whole, "sum": 1.0, "weighted": 1.0}
                by = scale.get(work.reduction, share)
                traced = _summands.apart(traced, split, by, share)
            programs[n] = traced
        return _order.late(programs)

    def _divided(self, call: _Call) -> Built:
        pipe, stages = self._stages(call, is_called=True)
        batch, work = call.batch, self._work
        sizes = [size for size in batch.sizes for _ in range(batch.num_shards)]
        joins = work.joins(stages.first, sizes)
        homes = stages.owner[: len(call.trained)]
        how = [each for _, each in self._homes(pipe, call.specs, homes)]
        trained = call.trained
        if not work.inside:  # variables, of which parameters are a part
            marks = jax.tree.unflatten(jax.tree.structure(call.specs), trained)
            trained = jax.tree.leaves(marks.get("params", {}))
        layout = TreeLayout(pipe, call.specs, homes, how, trained, work.advice)
        return Built(pipe, stages, batch, layout, joins, stages.first.aux)
