"""A function of parameters and a mini-batch as a program over many devices.

    (params, *args) -> Specialization:  check, trace, cut, lay out the parameters

There is one `Specialization` for each signature of the arguments. It is cached by all
that it depends on, so that a second call of the same signature traces nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from .._arguments import _microbatch, _signature, _stacked, _variables
from .._arguments._batch import Batch, explain_sizes
from .._arguments._cache import RecentCache
from .._instructions._garbage_collector import pause_collector
from .._jaxprs._pieces import Pieces
from .._layers import _batch_norm
from .._partition._param_layout import ParamLayout
from .._partition._partition import Partition, StageAssignment
from .._partition._planned_shapes import check_planned_shapes
from .._partition._stage_placement import StagePlacement
from .._stage import _stacked_params
from .._stage._stages import Stages
from .._trace._microbatch_outputs import MicrobatchOutputs
from ._function_spec import FunctionSpec
from ._specialization import Specialization
from ._tracing import trace_sizes, trace_whole

PyTree = Any


class PipelinedFunction:
    """``(params, *args)`` in stages; compiled once for each signature of arguments.

    Args:
      spec: the function.
      partition: the stages that it is cut in.
      trained: ``specs of the parameters -> one bool per leaf``; True if it has a
        gradient.

    Attributes:
      last_specialization: that of the last call; before the first call one that cannot
        run, or ``None``.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        partition: Partition,
        trained: Callable[[PyTree], list[bool]] = lambda specs: [],
    ) -> None:
        self._spec = spec
        self._partition = partition
        self._trained = trained
        # (settings, signature of the arguments) -> specialization
        self._cache = RecentCache[Any, Specialization]()
        self.last_specialization: Specialization | None = None

    def __call__(self, params: PyTree, *args: PyTree) -> Specialization:
        """Returns the specialization for arguments, built once for each signature."""
        key = _signature.settings(), _signature.tree_signature(params, args)
        if key not in self._cache:
            self._cache[key] = self._build_checked(params, *args)
        self.last_specialization = self._cache[key]
        return self.last_specialization

    def clear(self) -> None:
        """Removes all specializations."""
        self._cache.clear()

    # --------------------------------------------------------------------- parameters

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the stage where it stays."""
        return self(params, *args).layout.place(params)

    def layout(self, params: PyTree, args: Sequence[PyTree]) -> ParamLayout:
        """Returns the layout of parameters, the same for all functions of a partition.

        The partition is that of a list of layers, or its functions share their cuts. If
        none of them was cut yet, this one is.

        Args:
          params: the parameters, or specs of them.
          args: a mini-batch, or specs; it may have few examples, and is only read if
            nothing was cut yet.

        Raises:
          ValueError: if there are not as many parameters as there were, or others
            than a plan is of.
        """
        self._check_planned(params)
        partition = self._partition
        owner_stages = partition.owner_stages(params)
        if owner_stages is None:
            # Until a function was called, `plan` describes this.
            self.last_specialization = self.divide(params, args)
            return self.last_specialization.layout
        division = partition.division
        assert partition.num_stages is not None
        assert division is not None
        specs = _microbatch.array_specs(params, "params")
        count = len(jax.tree.leaves(specs))
        expected_count = len(owner_stages) - division.num_added
        if count != expected_count:
            raise ValueError(
                f"the variables have {count} arrays, those of the model "
                f"{expected_count}; give a tree such as init makes"
            )
        return self._layout(
            partition.placement(partition.num_stages),
            _stacked.split_pieces(specs, division.params),
            pieces=division.params,
            owner_stages=owner_stages,
            is_trained=[False] * len(owner_stages),
        )

    def _layout(
        self,
        placement: StagePlacement,
        specs: PyTree,
        *,
        pieces: Mapping[int, Pieces],
        owner_stages: Sequence[int],
        is_trained: Sequence[bool],
    ) -> ParamLayout:
        return ParamLayout(
            placement,
            specs,
            pieces=pieces,
            owner_stages=owner_stages,
            shardings=self._spec.shardings(placement, specs, owner_stages),
            is_leaf_trained=is_trained,
            has_collections=self._spec.has_collections,
            name=self._spec.params_name,
            advice=self._spec.advice,
        )

    def _check_planned(self, params: PyTree) -> None:
        check_planned_shapes(
            params,
            self._partition.options.planned_shapes,
            name=self._spec.params_name,
            has_collections=self._spec.has_collections,
        )

    # -------------------------------------------------------------------------- build

    @pause_collector()
    def _build_checked(self, params: PyTree, *args: PyTree) -> Specialization:
        """Checks arguments, and builds the specialization for them."""
        spec = self._spec
        _variables.check_concrete(jax.tree.leaves((params, args)))
        spec.check_params(params)
        with self._explain(params, args):
            batch = self._batch(args)
            if spec.check is not None:
                spec.check(params, args)
            specialization = self.build(params, batch)
        spec.check_captured(params, specialization)
        return specialization

    @contextmanager
    def _explain(self, params: PyTree, args: Sequence[PyTree]) -> Iterator[None]:
        """Explains errors by parameters and arguments that do not go together."""
        try:
            yield
        except Exception as error:
            if self._spec.explain is not None:
                self._spec.explain(error, params, args)
            raise

    def _batch(self, args: Sequence[PyTree], *, allows_unsplit: bool = False) -> Batch:
        return self._spec.batch(
            args,
            num_microbatches=self._partition.num_microbatches,
            num_shards=self._partition.num_shards,
            allows_unsplit=allows_unsplit,
        )

    def divide(self, params: PyTree, args: Sequence[PyTree]) -> Specialization:
        """Builds a specialization that cannot run: there may be too few examples."""
        with self._explain(params, args):
            batch = self._batch(args, allows_unsplit=True)
            return self.build(params, batch, runs=False)

    def build(
        self, params: PyTree, batch: Batch, *, runs: bool = True
    ) -> Specialization:
        """Builds a specialization for a mini-batch, whose micro-batches have any sizes.

        Args:
          params: the parameters, or specs of them.
          batch: the mini-batch.
          runs: True if it has enough examples to run.
        """
        spec = self._spec
        specs = _microbatch.array_specs(params, "params")
        is_trained = self._trained(specs) or [False] * len(jax.tree.leaves(specs))
        are_merged = batch.num_microbatch_shards > 1
        with (
            explain_sizes(batch),
            _batch_norm.merge_statistics(are_merged=are_merged),
        ):
            traced_functions, division = trace_sizes(
                spec, self._partition, specs, batch
            )
            self._check_planned(specs)
            is_trained = _stacked.repeat_for_pieces(is_trained, division.params)
            inner_specs = _stacked.split_pieces(specs, division.params)
            traced_functions, state = spec.find_state(
                traced_functions, inner_specs, runs=runs
            )
            count = len(is_trained)
            cuts, stage_starts = self._partition.cut(traced_functions, division, count)
            num_stages = len(stage_starts[batch.sizes[0]]) + 1
            placement = self._partition.placement(num_stages)
            stages = Stages(
                traced_functions=traced_functions,
                stage_starts=stage_starts,
                sizes=batch.sizes,
                remat=placement.remat,
                trained=is_trained,
                owner_stages=self._partition.owner_stages(specs) or (),
                state=state,
            )
            assignment = StageAssignment(
                cuts, owner_stages=tuple(stages.owner_stages[:count])
            )
            self._partition.keep_first(assignment)
            layout = self._layout(
                placement,
                inner_specs,
                pieces=division.params,
                owner_stages=assignment.owner_stages,
                is_trained=is_trained,
            )
            _stacked_params.check_stacked_params(
                stages, layout.names, self._partition.warnings
            )

        if spec.has_loss:
            placement.check_trains()
        joins = None
        if runs:
            joins = spec.make_joins(self._results(stages, specs, batch))
        return Specialization(
            placement=placement,
            stages=stages,
            layout=layout,
            cuts=cuts,
            batch=batch,
            aux=spec.aux_of(stages.traced()),
            joins=joins,
        )

    def _results(
        self, stages: Stages, specs: PyTree, batch: Batch
    ) -> MicrobatchOutputs:
        """Returns the results of micro-batches that are joined."""
        sizes = list[int]()  # shards count as micro-batches
        for size in batch.sizes:
            sizes += [size] * batch.num_shards
        return MicrobatchOutputs(
            traced=stages.traced(),
            has_examples=[axis is not None for axis in batch.axes],
            first=self._spec.aux_of(stages.traced()),
            last=self._spec.aux_of(stages.traced(-1)),
            sizes=sizes,
            trace_whole=lambda: trace_whole(self._spec, specs, batch),
        )
