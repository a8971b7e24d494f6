"""A profile as a table."""

from collections.abc import Iterator
from typing import Any

from ..schedules._costs import TIME_FIELDS
from ..schedules._formats import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
)

_SHORT = {"input_grad": "I", "weight_grad": "W"}
_HOW = {
    "estimated": "estimated at {peak_flops} flops and {memory_bandwidth} bytes per "
    "second for ",
    "measured": "measured on {device} with ",
}


def table(profile: Any) -> str:
    """The text of a profile: what it was made on, a line for each layer, and sums."""
    layers = profile.layers
    modes = dict.fromkeys(mode for layer in layers for mode in layer.residual_bytes)
    # Of each column: how a number is written, and those of the layers.
    numbers = {
        **{
            _SHORT.get(n, n): (format_seconds, [getattr(x, n) for x in layers])
            for n in TIME_FIELDS.values()
        },
        "parameters": ("{:,}".format, [layer.num_params for layer in layers]),
        "output": (format_bytes, [layer.output_bytes for layer in layers]),
        **{
            f"residuals by {mode}": (
                format_bytes,
                [layer.residual_bytes.get(mode) for layer in layers],
            )
            for mode in modes
        },
        "workspace": (format_bytes, [layer.workspace_bytes for layer in layers]),
    }
    rows = [["", *map(str, range(len(layers))), ""]]
    rows.append(["layer", *(layer.name for layer in layers), "sum"])
    for name, (write, values) in numbers.items():
        adds_up = None not in values and name not in ("output", "workspace")
        cells = ["" if value is None else write(value) for value in values]
        rows.append([name, *cells, write(sum(values)) if adds_up else ""])
    lines = list(map(list, zip(*rows, strict=True)))
    return "\n".join(
        [_origin(profile), *_links(profile), format_table(lines, left={1})]
    )


def _origin(profile: Any) -> str:
    """What the profile was made on."""
    fingerprint = profile.fingerprint
    how = _HOW.get(fingerprint.get("how"), "").format(**fingerprint)
    examples = f"a micro-batch of {format_count(profile.microbatch_size, 'example')}"
    shapes = f" ({fingerprint['input']})" if "input" in fingerprint else ""
    versions = [
        f", {name} {fingerprint[name]}"
        for name in ("jax", "flax")
        if name in fingerprint
    ]
    return "".join([how, examples, shapes, *versions])


def _links(profile: Any) -> Iterator[str]:
    """What layers share, and what goes from one to a later one."""
    for group in profile.ties:
        first, *others = map(str, group)
        yield f"tied: parameters of layer {first} are used by {', '.join(others)}"
    for skip in profile.skips:
        yield (
            f"skip connection {skip.name}: layer {skip.source} to {skip.target}, "
            f"{format_bytes(skip.bytes)}"
        )
