"""A profile: what each layer takes and stores of one micro-batch."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..schedules._units import duration, many, size
from . import _palette as palette
from ._bars import Bar, Bars, Part, Row

# What stores little, and what more is stored where nothing is computed again.
_KEPT = {"min_cut": "#e69f00", "none": "#f6dca6"}


def profiled(profile: Any) -> Bars:
    """For each layer its times and the bytes of its residuals of a micro-batch.

    Args:
      profile: from `jpipe.profile`, or read from a file.

    Raises:
      ValueError: if it has no layers.
    """
    layers, examples = profile.layers, profile.microbatch_size
    if not layers:
        raise ValueError("a profile without layers: draw what jpipe.profile returns")
    total = duration(sum(layer.forward + layer.backward for layer in layers))
    made = profile.made
    how = f", {made['how']}" if "how" in made else ""
    how += f" on {made['device']}" if "device" in made else ""
    return Bars(
        title=f"{many(len(layers), 'layer')}, a micro-batch of "
        f"{many(examples, 'example')}: {total}{how}",
        heads=("forward and backward", "kept between them"),
        rows=tuple(_row(i, layer) for i, layer in enumerate(layers)),
        legend={palette.NAMES[op]: palette.OPS[op] for op in "FB"}
        | {f"kept by {mode}": fill for mode, fill in _KEPT.items()},
    )


def _row(number: int, layer: Any) -> Row:
    times = {"F": layer.forward, "B": layer.backward}
    stored = [
        (mode, layer.kept_bytes[mode]) for mode in _KEPT if mode in layer.kept_bytes
    ]
    parts = [
        Part(time, palette.OPS[op], f"{palette.NAMES[op]}: {duration(time)}")
        for op, time in times.items()
    ]
    sizes = " to ".join(dict.fromkeys(size(held) for _, held in stored))
    bars = (
        Bar(tuple(parts), duration(sum(times.values()))),
        Bar(tuple(_above(stored)), sizes),
    )
    return Row(f"{number} {layer.name}", bars)


def _above(stored: Sequence[tuple[str, int]]) -> Iterator[Part]:
    """Each mode from where the one before it ends: what it stores more."""
    before = 0
    for mode, held in stored:
        yield Part(max(held - before, 0), _KEPT[mode], f"by {mode}: {size(held)}")
        before = held
