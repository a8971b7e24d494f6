"""`jpipe.pipeline`: a list of layers, or one model, over many devices."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._arguments._batch import Axes
from .._arguments._microbatch import check_axes
from .._arguments._wrong_call import explain_call
from .._instructions._transfer import Device
from .._layers._adapter import adapt_layers, is_model
from .._layers._layer_group import group_layers
from .._lower._join import REDUCTIONS
from .._model._model import Model
from .._partition import _param_sharding
from .._partition._options import REMAT, SCHEDULE
from .._partition._partition import Partition
from .._processes._start import check_joined
from ..planning._plan_record import Plan
from ..schedules import Schedule, ScheduleBuilder
from . import _option_checks
from ._pipeline import Pipeline
from ._pipelined_model import PipelinedModel


@explain_call("jpipe.pipeline(layers, num_microbatches=4)", has_options=True)
def pipeline(
    layers: Any,
    num_microbatches: int | None = None,
    *,
    num_stages: int | None = None,
    balance: Sequence[int] | None = None,
    plan: Plan | None = None,
    devices: Sequence[Device | Mesh] | np.ndarray | None = None,
    mesh: Mesh | None = None,
    sharding: _param_sharding.ShardingRule | None = None,
    gather: str = "step",
    replicas: Sequence[int] | None = None,
    schedule: str | ScheduleBuilder | Schedule = SCHEDULE,
    remat: Any = REMAT,
    in_axes: Any = 0,
    target_axes: Any = 0,
    out_axes: Any = 0,
) -> Pipeline:
    """Turns a model, or a sequence of layers, into one program over many devices.

    The program gives the numbers of the same layers on one device. Each stage, a
    group of neighbouring layers, is compiled for its own device; a mini-batch is split
    into micro-batches, which pass through the stages in the order of a schedule.

    Args:
      layers: a sequence of layers: linen or nnx modules, `Layer` objects, functions
        ``x -> y``; each maps one pytree to one pytree. Or one of these alone, a whole
        model with its own inputs (several: `inputs`), which is divided where that
        balances and few bytes cross, or where it calls `boundary`.
      num_microbatches: the number of micro-batches of a mini-batch, at least 1. Their
        sizes differ by at most one.
      num_stages: the number of stages of one model; default: as many as marks make,
        or else one for each device, or fewer where the model has fewer cuts.
      balance: the number of layers of each stage, such as ``[3, 2, 4]``; default: each
        layer is a stage. `jpipe.partition` of a `jpipe.profile` of the layers finds
        the one with equal times.
      plan: a plan of `jpipe.plan`, in place of ``num_microbatches``, ``num_stages``,
        ``balance``, ``replicas``, ``schedule`` and ``remat``; and of ``mesh`` if it has
        several devices per stage, over which ``devices`` are then laid out, stage by
        stage.
      devices: one device per rank, default `jax.devices`; repeat a device to let it
        serve several stages. A rank may have a mesh of its own in place of a device.
      mesh: one mesh of all ranks, in place of ``devices``: the stages are along its
        axis ``"stage"``, each stage has all other axes. Examples are spread over
        ``"data"``; parameters are sharded by ``sharding``.
      sharding: ``(path, spec) -> PartitionSpec`` of a parameter, or ``None``; the path
        starts with the layer's index. Left out, the boxes of Flax
        (`flax.linen.with_partitioning`) and the metadata of nnx decide. A parameter
        that is sharded along ``"data"`` (FSDP) is gathered for use.
      gather: ``"step"`` to gather such parameters once in a step, ``"microbatch"`` to
        gather them for each micro-batch, which holds less memory.
      replicas: the number of ranks that take turns at each stage, such as
        ``[3, 2, 2, 1]``: micro-batch i runs on the (i mod r)-th of r ranks, under
        ``"1f1b"`` or ``"eager_1f1b"``. Variables stay on the first of them, which sends
        them to the others once in a step and adds up their gradients.
      schedule: a name of `jpipe.schedules.BY_NAME`, a builder, or a `Schedule`. Where
        a loss reads the whole mini-batch (``reduction="batch"``, `jpipe.whole_batch`),
        the default is ``"gpipe"``.
      remat: the residuals that are stored between forward and backward. ``"min_cut"``:
        the fewest bytes from which all that the backward reads follows without a
        product, a convolution or a loop. ``"dots"``: the results of products and
        convolutions, and the stage's inputs. ``"full"``: the stage's inputs, from which
        all else is computed again. ``"none"``: all that the backward reads.
        ``"except_last"``: ``"full"``, but ``"none"`` for the last micro-batch. Or a
        policy of `jax.checkpoint_policies`. One value for all stages, or one per stage.
      in_axes: the batch axis of the inputs, as `jax.vmap` takes it: an int, ``None``
        for leaves that every micro-batch gets whole, or a pytree prefix of these.
      target_axes: the batch axis of the targets, likewise.
      out_axes: the batch axis of the outputs, on which `Pipeline.apply` joins them, as
        `jax.vmap` takes it: an int, ``None``, or a pytree prefix of these; or
        `jpipe.MEAN`, the mean over the examples, or `jpipe.SUM`, as for ``aux_axes``
        of `Pipeline.value_and_grad`. An output that follows from no example, such as a
        learned temperature or a codebook, is what one device returns; ``None`` is for
        such outputs alone.

    Returns:
      The pipeline. Nothing is compiled yet. The variables, gradients and states of a
      list of layers have one entry per layer; those of one model are its own trees.

    Warns:
      UserWarning: if a schedule that runs several stages per rank leaves devices idle,
        though there is one for each stage.

    Raises:
      ValueError: if a number, name or length does not fit; it lists all such faults.
      TypeError: if a layer, device or number is of a wrong type.
      ScheduleError: if a schedule cannot run.
      RuntimeError: if the process is one of several and has not joined them, or has
        too few threads for meshes of CPU devices.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> from flax import linen as nn
      >>> pipe = jpipe.pipeline(
      ...     [nn.Dense(8), nn.relu, nn.Dense(1)], num_microbatches=2, balance=[2, 1]
      ... )
      >>> x = jnp.ones((4, 3))
      >>> variables = pipe.init(jax.random.key(0), x)
      >>> pipe.apply(variables, x).shape
      (4, 1)

    References:
      Huang et al., `GPipe: Efficient Training of Giant Neural Networks using
      Pipeline Parallelism <https://arxiv.org/abs/1811.06965>`_ (2019).
      Kim et al., `torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
      Models <https://arxiv.org/abs/2004.09910>`_ (2020).
    """
    arguments = {**locals()}  # all options, of which none can be forgotten
    check_joined()
    is_one_model = is_model(layers)
    adapters = adapt_layers([layers] if is_one_model else layers)
    if is_one_model:
        _option_checks.check_no_balance(balance)
    elif num_stages is not None:
        advice = (
            "give the model as it is, not in a list"
            if len(adapters) == 1
            else "of a list of layers type balance=, how many layers each stage takes"
        )
        raise ValueError(
            f"num_stages={num_stages} is for one model that is divided by itself; "
            f"{advice}"
        )
    options = _option_checks.check_options(
        pipeline, arguments, layers=None if is_one_model else adapters
    )

    groups = (
        None if options.balance is None else group_layers(adapters, options.balance)
    )
    partition = Partition(options, groups, shares_cuts=is_one_model)
    axes = Axes(in_axes, target_axes, out_axes)
    check_axes("in_axes", in_axes)
    check_axes("target_axes", target_axes)
    check_axes("out_axes", out_axes, REDUCTIONS)
    model = Model(adapters, axes, partition.stage_of_layer)
    forecast = getattr(plan, "forecast", None)
    pipelined = PipelinedModel(model, partition, forecast)

    # A `Schedule` and replicas fix the number of ranks: idle devices are meant.
    has_fixed_ranks = isinstance(options.schedule, Schedule) or replicas is not None
    if groups is not None and not has_fixed_ranks:
        _option_checks.warn_of_idle_devices(
            options.devices, pipelined.placement.schedule
        )
    return Pipeline(pipelined)


@explain_call("jpipe.sequential(layers)")
def sequential(
    layers: Any,
    num_microbatches: int = 1,
    *,
    devices: Sequence[Device] | None = None,
    in_axes: Any = 0,
    target_axes: Any = 0,
    out_axes: Any = 0,
) -> Pipeline:
    """Makes the unpipelined twin of `pipeline`: the layers as one stage on one device.

    With the same number of micro-batches it draws the same dropout. Each micro-batch
    is one compiled forward and backward; nothing is recomputed.

    Args:
      layers: as for `pipeline`.
      num_microbatches: as for `pipeline`; the gradients are accumulated.
      devices: a sequence of one device; default: the first of this process.
      in_axes: as for `pipeline`.
      target_axes: as for `pipeline`.
      out_axes: as for `pipeline`.

    Returns:
      A pipeline with one stage.

    Raises:
      ValueError: as for `pipeline`.
      TypeError: as for `pipeline`.

    Example:
      >>> import jpipe
      >>> from flax import linen as nn
      >>> jpipe.sequential([nn.Dense(8), nn.relu]).num_stages
      1
    """
    num_stages = None
    balance = None
    if is_model(layers):
        num_stages = 1
    elif hasattr(layers, "__iter__"):
        layers = list(layers)
        balance = [len(layers)] if layers else None
    return pipeline(
        layers,
        num_microbatches,
        num_stages=num_stages,
        balance=balance,
        devices=jax.local_devices()[:1] if devices is None else devices,
        remat="none",
        in_axes=in_axes,
        target_axes=target_axes,
        out_axes=out_axes,
    )
