"""A profile as a table."""

from collections.abc import Iterator
from typing import Any

from ..schedules._units import columns, duration, size

_TIMES = ("forward", "backward", "input_grad", "weight_grad")


def table(profile: Any) -> str:
    """The text of a profile: what it was made on, a line for each layer, and sums."""
    modes = list(dict.fromkeys(m for layer in profile.layers for m in layer.kept_bytes))
    kept = [f"kept by {mode}" for mode in modes]
    header = ["", "layer", "forward", "backward", "I", "W", "parameters", "output"]
    rows = [[*header, *kept, "workspace"]]
    for i, layer in enumerate(profile.layers):
        sizes = [layer.kept_bytes.get(mode) for mode in modes]
        row = [
            str(i),
            layer.name,
            *(_told(getattr(layer, name), duration) for name in _TIMES),
            f"{layer.num_params:,}",
            size(layer.output_bytes),
            *(_told(each, size) for each in sizes),
            _told(layer.workspace_bytes, size),
        ]
        rows.append(row)
    rows.append(_sums(profile.layers, modes))
    if all(layer.workspace_bytes is None for layer in profile.layers):
        rows = [row[:-1] for row in rows]
    return "\n".join([_origin(profile), *_beside(profile), columns(rows, left={1})])


def _told(number: Any, how: Any) -> str:
    return "" if number is None else how(number)


def _sums(layers: Any, modes: list[str]) -> list[str]:
    """The sums of what adds up; empty where a number is not known."""

    def total(numbers: list[Any], how: Any) -> str:
        return "" if None in numbers else how(sum(numbers))

    return [
        "",
        "sum",
        *(total([getattr(x, name) for x in layers], duration) for name in _TIMES),
        f"{sum(layer.num_params for layer in layers):,}",
        "",
        *(total([x.kept_bytes.get(mode) for x in layers], size) for mode in modes),
        "",
    ]


def _origin(profile: Any) -> str:
    """What the profile was made on."""
    made, count = profile.made, profile.microbatch_size
    examples = f"a micro-batch of {count} example{'s' * (count != 1)}"
    given = f" ({made['input']})" if "input" in made else ""
    if made.get("how") == "estimated":
        rates = (
            f"{made['flops per second']} flops and {made['bytes per second']} bytes "
            f"per second"
        )
        how = f"estimated at {rates} for "
    elif "device" in made:
        how = f"measured on {made['device']} with "
    else:
        how = ""
    versions = [f"{name} {made[name]}" for name in ("jax", "flax") if name in made]
    return "".join([how, examples, given, *(f", {each}" for each in versions)])


def _beside(profile: Any) -> Iterator[str]:
    """What layers share, and what goes from one to a later one."""
    for group in profile.ties:
        first, *others = map(str, group)
        yield f"tied: parameters of layer {first} are used by {', '.join(others)}"
    for skip in profile.skips:
        yield (
            f"skip connection {skip.name}: layer {skip.source} to {skip.target}, "
            f"{size(skip.bytes)}"
        )
