"""Checks layers, and a loss, on a batch: `Pipeline.check`, `TrainStep.check`."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from .._arguments import _call, _microbatch, _stacked, _variables
from .._arguments._trainable import Trainable
from .._check._layer_checker import LayerChecker, LayerToCheck
from .._check._report import CheckReport, CheckResult, check_microbatch_sizes
from .._instructions import _transfer
from .._instructions._transfer import AbstractDevice
from .._layers import _rng
from .._layers._layer_group import group_layers
from .._layers._sequence import Sequential
from .._lower._join import REDUCTIONS, Reduction
from .._model._model import Model
from .._partition._options import Options
from .._partition._partition import Partition
from .._pipelined import _model_functions
from .._pipelined._pipelined_function import PipelinedFunction
from .._train._pipelined_loss import PipelinedLoss
from ..schedules import gpipe
from ._pipelined_model import PipelinedModel

PyTree = Any


def check_pipeline(
    pipelined: PipelinedModel,
    variables: PyTree,
    batch: tuple[PyTree, PyTree],
    *,
    pipelined_loss: PipelinedLoss | None,
    rngs: _rng.Rngs,
    train: bool,
    microbatch_sizes: Sequence[int] | None,
    tolerance: float | None,
) -> CheckReport:
    """Checks layers, or a model as the only one: see `Pipeline.check`.

    Args:
      pipelined: the layers or the model.
      variables: its variables.
      batch: an input and its targets.
      pipelined_loss: the loss; ``None``: layers only.
      rngs: keys.
      train: True to run layers as in training.
      microbatch_sizes: the number of examples of each micro-batch.
      tolerance: the largest relative difference that passes.
    """
    x, targets = batch
    model = pipelined.model
    partition = pipelined.partition
    variables = _stacked.gather_tree(variables)
    entries = model.entries(variables)
    if len({device.process_index for device in partition.devices}) > 1:
        raise ValueError(
            "what several processes have cannot be checked in one of them; check "
            "jpipe.sequential of the same layers, in one process"
        )
    if rngs is not None:
        _rng.check_rngs(rngs)
    _variables.check_concrete(jax.tree.leaves((x, targets, rngs)))

    names = ("x", "targets")
    axes = model.axes
    in_axes = (axes.in_axes, axes.target_axes)
    arguments = _call.describe_arguments((x, targets), in_axes, names)
    x_axes, target_axes = [argument.axes for argument in arguments]
    # A check needs two micro-batches.
    num_examples = _microbatch.count_examples(arguments, num_microbatches=2)
    num_microbatch_shards = partition.num_microbatches * partition.num_shards
    microbatch_size = -(-num_examples // num_microbatch_shards)
    if microbatch_sizes is None:
        microbatch_sizes = _uneven_sizes(num_examples, microbatch_size)
    sizes = check_microbatch_sizes(microbatch_sizes, num_examples)

    pipelined.checks.move_to_owners(variables, x)
    _variables.check_alive(jax.tree.leaves(variables))
    trainable = Trainable() if pipelined_loss is None else pipelined_loss.trainable
    layers = _layers_to_check(
        model, entries, x, trainable=trainable, rngs=rngs, train=train
    )
    first_rank = partition.options.devices[0]
    if pipelined.num_stages is not None:
        first_rank = pipelined.placement.devices[0]

    results: list[CheckResult] = []
    loss = None
    with jax.default_device(_transfer.first_device(first_rank)):
        checker = LayerChecker(
            x, x_axes, sizes=sizes, rngs=rngs, train=train, tolerance=tolerance
        )
        for layer in layers[:-1]:
            results.append(checker.check(layer))
        reductions = functools.partial(_reductions, axes.out_axes, microbatch_size)
        results.append(checker.check(layers[-1], reductions))
        if pipelined_loss is not None:
            objective = pipelined_loss.objective
            loss = checker.check_loss(objective, targets, target_axes)
    if not model.is_list:
        results = [replace(results[0], name=f"the model ({model})")]
    return CheckReport(sizes, tuple(results), loss)


def _layers_to_check(
    model: Model,
    entries: Sequence[PyTree],
    x: PyTree,
    *,
    trainable: Trainable,
    rngs: _rng.Rngs,
    train: bool,
) -> list[LayerToCheck]:
    """Each layer behind those whose variables it reads, and the variables of these.

    A pipeline with a stage for each layer tells which variables each layer reads.
    """
    count = len(model.layers)
    options = Options(
        num_microbatches=1,
        devices=[AbstractDevice(rank) for rank in range(count)],
        schedule=gpipe(count, 1),
        remat="none",
    )
    partition = Partition(options, group_layers(model.layers, [1] * count))
    # The same model, with a stage for each layer.
    layerwise = Model(model.layers, model.axes, partition.stage_of_layer)
    function = PipelinedFunction(
        _model_functions.forward_spec(layerwise, train=train), partition
    )
    stages = function.divide(tuple(entries), (x, rngs)).stages

    # leaf of the variables -> index of the layer in whose entry it is
    layer_of_leaf: list[int] = []
    for i, entry in enumerate(entries):
        layer_of_leaf += [i] * len(jax.tree.leaves(entry))

    is_trained = trainable.is_trained(model.layers, entries)
    layers: list[LayerToCheck] = []
    for i in range(count):
        leaves = [k for k in stages.params_of(i) if k < len(layer_of_leaf)]
        owners = {layer_of_leaf[k] for k in leaves}  # later indices are of constants
        indices = [*sorted(owners - {i}), i]
        sequential = Sequential(
            [model.layers[k] for k in indices],
            [model.stage_of_layer[k] for k in indices],
            indices=indices,
        )
        layer = LayerToCheck(
            i,
            sequential,
            [entries[k] for k in indices],
            is_trained=[is_trained[k] for k in indices],
        )
        layers.append(layer)
    return layers


def _reductions(
    out_axes: Any, microbatch_size: int, outputs: PyTree
) -> list[Sequence[str]]:
    """The reductions of outputs by `Pipeline.apply`: see `LayerChecker.check`.

    Args:
      out_axes: the argument of the pipeline.
      microbatch_size: the number of examples of a micro-batch of the pipeline.
      outputs: specs of the outputs.
    """
    axes = _microbatch.leaf_axes(out_axes, outputs, "outputs", "out_axes", REDUCTIONS)
    reductions: list[Sequence[str]] = []
    for leaf, axis in zip(jax.tree.leaves(outputs), axes, strict=True):
        if isinstance(axis, Reduction):
            reductions.append(axis.checked_as)
        elif axis is None or _has_rows(leaf, axis, microbatch_size):
            reductions.append(("each",))
        else:  # which apply does not join, but a loss may be a mean or a sum of it
            reductions.append(("mean", "sum"))
    return reductions


def _has_rows(leaf: Any, axis: int, count: int) -> bool:
    """True if an array has ``count`` rows on an axis."""
    return -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == count


def _uneven_sizes(batch_size: int, microbatch_size: int) -> tuple[int, int]:
    """Two micro-batches of different sizes, if they can be.

    Layers may take examples in groups: the first is as large as a micro-batch of the
    pipeline, or else even.

    Args:
      batch_size: the number of examples, two at least.
      microbatch_size: the number of examples of a micro-batch of the pipeline.
    """
    first = max(min(microbatch_size, batch_size // 3), min(2, batch_size // 2))
    is_odd = first % 2 == 1
    if is_odd and 2 < first != microbatch_size:
        first -= 1
    return first, batch_size - first
