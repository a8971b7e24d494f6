"""How rows of a table are run: the options, and the devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..provenance import cores
from ..result import Cell

# The name of a row, and what fills its cells.
Jobs = Iterator[tuple[str, Callable[[], dict[str, Cell]]]]


@dataclass(frozen=True)
class Options:
    """How to run, as it was typed.

    Attributes:
      scale: one of `SCALES`.
      steps: how many are timed at most.
      folder: where the results are kept.
      measured: whether all rows run on the devices that there are, and nothing else.
      dtype: of the arithmetic and of images, where it is measured: one of `DTYPES`.
      schedule: of all measured rows but the plain step; empty: GPipe's, as published.
      remat: of all measured rows but the plain step; empty: as published.
      predict: whether measured rows are predicted too, those of more stages than
        devices alone.
      bandwidth: of predicted transfers, in gigabytes per second.
      examples: the largest micro-batch that is timed for a prediction; 0: no limit.
      data: an ImageNet folder.
      seeds: of accuracy.
    """

    scale: str
    steps: int
    folder: Path
    measured: bool = False
    dtype: str = "float32"
    schedule: str = ""
    remat: str = ""
    predict: bool = False
    bandwidth: float = 12.0
    examples: int = 0
    data: Path | None = None
    seeds: int = 5

    @property
    def variant(self) -> str:
        """The options that the result's file is named by."""
        if not self.measured:
            return ""
        dtype = "" if self.dtype == "float32" else self.dtype
        predict = "predict" if self.predict else ""
        words = ("measured", dtype, self.schedule, self.remat, predict)
        return "-".join(filter(None, words))

    @property
    def described(self) -> dict[str, Any]:
        """What a result tells of them: nothing of this machine's folders."""
        return {
            "steps": self.steps,
            "bandwidth": self.bandwidth,
            "examples": self.examples,
            "seeds": self.seeds,
        }


def devices_for(scale: str) -> list[Any]:
    """The devices that are really there: accelerators, or as many as there are cores.

    At full scale a CPU is too slow to train these models: there are none.
    """
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return devices
    return [] if scale == "full" else devices[: cores()]
