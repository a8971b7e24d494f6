"""Fingerprints of models, and the origin of profiles.

The fingerprint of a model must be the same where its profile is used. It says nothing
of devices, versions or settings: those are the origin of a profile (`_origin`).
"""

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._instructions._transfer import Device
from .._jaxprs import _jaxpr
from .._jaxprs._jaxpr import specs
from .._layers._text import shape_text
from ._estimate import Rates
from ._origin import (
    DEFAULT_PRECISION,
    DEVICE,
    ESTIMATED,
    MEASURED,
    PRECISION,
    RATE_NAMES,
)
from ._traced import TracedLayers

# To a type checker it has no attributes.
_config: Any = jax.config


def fingerprint(model: TracedLayers, *, train: bool) -> dict[str, str]:
    """The fingerprint of layers, by name.

    A layer is known by its name, the shapes and dtypes of its inputs, and a digest of
    its variables and of the operations that it traces to; not by the values of its
    variables.

    Args:
      model: the layers.
      train: True if this is training.
    """
    default_precision = _find_default_precision()
    return {
        "input": _shapes(model.inputs(0)),
        "train": str(train),
        **{
            f"layer {layer}": _describe_layer(model, layer, default_precision)
            for layer in range(len(model.names))
        },
    }


def describe_origin(device_or_rates: Device | Rates) -> dict[str, str]:
    """The origin of what is made here and now, by name.

    Args:
      device_or_rates: the device that layers are measured on, or the rates of an
        estimate.
    """
    if isinstance(device_or_rates, Rates):
        origin = {"how": ESTIMATED}
        for name, rate in zip(RATE_NAMES, device_or_rates, strict=True):
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


def _find_default_precision() -> str:
    """The precision of products for which nobody names one, as jaxprs have it."""
    vector = np.ones(1, np.float32)
    (product,) = jax.make_jaxpr(jnp.vdot)(vector, vector).jaxpr.eqns
    return str(product.params["precision"])


def _describe_layer(model: TracedLayers, layer: int, default_precision: str) -> str:
    """The name, the inputs and the digest of a layer."""
    stages = model.stages
    stage_slice = stages.slice_of(layer)
    weights = stages.weight_indices(layer)
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
        *_operations(stage_slice.closed, default_precision),
    ]
    digest = hashlib.sha256("\n".join(digested).encode()).hexdigest()
    return f"{model.names[layer]}: {_shapes(model.inputs(layer))}, {digest[:12]}"


def _shapes(variables: Sequence[core.Var]) -> str:
    leaves = specs(variables)
    return shape_text(leaves[0] if len(leaves) == 1 else tuple(leaves))


def _operations(closed: core.ClosedJaxpr, default_precision: str) -> Iterator[str]:
    """The operations of a jaxpr, as far as their texts are the same in any process.

    Args:
      closed: the jaxpr.
      default_precision: the precision that a setting gives to products; it is no part
        of the model.
    """
    for eqn in closed.jaxpr.eqns:
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        precision = str(eqn.params.get("precision", ""))
        if precision == default_precision:
            precision = "default"
        yield f"{eqn.primitive.name} {precision} {results}"
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from _operations(inner, default_precision)
