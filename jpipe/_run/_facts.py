"""What processes compare in words, before they run a program: see `_agreed`."""

from collections.abc import Sequence
from typing import Any

from .._functions._batch import Batch
from .._functions._weights import Weights
from .._layers._stage import shapes
from ._pipe import Pipe

PyTree = Any


def of_stages(pipe: Pipe, weights: Sequence[Weights]) -> dict[str, str]:
    """What each stage has."""
    if pipe.copies is None:
        return {}
    return {
        f"stage {s}": f"{stage}, {shapes(weights[s].specs)}"
        for s, stage in enumerate(pipe.stages)
    }


def of_batch(batch: Batch) -> dict[str, str]:
    """A mini-batch."""
    return {"input": shapes(batch.x), "targets": shapes(batch.targets)}
