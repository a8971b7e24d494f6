"""What processes compare in words, before they run a program: see `_agreed`."""

from collections.abc import Sequence
from typing import Any

from .._functions._batch import Batch
from .._layers._stage import shapes
from ._pipe import Pipe

PyTree = Any


def of_layers(pipe: Pipe, params: Sequence[PyTree]) -> dict[str, str]:
    """What is trained of each layer."""
    if pipe.copies is None:
        return {}
    pairs = enumerate(zip(pipe.layers, params, strict=True))
    return {f"layer {i}": f"{layer.name} {shapes(own)}" for i, (layer, own) in pairs}


def of_stages(pipe: Pipe, specs: Sequence[PyTree]) -> dict[str, str]:
    """What each stage has."""
    if pipe.copies is None:
        return {}
    return {
        f"stage {s}": f"{stage}, {shapes(specs[s])}"
        for s, stage in enumerate(pipe.stages)
    }


def of_batch(batch: Batch) -> dict[str, str]:
    """A mini-batch."""
    return {"mini-batch": shapes(batch.args)}
