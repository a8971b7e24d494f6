"""A function of parameters and a mini-batch as a program over many devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from .._functions import _microbatch
from .._functions._batch import Batch, explained
from .._instructions import _transfer
from .._instructions._collector import paused
from .._instructions._sharding import Sharding
from .._layers import _batchnorm, _rng
from .._messages import raise_all
from .._run import _param_sharding, _signature, _variables
from .._run._pipe import Pipe
from .._run._recent import Recent
from . import (
    _arguments,
    _closures,
    _meshes,
    _order,
    _program,
    _stacked,
    _summands,
)
from ._built import Built, Layout
from ._cuts import Cuts
from ._join import Join
from ._model import Model
from ._partition import Partition
from ._program import Traced
from ._results import Results
from ._stages import Stages
from ._state import State, Written, without_the_rest, written_by

PyTree = Any


@dataclass(frozen=True)
class Work:
    """What is computed.

    Attributes:
      function: ``(params, *args) -> loss``, ``(loss, aux)`` or ``aux``; the last of
        ``args`` of a loss function is a dict of those by name.
      joins: how what micro-batches return besides the loss is joined.
      in_axes: where the examples are in the arguments after ``params``.
      has_loss: whether it returns a loss, which is differentiated.
      has_aux: whether it returns something besides the loss.
      reduction: what the loss is: see `jpipe.value_and_grad`.
      model: the model of which it is a function: then its first argument after
        ``params`` is the input, and its aux a pair, of aux and what the model writes.
      names: how errors call the arguments, of a model.
      argnums: which arguments of a loss function are its parameters.
      writes: of a trace and specs of the parameters, the number of the first leaf of
        aux that is written to one of these, and which they are; ``None``: none is.
      discards: is given the same where nobody is given what is written.
      check: checks parameters and arguments of a new signature, before it is built.
      explain: raises a better error than one that was raised on such arguments.
    """

    function: Callable[..., Any]
    joins: Callable[[Results], list[Join]]
    in_axes: Any = 0
    has_loss: bool = True
    has_aux: bool = False
    reduction: str = "mean"
    model: Model | None = None
    names: Sequence[str] = ()
    argnums: Sequence[int] = (0,)
    writes: Callable[[Traced, PyTree], tuple[int, list[Written]]] | None = None
    discards: Callable[[Traced, PyTree], None] | None = None
    check: Callable[[PyTree, Sequence[PyTree]], None] | None = None
    explain: Callable[[PyTree, Sequence[PyTree]], None] | None = None

    @property
    def advice(self) -> str:
        """What to type where parameters are not in place."""
        of_function = "params = grad_fn.place(params, *args)"
        return self.model.advice if self.model else of_function

    def shardings(
        self, pipe: Pipe, params: PyTree, stages: Sequence[int]
    ) -> list[Sharding]:
        """Of each parameter, in its stage."""
        if self.model:
            return self.model.shardings(pipe, params, stages)
        devices = [pipe.devices[stage] for stage in stages]
        return _param_sharding.of_tree(pipe, params, devices, inside=("params",))

    def aux_of(self, traced: Traced) -> PyTree:
        """Specs of what a trace returns besides the loss and what is written."""
        return traced.aux[0] if self.model else traced.aux


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
      partition: in which stages.
      trained: of specs of the parameters whether each leaf has a gradient.
    """

    def __init__(
        self,
        work: Work,
        partition: Partition,
        trained: Callable[[PyTree], list[bool]] = lambda specs: [],
    ) -> None:
        self._work, self._partition, self._trained = work, partition, trained
        self._known = Recent[Any, Built]()
        # What was built last, without a whole mini-batch if there was none yet.
        self.last: Built | None = None

    def __call__(self, params: PyTree, *args: PyTree) -> Built:
        """What runs for such arguments; made once for each kind of these."""
        key = _signature.settings(), _signature.of(params, args)
        if key not in self._known:
            self._known[key] = self._made(params, *args)
        self.last = found = self._known[key]
        return found

    def clear(self) -> None:
        """Forgets what was made."""
        self._known.clear()

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the stage where it stays."""
        built = self(params, *args)
        locations = zip(built.layout.owner_stages, built.layout.shardings, strict=True)
        return _transfer.put_each(params, built.pipe.devices, [*locations])

    def locate(
        self, params: PyTree, args: Sequence[PyTree]
    ) -> list[tuple[int, Sharding]]:
        """The owner stage and sharding of each parameter, the same for all functions.

        Args:
          params: the parameters, or specs of them.
          args: a mini-batch, or specs; it may have few examples.

        Raises:
          ValueError: if there are not as many parameters as there were, or others
            than a plan is of.
        """
        self._check_planned(params)
        partition, count = self._partition, len(jax.tree.leaves(params))
        if partition.owner_stages(params) is None:
            self.last = self.last or self.divided(params, args)
        owners = partition.owner_stages(params) or []
        if len(owners) != count:
            raise ValueError(
                f"the variables have {count} arrays, those of the model {len(owners)}; "
                f"give a tree such as init makes"
            )
        pipe = partition.placement(partition.num_stages or 1)
        return [*zip(owners, self._work.shardings(pipe, params, owners), strict=True)]

    def divided(self, params: PyTree, args: Sequence[PyTree]) -> Built:
        """What such arguments are for, of which there may be few examples."""
        call = self._called(params, self.batch(args, few=True))
        return self._built(call, runs=False)

    def of_batch(self, params: PyTree, batch: Batch) -> Built:
        """The program for a mini-batch whose micro-batches may have any sizes."""
        return self._built(self._called(params, batch))

    def _called(self, params: PyTree, batch: Batch) -> _Call:
        """Checks the parameters."""
        specs = _microbatch.specs(params, "params")
        trained = self._trained(specs) or [False] * len(jax.tree.leaves(specs))
        return _Call(specs, trained, batch)

    def batch(self, args: Sequence[PyTree], *, few: bool = False) -> Batch:
        """Checks the arguments after the parameters.

        Args:
          args: the arguments.
          few: see `_arguments.batch`.
        """
        work, partition = self._work, self._partition
        names, in_axes = work.names, work.in_axes
        if work.model is None:
            *by_position, keywords = args
            names = _arguments.argument_names(len(by_position), work.argnums)
            in_axes = _arguments.axes_of_call(in_axes, by_position, keywords)
        elif args[-1] is not None:
            _rng.check_rngs(args[-1])
        return _arguments.batch(
            args,
            in_axes,
            names,
            num_microbatches=partition.num_microbatches,
            num_shards=partition.num_shards,
            few=few,
        )

    def _built(self, call: _Call, runs: bool = True) -> Built:
        work, batch = self._work, call.batch
        with explained(batch), _batchnorm.merging(batch.num_parts > 1):
            pipe, stages, layout, cuts = self._in_stages(call, runs)
        if work.has_loss:
            pipe.check_trains()
        aux, last = map(work.aux_of, (stages.first, stages.program(-1)))
        results = Results(
            program=stages.first,
            has_examples=[axis is not None for axis in batch.axes],
            first=aux,
            last=last,
            sizes=[size for size in batch.sizes for _ in range(batch.num_shards)],
            trace_whole=lambda: self._trace_whole(call),
        )
        joins = work.joins(results) if runs else None
        return Built(pipe, stages, layout, cuts, batch, aux, joins)

    def _in_stages(
        self, call: _Call, runs: bool
    ) -> tuple[Pipe, Stages, Layout, Cuts | None]:
        partition, sizes = self._partition, call.batch.sizes
        programs = self._traced(call)
        state = State()
        if writes := self._work.writes:
            first, specs = programs[sizes[0]], call.specs
            if self._work.discards is None:
                state = written_by(first, *writes(first, specs))
            elif runs:
                self._work.discards(first, specs)
            for n, one in programs.items():
                programs[n] = without_the_rest(one, *writes(one, specs), state)
        self._check_planned(call.specs)
        count = len(call.trained)
        cuts, positions = partition.cut(programs, count)
        pipe = partition.placement(len(positions[sizes[0]]) + 1)
        known = call.trained, partition.owner_stages(call.specs) or (), state
        stages = Stages(programs, positions, sizes, pipe.remat, *known)
        owner_stages, work = stages.owner_stages[:count], self._work
        partition.keep_owner_stages(owner_stages)
        shardings = work.shardings(pipe, call.specs, owner_stages)
        known = call.trained, work.model is not None, work.advice
        layout = Layout(pipe, call.specs, owner_stages, shardings, *known)
        tree = "variables" if work.model else "params"
        names = [f"{tree}{jax.tree_util.keystr(path)}" for path in layout.paths]
        _stacked.check(stages, names, partition.warnings)
        return pipe, stages, layout, cuts

    def _check_planned(self, specs: PyTree) -> None:
        """Checks that parameters are those that a plan is of, if there is one.

        Raises:
          ValueError: with all that are of another shape.
        """
        planned_shapes = self._partition.config.planned_shapes
        if planned_shapes is None:
            return
        params = _variables.numbers_of_params(specs, self._work.model is not None)
        leaves = jax.tree_util.tree_leaves_with_path(specs)
        tree = "params" if self._work.model is None else "variables"
        advice = "make a plan of this one, by jpipe.plan"
        if len(params) != len(planned_shapes):
            raise ValueError(
                f"plan: it is of a model or function of {len(planned_shapes)} arrays "
                f"of parameters, and this one has {len(params)}; {advice}"
            )
        faults = []
        for i, planned_shape in zip(params, planned_shapes, strict=True):
            path, leaf = leaves[i]
            shape = getattr(leaf, "shape", ())
            if shape != planned_shape:
                faults.append(
                    f"{tree}{jax.tree_util.keystr(path)} has shape {shape}, in "
                    f"the plan {planned_shape}"
                )
        raise_all(
            "plan: it is of a model or function of other parameters",
            faults,
            advice=f"\n{advice}",
        )

    @paused()
    def _made(self, params: PyTree, *args: PyTree) -> Built:
        work = self._work
        _variables.check_concrete(jax.tree.leaves((params, args)))
        self._check_tree(params)
        try:
            batch = self.batch(args)
        except ValueError as error:
            self._note_order(error, params, args)
            raise
        if work.check is not None:
            work.check(params, args)
        try:
            built = self._built(self._called(params, batch))
        except Exception as error:
            if work.explain is not None:
                work.explain(params, args)
            self._note_order(error, params, args)
            raise
        _closures.check(
            params,
            built,
            model=self._work.model,
            warnings=self._partition.warnings,
        )
        return built

    def _note_order(
        self, error: Exception, params: PyTree, args: Sequence[PyTree]
    ) -> None:
        """Notes where the parameters of a loss function may not be the first."""
        if self._work.model is None:
            _arguments.note_order(error, params, args)

    def _trace(self, call: _Call, size: int, num_stages: int) -> Traced:
        """The function on a micro-batch of some size."""
        work = self._work
        return _program.traced(
            work.function,
            call.specs,
            call.batch.part(size),
            num_stages,
            has_aux=work.has_aux,
            has_loss=work.has_loss,
            is_weighted=work.reduction == "weighted",
            # Variables are the same for all micro-batches, a key among them too.
            folds_params=work.model is None,
        )

    def _trace_whole(self, call: _Call) -> tuple[Traced, PyTree]:
        """The function on the mini-batch as one micro-batch, and specs of aux."""
        size = sum(call.batch.sizes) * call.batch.num_shards
        try:
            with _batchnorm.merging(True):
                program = self._trace(call, size, num_stages=1)
        except Exception as error:
            error.add_note(
                f"raised on the {size} examples of the mini-batch at once: something "
                f"that is returned follows from no example, and is what one device "
                f"returns"
            )
            raise
        return program, self._work.aux_of(program)

    def _check_tree(self, params: PyTree) -> None:
        """Notices what is no tree of parameters, as arguments in another order."""
        if self._work.model:
            self._work.model.entries(params)
        else:
            _variables.check_params(params)

    def _traced(self, call: _Call) -> dict[int, Traced]:
        """The function on micro-batches of each size."""
        work, batch, sizes = self._work, call.batch, call.batch.sizes
        split, share = [axis is not None for axis in batch.axes], 1 / batch.num_parts
        whole = sum(sizes) * batch.num_shards
        programs = {}
        for n in dict.fromkeys(sizes):
            traced = self._trace(call, n, self._partition.num_traced_stages)
            partition = self._partition
            closed = _meshes.on_places(
                traced.closed, partition.places, partition.warnings
            )
            traced = replace(traced, closed=closed)
            if work.model:
                part = batch.part(n)
                leaves = len(jax.tree.leaves(part[0]))
                local = part[: 1 + work.has_loss] if work.model.is_list else ()
                count = len(jax.tree.leaves(local))
                traced = replace(traced, num_inputs=leaves, num_local=count)
            traced = replace(traced, is_split=any(split))
            if work.has_loss:
                scale = {"mean": n / whole, "sum": 1.0, "weighted": 1.0}
                by = scale.get(work.reduction, share)
                if work.model:
                    traced = _summands.scaled(traced, by)
                else:
                    traced = _summands.apart(traced, split, by, share)
            programs[n] = traced
        programs = _program.with_equal_arrays(programs)
        return _order.late(programs, moves=self._partition.moves_equations)
