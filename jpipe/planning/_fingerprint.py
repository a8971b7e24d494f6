"""Fingerprints of profiles: all that must be the same where a profile is used."""

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax
import jax
from jax.extend import core

from .._instructions._transfer import Device
from .._jaxprs import _jaxpr
from .._jaxprs._jaxpr import specs
from .._layers._text import shape_text
from ._estimate import Rates
from ._traced import TracedLayers

# The arguments of `jpipe.profile` with the rates of an estimate.
_RATE_NAMES = ("peak_flops", "memory_bandwidth", "action_seconds")
# To a type checker it has no attributes.
_config: Any = jax.config


def fingerprint(
    model: TracedLayers, device_or_rates: Device | Rates, *, train: bool
) -> dict[str, str]:
    """The fingerprint of a profile of layers, by name.

    A layer is known by its name, the shapes and dtypes of its inputs, and a digest of
    its variables and of the operations that it traces to; not by the values of its
    variables.

    Args:
      model: the layers.
      device_or_rates: the device that they are measured on, or the rates of an
        estimate.
      train: True if this is training.
    """
    if isinstance(device_or_rates, Rates):
        origin = {"how": "estimated"}
        for name, rate in zip(_RATE_NAMES, device_or_rates, strict=True):
            origin[name] = f"{rate:g}"
    else:
        origin = {"how": "measured", "device": _describe_device(device_or_rates)}
    layers = range(len(model.names))
    return {
        **origin,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "matmul precision": str(_config.jax_default_matmul_precision),
        "input": _shapes(model.inputs(0)),
        "train": str(train),
        **{f"layer {layer}": _describe_layer(model, layer) for layer in layers},
    }


def estimated(profile_fingerprint: Mapping[str, str]) -> dict[str, float] | None:
    """The rates of an estimate, as arguments of `jpipe.profile`; else ``None``."""
    if profile_fingerprint.get("how") != "estimated":
        return None
    return {name: float(profile_fingerprint[name]) for name in _RATE_NAMES}


def is_measured_on_cpu(profile_fingerprint: Mapping[str, str]) -> bool:
    """True if a profile was measured, and on a CPU."""
    is_measured = profile_fingerprint.get("how") == "measured"
    return is_measured and profile_fingerprint.get("device", "").startswith("cpu (")


def _describe_device(device: Device) -> str:
    """The kind of a device, and of a CPU also its cores."""
    if device.platform == "cpu":  # to JAX they are all of one kind
        cpu = f"{platform.machine()}, {os.cpu_count()} cores"
        return f"{device.device_kind} ({cpu})"
    return device.device_kind


def _describe_layer(model: TracedLayers, layer: int) -> str:
    """The name, the inputs and the digest of a layer."""
    stages = model.stages
    stage_slice = stages.slice_of(layer)
    weights = stages.weights(layer)
    digested = [
        str(model.specs(weights)),
        str([model.paths[i] for i in weights if i < len(model.paths)]),
        str([stages.trained[i] for i in weights]),
        str(
            [
                var.aval
                for var in model.select_differentiated(stage_slice.input_activations)
            ]
        ),
        str([str(var.aval) for var in stage_slice.batch_inputs]),
        *_operations(stage_slice.closed),
    ]
    digest = hashlib.sha256("\n".join(digested).encode()).hexdigest()
    return f"{model.names[layer]}: {_shapes(model.inputs(layer))}, {digest[:12]}"


def _shapes(variables: Sequence[core.Var]) -> str:
    leaves = specs(variables)
    return shape_text(leaves[0] if len(leaves) == 1 else tuple(leaves))


def _operations(closed: core.ClosedJaxpr) -> Iterator[str]:
    """The operations of a jaxpr, as far as their texts are the same in any process."""
    for eqn in closed.jaxpr.eqns:
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        yield f"{eqn.primitive.name} {eqn.params.get('precision')} {results}"
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from _operations(inner)
