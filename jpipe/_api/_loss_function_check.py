"""Compares a loss function on a whole mini-batch with the same in micro-batches.

    at once:           one stage, one micro-batch of all examples   -> loss, gradients
    in micro-batches:  one stage, micro-batches of the given sizes  -> loss, gradients

Both are programs as a pipeline runs them, on its first device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .._arguments._batch import Batch
from .._check import _comparison
from .._check._loss_check import ADVICE
from .._check._report import CheckReport, CheckResult, check_microbatch_sizes
from .._check._split_function import to_host
from .._instructions._transfer import first_device, put_tree
from .._jaxprs import _dataflow
from .._layers._median_prng import median_key
from .._layers._rng import is_single_key
from .._messages import WarnOnce
from .._partition._cut_points import CutPoints
from .._partition._options import Options
from .._partition._partition import Partition
from .._pipelined._function_spec import FunctionSpec
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization
from .._trace._traced_function import check_pair

PyTree = Any
# Numbers of a gradient are compared relative to this fraction of its largest one, if
# that is more than the largest number beside them.
_SMALLEST_SCALE = 1e-2


@dataclass(frozen=True)
class _LossAndGradients:
    """The numbers that a program computed.

    Attributes:
      loss: the loss of the mini-batch.
      grads: its gradients; ``None`` for parameters that are not trained.
    """

    loss: jax.Array
    grads: PyTree


def check_loss_function(
    spec: FunctionSpec,
    partition: Partition,
    trained: Callable[[PyTree], list[bool]],
    params: PyTree,
    args: Sequence[PyTree],
    *,
    microbatch_sizes: Sequence[int] | None,
    tolerance: float | None,
) -> CheckReport:
    """Checks a loss function: see `FunctionGradient.check`.

    Args:
      spec: the loss function.
      partition: the stages that it is divided into by a call.
      trained: ``specs of params -> one bool per leaf``; True if it has a gradient.
      params: the parameters.
      args: a mini-batch: the arguments besides the parameters.
      microbatch_sizes: the number of examples of each micro-batch.
      tolerance: the largest difference that passes.
    """
    args = jax.tree.map(_with_median_keys, tuple(args))
    batch = _splittable_batch(spec, partition, args)
    num_examples = batch.num_examples
    if microbatch_sizes is None:
        first = max(1, num_examples // 3)
        microbatch_sizes = (first, num_examples - first)
    sizes = check_microbatch_sizes(microbatch_sizes, num_examples)

    loss = _without_aux(spec)
    params = jax.tree.map(to_host, params)
    with jax.default_matmul_precision("highest"):
        specializations: list[Specialization] = []
        for microbatch_sizes in ((num_examples,), sizes):
            function = PipelinedFunction(
                loss, _one_stage(partition, len(microbatch_sizes)), trained
            )
            split_batch = replace(batch, sizes=microbatch_sizes)
            specializations.append(function.build(params, split_batch))
        if not specializations[0].placement.is_one_process:
            raise ValueError(
                "what several processes have cannot be checked in one of them; check "
                "the function in one process"
            )
        at_once, in_microbatches = [
            _run(specialization, params, args) for specialization in specializations
        ]

    if tolerance is None:
        dtypes: list[Any] = []
        for specialization in specializations:
            dtypes += _dataflow.all_dtypes(specialization.stages.traced().closed)
        tolerance = _comparison.tolerance(dtypes)
    outputs = _comparison.compare(
        "outputs",
        at_once=at_once.loss,
        in_microbatches=in_microbatches.loss,
        axes=[None],
        sizes=sizes,
        limit=tolerance,
    )
    gradients = _comparison.compare(
        "gradients",
        at_once=at_once.grads,
        in_microbatches=in_microbatches.grads,
        axes=[None] * len(jax.tree.leaves(at_once.grads)),
        sizes=sizes,
        limit=tolerance,
        smallest_scale=_SMALLEST_SCALE * _comparison.max_magnitude(at_once.grads),
    )
    result = CheckResult(
        f"the loss with reduction={spec.reduction!r}",
        differences=tuple(filter(None, (outputs, gradients))),
        compared=("outputs", "gradients"),
        notes=(f"{at_once.loss:.6g}",),
        advice=ADVICE,
    )
    return CheckReport(sizes, (), result)


def _without_aux(spec: FunctionSpec) -> FunctionSpec:
    """The loss function, without its aux."""
    if not spec.has_aux:
        return spec

    def loss(params: PyTree, *args: PyTree) -> Any:
        value, _ = check_pair(spec.function(params, *args), "(loss, aux)")
        return value

    return replace(spec, function=loss, has_aux=False, make_joins=lambda _: [])


def _one_stage(partition: Partition, num_microbatches: int) -> Partition:
    """A partition in one stage, on the first device."""
    options = Options(
        num_microbatches=num_microbatches,
        devices=[first_device(partition.options.devices[0])],
        num_stages=1,
        schedule="gpipe",
        remat="none",
        cuts=CutPoints.without_cuts(num_traced_stages=1),
    )
    one_stage = Partition(options)
    one_stage.warnings = WarnOnce(is_muted=True)  # a call gives all warnings
    return one_stage


def _splittable_batch(
    spec: FunctionSpec, partition: Partition, args: Sequence[PyTree]
) -> Batch:
    """A mini-batch that can be split, as a call with one micro-batch does not need.

    Raises:
      ValueError: if it cannot be split.
    """
    try:
        batch = spec.batch(args, num_microbatches=2, num_shards=1, allows_unsplit=True)
    except ValueError as error:
        if partition.num_microbatches == 1:
            error.add_note(
                "with num_microbatches=1 nothing is split, as it need not be: then "
                "there is nothing that check could compare"
            )
        raise
    if all(axis is None for axis in batch.axes):
        raise ValueError(
            f"check compares a mini-batch with its parts, and in_axes="
            f"{spec.in_axes!r} splits no array: give examples as an argument"
        )
    return batch


def _run(
    specialization: Specialization, params: PyTree, args: Sequence[PyTree]
) -> _LossAndGradients:
    """Runs a program of one stage."""
    layout = specialization.layout
    params = put_tree(params, specialization.placement.devices, layout.locations)
    outputs = specialization.program(
        specialization.check_arguments(params, args, "params")
    )
    loss, _, trained_grads = specialization.split_outputs(outputs)
    grads = [
        next(trained_grads) if is_trained else None
        for is_trained in layout.is_param_trained
    ]
    return _LossAndGradients(loss, jax.tree.structure(params).unflatten(grads))


def _with_median_keys(leaf: Any) -> Any:
    """An array on the host; in place of a key one that draws the middle number."""
    if not hasattr(leaf, "dtype"):
        return leaf  # no array: the mini-batch is refused for it
    return median_key() if is_single_key(leaf) else to_host(leaf)
