"""Layers are run at once and in micro-batches: what `Pipeline.check` does."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ._check._layers import Checking
from ._check._report import CheckReport, check_microbatch_sizes
from ._functions import _microbatch
from ._functions._objective import Objective
from ._instructions import _transfer
from ._instructions._transfer import OnPaper
from ._layers import _rng
from ._layers._sequence import Sequential
from ._layers._stage import fuse
from ._pipelined_model import PipelinedModel
from ._run import _variables
from ._slices import _arguments, _model_functions
from ._slices._config import PipelineConfig
from ._slices._join import MEAN, SUM
from ._slices._model import Model
from ._slices._partition import Partition
from ._slices._sliced import Sliced
from .schedules import gpipe

PyTree = Any


def checked(
    pipelined: PipelinedModel,
    variables: PyTree,
    x: PyTree,
    targets: PyTree,
    *,
    objective: Objective | None,
    rngs: _rng.Rngs,
    train: bool,
    tolerance: float | None = None,
    microbatch_sizes: Sequence[int] | None = None,
) -> CheckReport:
    """Checks layers, or a model as the only one: see `Pipeline.check`.

    Args:
      pipelined: the layers or the model.
      variables: its variables.
      x: an input.
      targets: its targets.
      objective: the loss; ``None``: layers only.
      rngs: keys.
      train: whether layers are run as in training.
      tolerance: how far numbers may be apart.
      microbatch_sizes: how many examples each micro-batch has.
    """
    model, partition = pipelined.model, pipelined.partition
    entries = model.entries(variables)
    if len({device.process_index for device in partition.places}) > 1:
        raise ValueError(
            "what several processes have cannot be checked in one of them; check "
            "jpipe.sequential of the same layers, in one process"
        )
    if rngs is not None:
        _rng.check_rngs(rngs)
    _variables.check_concrete(jax.tree.leaves((x, targets, rngs)))
    given = x, targets
    names, axes = ("x", "targets"), model.axes
    specs = [*map(_microbatch.specs, given, names)]
    x_axes, target_axes = _arguments.axes_of(axes[:2], specs, names)
    count = _arguments.batch_size(specs, (x_axes, target_axes), 2, names)
    number = partition.num_microbatches * partition.num_shards
    microbatch = -(-count // number)
    if microbatch_sizes is None:
        microbatch_sizes = _sizes(count, microbatch)
    sizes = check_microbatch_sizes(microbatch_sizes, count)
    pipelined.checks.by_owner(variables, x)
    _variables.check_alive(jax.tree.leaves(variables))
    own = _apart(pipelined, entries, x, rngs, train)
    is_known = pipelined.num_stages is not None
    first = pipelined.pipe.devices[0] if is_known else partition.config.ranks[0]
    with jax.default_device(_transfer.one_of(first)):
        checking = Checking(x, x_axes, sizes, rngs, train, tolerance)
        found = [checking.layer(i, *given) for i, given in enumerate(own[:-1])]
        reductions = functools.partial(_reductions, axes.out_axes, microbatch)
        found += [checking.layer(len(found), *own[-1], reductions)]
        loss = None
        if objective is not None:
            loss = checking.loss(objective, targets, target_axes)
    if not model.is_list:
        found = [replace(found[0], name=f"the model ({model})")]
    return CheckReport(sizes, tuple(found), loss)


def _reductions(out_axes: Any, microbatch: int, outputs: PyTree) -> list[Sequence[str]]:
    """The reductions of outputs by `Pipeline.apply`: see `Checking.layer`.

    Args:
      out_axes: as the pipeline was given it.
      microbatch: how many examples a micro-batch of the pipeline has.
      outputs: specs of the outputs.
    """
    flat = _microbatch.flat_axes(out_axes, outputs, "outputs", "out_axes", (MEAN, SUM))
    found: list[Sequence[str]] = []
    for leaf, axis in zip(jax.tree.leaves(outputs), flat, strict=True):
        if axis is MEAN:
            found.append(("mean",))
        elif axis is SUM:
            found.append(("sum", "each"))
        elif axis is None or _has_rows(leaf, axis, microbatch):
            found.append(("each",))
        else:  # which it does not join, but a loss may be a mean or a sum of it
            found.append(("mean", "sum"))
    return found


def _has_rows(leaf: Any, axis: int, count: int) -> bool:
    """Whether an array has so many rows on an axis."""
    return -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] == count


def _apart(
    pipelined: PipelinedModel,
    entries: Sequence[PyTree],
    x: PyTree,
    rngs: _rng.Rngs,
    train: bool,
) -> list[tuple[Sequential, list[PyTree]]]:
    """Each layer behind those whose variables it reads, and the variables of these."""
    layers, number = pipelined.model.layers, len(entries)
    stage_of_layer = pipelined.model.stage_of_layer
    config = PipelineConfig(
        num_microbatches=1,
        ranks=[OnPaper(rank) for rank in range(number)],
        schedule=gpipe(number, 1),
        remat="none",
    )
    partition = Partition(config, fuse(layers, [1] * number))
    model = Model(layers, pipelined.model.axes, partition.stage_of_layer)
    work = _model_functions.forward(model, train=train)
    stages = Sliced(work, partition).divided(tuple(entries), (x, rngs)).stages
    entry_of = [i for i, own in enumerate(entries) for _ in jax.tree.leaves(own)]
    found = []
    for i in range(number):
        leaves = [leaf for leaf in stages.params_of(i) if leaf < len(entry_of)]
        read = {entry_of[leaf] for leaf in leaves}  # and no constants
        needed = [*sorted(read - {i}), i]
        some = [layers[k] for k in needed]
        alone = Sequential(some, [stage_of_layer[k] for k in needed], needed)
        found.append((alone, [entries[k] for k in needed]))
    return found


def _sizes(batch_size: int, microbatch: int) -> tuple[int, int]:
    """Two micro-batches of different sizes, if they can be.

    Layers may take examples in groups: the first is as large as a micro-batch of the
    pipeline, or else even.

    Args:
      batch_size: how many examples there are, two at least.
      microbatch: how many a micro-batch of the pipeline has.
    """
    first = max(min(microbatch, batch_size // 3), min(2, batch_size // 2))
    first -= first % 2 if 2 < first != microbatch else 0
    return first, batch_size - first
