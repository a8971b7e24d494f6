"""What a profile was made on: whatever must be the same where it is used."""

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
from ._traced import TracedLayer

# What `jpipe.profile` calls the rates of an estimate.
_RATES = "peak_flops", "memory_bandwidth", "action_seconds"
# To a type checker it has no attributes.
_config: Any = jax.config


def fingerprint(
    model: TracedLayer, train: bool, where: Device | Rates
) -> dict[str, str]:
    """What a profile of layers is made on, by name.

    A layer is known by its name, the shapes and dtypes of what it is given, and a
    digest of what it holds and of the operations that it traces to; not by the values
    that it holds.

    Args:
      model: the layers.
      train: whether this is training.
      where: the device that they are measured on, or the rates of one on paper.
    """
    how = {"how": "estimated"}
    if isinstance(where, Rates):
        how |= zip(_RATES, map("{:g}".format, where), strict=True)
    else:
        how = {"how": "measured", "device": kind_of(where)}
    return {
        **how,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "matmul precision": str(_config.jax_default_matmul_precision),
        "input": _shapes(model.entering(0)),
        "train": str(train),
        **{f"layer {i}": _layer(model, i) for i in range(len(model.names))},
    }


def estimated(fingerprint: Mapping[str, str]) -> dict[str, float] | None:
    """The rates of an estimate, as arguments of `jpipe.profile`; else ``None``."""
    if fingerprint.get("how") != "estimated":
        return None
    return {name: float(fingerprint[name]) for name in _RATES}


def measured_on_cpu(fingerprint: Mapping[str, str]) -> bool:
    """Whether a profile was measured, and on a CPU."""
    is_measured = fingerprint.get("how") == "measured"
    return is_measured and fingerprint.get("device", "").startswith("cpu (")


def kind_of(device: Device) -> str:
    """What a device is, and of CPUs also where."""
    kind = device.device_kind
    if device.platform == "cpu":  # to JAX they are all of one kind
        kind = f"{kind} ({platform.machine()}, {os.cpu_count()} cores)"
    return kind


def _layer(model: TracedLayer, number: int) -> str:
    stages, part = model.stages, model.stages.part(number)
    weights = stages.weights(number)
    parts = [
        str(model.specs(weights)),
        str([model.paths[i] for i in weights if i < len(model.paths)]),
        str([stages.trained[i] for i in weights]),
        str([var.aval for var in model.wanted(part.arrives)]),
        str([str(var.aval) for var in part.given]),
        *_operations(part.closed),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    x = _shapes(model.entering(number))
    return f"{model.names[number]}: {x}, {digest[:12]}"


def _shapes(variables: Sequence[core.Var]) -> str:
    leaves = specs(variables)
    return shape_text(leaves[0] if len(leaves) == 1 else tuple(leaves))


def _operations(closed: core.ClosedJaxpr) -> Iterator[str]:
    """The operations of a jaxpr, as far as their texts are the same in any process."""
    for eqn in closed.jaxpr.eqns:
        made = ", ".join(str(var.aval) for var in eqn.outvars)
        yield f"{eqn.primitive.name} {eqn.params.get('precision')} {made}"
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from _operations(inner)
