"""`jpipe.profile`: what each layer of a model costs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._instructions._progress import Progress, count_items
from .._instructions._transfer import Device
from .._jaxprs._flops import flops
from .._jaxprs._jaxpr import is_inexact, nbytes
from .._jaxprs._min_cut import total_bytes
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._stage._stage import Stage
from ..schedules._costs import TIME_FIELDS
from ._estimate import Rates, seconds, workspace_bytes
from ._fingerprint import fingerprint
from ._layer_profile import MODES
from ._measure import Times
from ._measure import measure as measured
from ._profile import LayerProfile, Profile, SkipProfile
from ._request import Request
from ._subject import PlannedModel
from ._traced import TracedLayer

PyTree = Any


@outside_of_meshes
def profile(
    layers: Any,
    sample: PyTree,
    *,
    num_microbatches: int = 1,
    loss: Callable[[PyTree, PyTree], Any] | None = None,
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
    """Finds what each layer, or piece of a model, costs on one micro-batch.

    Measured are the programs of each layer by itself: its forward, its backward from
    residuals, and the halves of that; and what a program takes that computes nothing,
    which is taken off. Equal layers are measured once. The device holds one layer at a
    time; its parameters, and what layers before it would give to it, are drawn: normal
    numbers, and zeros of other dtypes.

    Estimated times are those of a roofline, of all that XLA does not fuse: the longer
    of the time for floating-point operations and the time for bytes read and written.
    They need no device, compile nothing, and are the same each time. The estimated
    workspace of a layer is the most that is alive at once in its programs besides what
    they are given and return: more than what is left of that where XLA fuses.

    Args:
      layers: as `jpipe.pipeline` takes them; of one model its pieces are profiled, at
        whose ends few bytes cross.
      sample: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      num_microbatches: into how many micro-batches it is cut; the first is used.
      loss: ``(outputs, targets) -> scalar``, which is then a part of the last layer;
        left out, the gradient of the output of the last layer is drawn.
      targets: those of the mini-batch, in arrays or specs.
      has_aux: as for `Pipeline.value_and_grad`.
      reduction: likewise.
      trainable: likewise.
      in_axes: as for `jpipe.pipeline`.
      target_axes: likewise.
      rngs: as for `Pipeline.apply`; left out in training, a key, as in a training step.
      train: whether layers do what they do in training.
      measure: whether to measure; else times are estimated.
      rounds: how often the layers are measured, one after the other; of each the
        median counts.
      device: where to measure; default: the first of `jax.devices`.
      peak_flops: operations per second for an estimate; default 1e12, with which a
        microsecond is a million operations.
      memory_bandwidth: bytes of memory per second for an estimate; default 1e11.
      action_seconds: what an action takes whatever it computes, for an estimate: to
        have a program run from Python; default 2e-5.

    Returns:
      The profile. It prints as a table.

    Raises:
      ValueError: if the layers do not fit each other or the sample, or an argument
        does not.
      TypeError: if a layer or a leaf is nothing such.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(8), nn.relu, nn.Dense(2)]
      >>> costs = jpipe.profile(layers, jnp.ones((4, 16)), measure=False)
      >>> [layer.num_params for layer in costs.layers]
      [136, 0, 18]
      >>> [layer.output_bytes for layer in costs.layers]
      [128, 128, 32]

    References:
      Harlap et al., `PipeDream: Fast and Efficient Pipeline Parallel DNN Training
      <https://arxiv.org/abs/1806.03377>`_ (2018), section 3.2.
    """
    # In the order of its fields.
    request = Request(
        *(sample, num_microbatches, loss, targets, has_aux, reduction),
        *(trainable, in_axes, target_axes, rngs, train, measure, rounds, device),
        *(peak_flops, memory_bandwidth, action_seconds),
    )
    with Progress("profiles made"):
        return answer(PlannedModel(layers).traced(request), request)


def answer(model: TracedLayer, request: Request) -> Profile:
    """The requested profile of layers, each by itself."""
    where = request.where
    if isinstance(where, Rates):
        layers = count_items("layers estimated", list(model.alike()))
        times = {functions: _estimated(functions, where) for functions in layers}
        action = where.action
    else:
        times, action = measured(model, request, where)
    return Profile(
        layers=tuple(_layers(model, times)),
        input_bytes=total_bytes(model.entering(0)),
        skips=tuple(_skips(model)),
        ties=tuple(model.ties()),
        microbatch_size=model.batch.sizes[0],
        fingerprint=fingerprint(model, request.train, where),
        action_seconds=action,
    )


def _estimated(functions: Stage, rates: Rates) -> Times:
    """The times of a layer on paper."""
    names = [*TIME_FIELDS.values()] if functions.has_backward else ["forward"]
    found = {name: getattr(functions, name) for name in names}
    times = dict.fromkeys(TIME_FIELDS.values(), 0.0)
    times |= {name: seconds(each, rates) for name, each in found.items()}
    return Times(**times, workspace_bytes=max(map(workspace_bytes, found.values())))


def _layers(model: TracedLayer, times: Mapping[Stage, Times]) -> Iterator[LayerProfile]:
    alike = count_items("layers traced", list(model.alike().items()))
    stored = {functions: _stored(model, numbers[0]) for functions, numbers in alike}
    for i, name in enumerate(model.names):
        functions = model.functions(i)
        params, state = (model.specs(model.variables(i, yes)) for yes in (True, False))
        forward = functions.forward.closed
        output, cotangent = _given(model, i)
        yield LayerProfile(
            name=name,
            **times[functions]._asdict(),
            num_params=sum(leaf.size for leaf in params),
            param_bytes=sum(map(nbytes, params)),
            state_bytes=sum(map(nbytes, state)),
            output_bytes=output,
            cotangent_bytes=cotangent,
            residual_bytes=stored[functions],
            flops=None if forward is None else float(flops(forward)),
        )


def _given(model: TracedLayer, layer: int) -> tuple[int, int]:
    """The bytes that a layer gives to the next one, and of the gradient of these."""
    following = layer + 1
    if following < len(model.names):
        found = model.entering(following)
        return total_bytes(found), total_bytes(model.wanted(found))
    has_loss = model.stages.first.has_loss
    wanted = not has_loss and model.functions(layer).has_backward
    output = sum(map(nbytes, model.outputs))
    cotangents = sum(map(nbytes, filter(is_inexact, model.outputs)))
    return output, cotangents if wanted else 0


def _stored(model: TracedLayer, number: int) -> dict[str, int]:
    """What a layer stores by remat mode, as a stage of a pipeline of that mode."""
    if not model.functions(number).has_backward:
        return dict.fromkeys(MODES, 0)

    def by(mode: str) -> Mapping[str, int]:
        return model.functions(number, mode).stored.nbytes

    # What follows from no more than the input needs no trace of its own.
    return {mode: by("none" if mode == "full" else mode)[mode] for mode in MODES}


def _skips(model: TracedLayer) -> Iterator[SkipProfile]:
    for layer in range(len(model.names)):
        for (source, name), own in model.skipping(layer).items():
            sizes = total_bytes(own), total_bytes(model.wanted(own))
            is_output = model.is_output(source, own)
            yield SkipProfile(name, source, layer, *sizes, is_output=is_output)
