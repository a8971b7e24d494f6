"""The origin of a profile: how it was made, on what device, with which versions.

A profile is used wherever its model is: another device or version is no fault. The plan
says where its numbers are from.
"""

from collections.abc import Mapping

MEASURED = "measured"
ESTIMATED = "estimated"
# The entries of an origin: the arguments of `jpipe.profile` with the rates of an
# estimate; the device that was measured; and settings and versions.
RATE_NAMES = ("peak_flops", "memory_bandwidth", "action_seconds")
DEVICE = "device"
PRECISION = "matmul precision"
DEFAULT_PRECISION = "default"
_SETTINGS = (PRECISION, "jax", "flax")


def format_origin(origin: Mapping[str, str]) -> str:
    """Says how and where a profile was made; empty if it does not say."""
    settings = [
        f"{name} {origin[name]}"
        for name in _SETTINGS
        if name in origin and (name, origin[name]) != (PRECISION, DEFAULT_PRECISION)
    ]
    if origin.get("how") == ESTIMATED:
        flops, bandwidth, seconds = (origin[name] for name in RATE_NAMES)
        names = ", ".join(f"{name}=" for name in RATE_NAMES)
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


def can_overlap(origin: Mapping[str, str]) -> bool:
    """True if devices are taken to compute while they send and receive.

    The cores of a CPU, on which a profile may have been measured, copy themselves.
    """
    return not is_measured_on_cpu(origin)
