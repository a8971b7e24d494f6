"""`jpipe.profile`: the costs of each layer of a model.

For each size of a micro-batch, the largest first:

trace      each layer, or section of a model, as a stage     (`_planned_model`)
times      of the programs of each, of equal layers once, which are measured on
           a device (`_measure`) or estimated by their jaxprs (`_estimate`)
bytes      of parameters, outputs, residuals by remat mode, and skip connections:
           all are read off the trace                        (`_traced_layers`)

The profile of the smallest size has the larger ones, the fingerprint of the model, its
origin, and the speed of transfers between two devices if there are two.
"""

import dataclasses
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import flax
import jax

from .._arguments._wrong_call import explain_call
from .._instructions._progress import Progress, count_items
from .._instructions._transfer import Device
from .._jaxprs._flops import count_flops
from .._jaxprs._jaxpr import is_inexact, nbytes
from .._jaxprs._min_cut import total_bytes
from .._layers import _rng
from .._partition._remat_mode import MODES, NONE, Stored
from .._placed._mesh_context import outside_of_meshes
from .._stage._stage_functions import StageFunctions
from ..schedules._costs import TIME_FIELDS
from ._estimate import estimate_program
from ._layer_profile import LayerProfile, ProgramCosts, SkipProfile
from ._measure import (
    layer_computations,
    measure_layers,
    measure_neighbor_link,
)
from ._mode_names import MODE_NAMES
from ._origin import (
    DEFAULT_PRECISION,
    DEVICE,
    ESTIMATED,
    MEASURED,
    PRECISION,
    Rates,
)
from ._planned_model import PlannedModel
from ._profile_record import Profile
from ._request import Request
from ._traced_layers import TracedLayers, fingerprint

PyTree = Any
# To a type checker it has no attributes.
_config: Any = jax.config
# The numbers of micro-batches whose sizes are profiled by default.
_DEFAULT_COUNTS = (4, 16)


@outside_of_meshes
@explain_call("jpipe.profile(layers, x)")
def profile(
    layers: Any,
    x: PyTree,
    *,
    num_microbatches: int | Sequence[int] | None = None,
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    targets: PyTree = (),
    has_aux: bool = False,
    reduction: str = "mean",
    trainable: Any = None,
    in_axes: Any = 0,
    target_axes: Any = 0,
    rngs: _rng.Rngs = None,
    train: bool = True,
    measure: bool = True,
    rounds: int = 5,
    device: Device | None = None,
    peak_flops: float | None = None,
    memory_bandwidth: float | None = None,
    action_seconds: float | None = None,
) -> Profile:
    """Finds the costs of each layer, or section of a model, on one micro-batch.

    From the costs of micro-batches of two sizes follow those of others, so that
    `jpipe.plan` may choose the number of micro-batches from a profile. A profile holds
    numbers and names only, and may be used on any machine.

    The programs of each layer are measured by themselves: its forward, its backward
    from residuals, and the halves of that; and a program that computes nothing, whose
    time is taken off. Equal layers are measured once. The device holds one layer at a
    time; its parameters, and its inputs from the layers before it, are drawn: normal
    numbers, and zeros of other dtypes.

    Estimated times are those of a roofline, of all that XLA does not fuse: the longer
    of the time for floating-point operations and the time for bytes read and written.
    They need no device, compile nothing, and are the same each time. The estimated
    workspace of a layer is the most that is alive at once in its programs besides their
    arguments and results: more than what XLA leaves of it where it fuses.

    Args:
      layers: as `jpipe.pipeline` takes them; of one model its sections are profiled, at
        whose ends few bytes cross.
      x: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      num_microbatches: the number of micro-batches, of which the first is used; or
        several numbers, so that micro-batches of several sizes are profiled: then the
        costs are those of the smallest, and `Profile.larger` has the others. Default: 4
        and 16, or fewer if there are fewer examples.
      loss_fn: ``(outputs, targets) -> scalar``, which is then a part of the last layer;
        left out, the gradient of the output of the last layer is drawn.
      targets: the targets of the mini-batch, in arrays or specs.
      has_aux: as for `Pipeline.value_and_grad`.
      reduction: likewise.
      trainable: likewise.
      in_axes: as for `jpipe.pipeline`.
      target_axes: likewise.
      rngs: as for `Pipeline.apply`; left out in training, a key, as in a training step.
      train: True for layers as they are in training.
      measure: True to measure; else times are estimated.
      rounds: the number of times that the layers are measured, one after the other; of
        each the median counts.
      device: the device to measure on; default: the first of `jax.devices`.
      peak_flops: operations per second for an estimate; default 1e12, with which a
        microsecond is a million operations.
      memory_bandwidth: bytes of memory per second for an estimate; default 1e11.
      action_seconds: seconds that any action takes, whatever it computes, for an
        estimate: to have a program run from Python; default 2e-5.

    Returns:
      The profile. It prints as a table.

    Raises:
      ValueError: if the layers do not fit each other or ``x``, or an argument
        does not.
      TypeError: if a layer or a leaf is nothing such.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(8), nn.relu, nn.Dense(2)]
      >>> costs = jpipe.profile(layers, jnp.ones((64, 16)), measure=False)
      >>> costs.sizes
      [4, 16]
      >>> [layer.num_params for layer in costs.layers]
      [136, 0, 18]
      >>> [layer.output_bytes for layer in costs.layers]
      [128, 128, 32]

    References:
      Harlap et al., `PipeDream: Fast and Efficient Pipeline Parallel DNN Training
      <https://arxiv.org/abs/1806.03377>`_ (2018), section 3.2.
    """
    counts = _as_counts(num_microbatches)
    request = Request(
        x,
        num_microbatches=counts[0] if counts else 1,
        loss_fn=loss_fn,
        targets=targets,
        has_aux=has_aux,
        reduction=reduction,
        trainable=trainable,
        in_axes=in_axes,
        target_axes=target_axes,
        rngs=rngs,
        train=train,
        measure=measure,
        rounds=rounds,
        device=device,
        peak_flops=peak_flops,
        memory_bandwidth=memory_bandwidth,
        action_seconds=action_seconds,
    )
    if not counts:
        counts = _default_counts(request.batch().sizes[0])
    requests = [dataclasses.replace(request, num_microbatches=x) for x in counts]
    finest = max(requests, key=lambda x: x.num_microbatches)
    model = PlannedModel(layers)
    with Progress("profiles made"):
        return profile_sizes(model, model.traced(finest), requests)


def _as_counts(num_microbatches: Any) -> tuple[Any, ...]:
    """The numbers of micro-batches of the user; empty by default.

    Raises:
      ValueError: if there is a list without any.
    """
    if num_microbatches is None:
        return ()
    if not isinstance(num_microbatches, Sequence) or isinstance(num_microbatches, str):
        return (num_microbatches,)
    if not num_microbatches:
        raise ValueError(
            f"profile: num_microbatches={num_microbatches!r}: give one number or "
            f"several, such as (4, 16)"
        )
    return tuple(num_microbatches)


def _default_counts(num_examples: int) -> tuple[int, int]:
    """The numbers of micro-batches whose sizes are profiled by default."""
    fewest, most = _DEFAULT_COUNTS
    most = min(most, num_examples)
    return min(fewest, -(-most // 2)), most


def profile_sizes(
    model: PlannedModel, finest_layers: TracedLayers, requests: Sequence[Request]
) -> Profile:
    """The profile of the smallest micro-batch, with those of the larger ones.

    Args:
      model: the model.
      finest_layers: its layers, traced on the smallest micro-batch.
      requests: a request for each number of micro-batches.
    """
    profile: Profile | None = None
    *coarser, finest = sorted(requests, key=lambda x: x.num_microbatches)
    for request in (*coarser, finest):  # the largest size first
        layers = finest_layers if request is finest else model.traced(request)
        has_size = profile is not None and profile.sizes[0] == layers.batch.sizes[0]
        if not has_size:
            profile = dataclasses.replace(
                _profile_layers(layers, request), larger=profile
            )
    assert profile is not None
    device = finest.device_or_rates
    if isinstance(device, Rates):
        return profile
    return dataclasses.replace(profile, link=measure_neighbor_link(device))


def _profile_layers(model: TracedLayers, request: Request) -> Profile:
    """The requested profile of layers, each by itself."""
    if isinstance(request.device_or_rates, Rates):
        rates = request.device_or_rates
        groups = count_items("layers estimated", list(model.group_equal_layers()))
        programs = {
            functions: _estimate_programs(functions, rates) for functions in groups
        }
        action_seconds = rates.action_seconds
    else:
        programs, action_seconds = measure_layers(
            model, request, request.device_or_rates
        )
    return Profile(
        layers=tuple(_layer_profiles(model, programs)),
        input_bytes=total_bytes(model.inputs(0)),
        skips=tuple(_skip_profiles(model)),
        ties=tuple(model.ties()),
        microbatch_size=model.batch.sizes[0],
        fingerprint=fingerprint(model, train=request.train),
        origin=describe_origin(request.device_or_rates),
        action_seconds=action_seconds,
    )


def describe_origin(device_or_rates: Device | Rates) -> dict[str, str]:
    """The origin of what is made here and now, by name.

    Args:
      device_or_rates: the device that layers are measured on, or the rates of an
        estimate.
    """
    if isinstance(device_or_rates, Rates):
        origin = {"how": ESTIMATED}
        for name, rate in device_or_rates._asdict().items():
            origin[name] = f"{rate:g}"
    else:
        origin = {"how": MEASURED, DEVICE: _describe_device(device_or_rates)}
    settings = {
        PRECISION: str(_config.jax_default_matmul_precision or DEFAULT_PRECISION),
        "jax": jax.__version__,
        "flax": flax.__version__,
    }
    return origin | settings


def _describe_device(device: Device) -> str:
    """The kind of a device, and of a CPU also its cores."""
    if device.platform == "cpu":  # to JAX they are all of one kind
        cpu = f"{platform.machine()}, {os.cpu_count()} cores"
        return f"{device.device_kind} ({cpu})"
    return device.device_kind


def _estimate_programs(
    functions: StageFunctions, rates: Rates
) -> dict[str, ProgramCosts]:
    """The programs of a layer by its jaxprs."""
    return {
        name: estimate_program(computation, rates)
        for name, computation in layer_computations(functions).items()
    }


def _layer_profiles(
    model: TracedLayers,
    programs: Mapping[StageFunctions, Mapping[str, ProgramCosts]],
) -> Iterator[LayerProfile]:
    """The profiles of layers, of which the programs that compute anything are known."""
    groups = count_items("layers traced", list(model.group_equal_layers().items()))
    residual_bytes = {
        functions: _residual_bytes(model, layers[0]) for functions, layers in groups
    }
    for layer, name in enumerate(model.names):
        functions = model.functions(layer)
        params = model.specs(model.owned_variables(layer, are_params=True))
        state = model.specs(model.owned_variables(layer, are_params=False))
        forward = functions.forward.closed
        # A program that computes nothing takes no time.
        seconds = dict.fromkeys(TIME_FIELDS.values(), 0.0)
        for program_name, program in programs[functions].items():
            seconds[program_name] = program.seconds
        output_bytes, cotangent_bytes = _output_bytes(model, layer)
        yield LayerProfile(
            name=name,
            **seconds,
            num_params=sum(leaf.size for leaf in params),
            param_bytes=sum(map(nbytes, params)),
            state_bytes=sum(map(nbytes, state)),
            output_bytes=output_bytes,
            cotangent_bytes=cotangent_bytes,
            residual_bytes=residual_bytes[functions],
            workspace_bytes=_largest_workspace(programs[functions].values()),
            flops=None if forward is None else float(count_flops(forward)),
        )


def _largest_workspace(programs: Collection[ProgramCosts]) -> int | None:
    """The workspace of the program that needs most; ``None`` if one is unknown."""
    sizes = [program.workspace_bytes for program in programs]
    counted = [num_bytes for num_bytes in sizes if num_bytes is not None]
    return max(counted, default=0) if len(counted) == len(sizes) else None


def _output_bytes(model: TracedLayers, layer: int) -> tuple[int, int]:
    """The bytes of the output of a layer, and those of its gradient."""
    if layer + 1 < len(model.names):
        outputs = model.outputs(layer)
        cotangents = model.select_differentiated(outputs)
        return total_bytes(outputs), total_bytes(cotangents)
    output_bytes = sum(map(nbytes, model.results))
    if model.stages.traced().has_loss or not model.stages.slice_of(layer).has_backward:
        return output_bytes, 0
    cotangents = filter(is_inexact, model.results)
    return output_bytes, sum(map(nbytes, cotangents))


def _residual_bytes(model: TracedLayers, layer: int) -> dict[str, int]:
    """The bytes that a layer stores, by remat mode, as a stage of that mode."""
    if not model.stages.slice_of(layer).has_backward:
        return dict.fromkeys(MODE_NAMES, 0)
    residual_bytes: dict[str, int] = {}
    for mode in MODES:
        # The bytes of inputs need no trace of a mode.
        traced_mode = NONE if mode.stores is Stored.INPUTS else mode
        functions = model.functions(layer, mode=traced_mode)
        residual_bytes[mode.name] = functions.residuals.nbytes[mode.name]
    return residual_bytes


def _skip_profiles(model: TracedLayers) -> Iterator[SkipProfile]:
    for layer in range(len(model.names)):
        for (source, name), variables in model.skip_inputs(layer).items():
            cotangents = model.select_differentiated(variables)
            yield SkipProfile(
                name=name,
                source=source,
                target=layer,
                bytes=total_bytes(variables),
                cotangent_bytes=total_bytes(cotangents),
                is_output=model.is_output(source, variables),
            )
