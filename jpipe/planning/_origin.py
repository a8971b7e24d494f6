"""The origin of a profile: how and where its times were made, by name.

how                                            measured, or estimated by jaxprs
device                                         what was measured
peak_flops, memory_bandwidth, action_seconds   the `Rates` of an estimate
matmul precision, jax, flax                    a setting and versions

A profile is used wherever its model is: another origin is no fault, and a plan tells of
it. No JAX is imported here.
"""

from collections.abc import Mapping
from typing import NamedTuple

MEASURED = "measured"
ESTIMATED = "estimated"
DEVICE = "device"
PRECISION = "matmul precision"
DEFAULT_PRECISION = "default"
_SETTINGS = (PRECISION, "jax", "flax")


class Rates(NamedTuple):
    """The speed of a device for an estimate: arguments of `jpipe.profile`.

    Attributes:
      peak_flops: floating-point operations in a second.
      memory_bandwidth: bytes that it reads and writes in its memory in a second.
      action_seconds: seconds that any action takes, whatever it computes.
    """

    peak_flops: float = 1e12
    memory_bandwidth: float = 1e11
    action_seconds: float = 2e-5

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The seconds of so many operations that touch so many bytes."""
        return max(flops / self.peak_flops, num_bytes / self.memory_bandwidth)


def format_origin(origin: Mapping[str, str]) -> str:
    """Says how and where a profile was made; empty if it does not say."""
    settings = [
        f"{name} {origin[name]}"
        for name in _SETTINGS
        if name in origin and (name, origin[name]) != (PRECISION, DEFAULT_PRECISION)
    ]
    if origin.get("how") == ESTIMATED:
        flops, bandwidth, seconds = (origin[name] for name in Rates._fields)
        names = ", ".join(f"{name}=" for name in Rates._fields)
        rates = (
            f"estimated for a device of {flops} flops and {bandwidth} bytes of memory "
            f"per second, and {seconds} s for each action ({names})"
        )
        return ", ".join([rates, *settings])
    if origin.get("how") == MEASURED:
        return ", ".join([f"measured on {origin[DEVICE]}", *settings])
    return ", ".join(settings)


def format_differences(origin: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Says in what the place where a profile is used differs from its origin.

    Args:
      origin: the origin of the profile.
      here: the origin of what would be measured here.

    Returns:
      The device and the settings here that differ; empty if none does.

    Example:
      >>> measured = {"device": "NVIDIA H100", "jax": "0.10.2", "flax": "0.12"}
      >>> format_differences(measured, measured | {"device": "cpu", "jax": "0.11"})
      'on cpu, jax 0.11'
      >>> format_differences(measured, measured | {"jax": "0.11"})
      'with jax 0.11'
    """
    texts: list[str] = []
    for name in (DEVICE, *_SETTINGS):
        if name in origin and origin[name] != here.get(name):
            text = here.get(name, "unknown")
            texts.append(text if name == DEVICE else f"{name} {text}")
    if not texts:
        return ""
    preposition = "with" if origin.get(DEVICE) == here.get(DEVICE) else "on"
    return f"{preposition} {', '.join(texts)}"


def is_measured_on_cpu(origin: Mapping[str, str]) -> bool:
    """True if a profile was measured, and on a CPU."""
    is_measured = origin.get("how") == MEASURED
    return is_measured and origin.get(DEVICE, "").startswith("cpu (")
