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
from ._origin import format_origin, is_measured_on_cpu

# Field of a layer -> the head of its column, where that is another.
_COLUMN_NAMES = {"input_grad": "I", "weight_grad": "W"}
# Columns whose numbers have no sum.
_WITHOUT_SUM = ("output", "workspace")


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
    lines = [*_describe(profile), *_connections(profile)]
    return "\n".join([*lines, format_table(rows, left={1})])


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


def _describe(profile: Any) -> Iterator[str]:
    """Lines on how and where the profile was made, and the micro-batch."""
    if origin := format_origin(profile.origin):
        yield origin
    fingerprint = profile.fingerprint
    examples = f"a micro-batch of {format_count(profile.microbatch_size, 'example')}"
    if "input" in fingerprint:
        examples += f" ({fingerprint['input']})"
    if profile.larger is not None:
        sizes = " and ".join(map(str, profile.larger.sizes))
        examples += f"; the costs of {sizes} examples are stored too"
    yield examples
    if is_measured_on_cpu(profile.origin):
        yield (
            "cores: each layer had all of them to itself; devices that share them take "
            "longer than predicted, with halves of backwards above all"
        )
    if profile.link is not None:
        link = profile.link
        yield (
            f"transfers: {format_seconds(link.latency)} for each and "
            f"{format_bytes(int(link.bandwidth))} per second, as measured from "
            f"{link.source} to {link.target}"
        )


def _connections(profile: Any) -> Iterator[str]:
    """A line for each group of tied layers and for each skip connection."""
    for group in profile.ties:
        owner, *readers = map(str, group)
        yield f"tied: parameters of layer {owner} are used by {', '.join(readers)}"
    for skip in profile.skips:
        yield (
            f"skip connection {skip.name}: layer {skip.source} to {skip.target}, "
            f"{format_bytes(skip.bytes)}"
        )
