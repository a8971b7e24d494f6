"""A profile as a table."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..schedules._costs import TIME_FIELDS
from ..schedules._formats import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
)

# Field of a layer -> the head of its column, where that is another.
_COLUMN_NAMES = {"input_grad": "I", "weight_grad": "W"}
# Columns whose numbers have no sum.
_WITHOUT_SUM = ("output", "workspace")
_ORIGINS = {
    "estimated": "estimated at {peak_flops} flops and {memory_bandwidth} bytes per "
    "second for ",
    "measured": "measured on {device} with ",
}


def format_profile(profile: Any) -> str:
    """Formats a profile: what it was made on, a line for each layer, and sums."""
    layers = profile.layers
    num_layers = len(layers)
    columns = [
        ["", *map(str, range(num_layers)), ""],
        ["layer", *(layer.name for layer in layers), "sum"],
    ]
    for name, (write, numbers) in _number_columns(layers).items():
        cells = ["" if number is None else write(number) for number in numbers]
        total = ""
        if None not in numbers and name not in _WITHOUT_SUM:
            total = write(sum(numbers))
        columns.append([name, *cells, total])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return "\n".join([_origin(profile), *_links(profile), format_table(rows, left={1})])


def _number_columns(
    layers: Sequence[Any],
) -> dict[str, tuple[Callable[[Any], str], list[Any]]]:
    """The columns of numbers: name -> (how to write a number, one per layer)."""
    columns: dict[str, tuple[Callable[[Any], str], list[Any]]] = {}
    for field in TIME_FIELDS.values():
        seconds = [getattr(layer, field) for layer in layers]
        columns[_COLUMN_NAMES.get(field, field)] = (format_seconds, seconds)
    columns["parameters"] = ("{:,}".format, [layer.num_params for layer in layers])
    columns["output"] = (format_bytes, [layer.output_bytes for layer in layers])
    modes: dict[str, None] = {}  # in order
    for layer in layers:
        modes |= dict.fromkeys(layer.residual_bytes)
    for mode in modes:
        residuals = [layer.residual_bytes.get(mode) for layer in layers]
        columns[f"residuals by {mode}"] = (format_bytes, residuals)
    workspace = [layer.workspace_bytes for layer in layers]
    columns["workspace"] = (format_bytes, workspace)
    return columns


def _origin(profile: Any) -> str:
    """The device, the micro-batch and the versions that a profile was made with."""
    fingerprint = profile.fingerprint
    how = _ORIGINS.get(fingerprint.get("how"), "").format(**fingerprint)
    examples = f"a micro-batch of {format_count(profile.microbatch_size, 'example')}"
    shapes = f" ({fingerprint['input']})" if "input" in fingerprint else ""
    versions = [
        f", {name} {fingerprint[name]}"
        for name in ("jax", "flax")
        if name in fingerprint
    ]
    return "".join([how, examples, shapes, *versions])


def _links(profile: Any) -> Iterator[str]:
    """A line for each group of tied layers and for each skip connection."""
    for group in profile.ties:
        owner, *readers = map(str, group)
        yield f"tied: parameters of layer {owner} are used by {', '.join(readers)}"
    for skip in profile.skips:
        yield (
            f"skip connection {skip.name}: layer {skip.source} to {skip.target}, "
            f"{format_bytes(skip.bytes)}"
        )
