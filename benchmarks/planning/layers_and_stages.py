"""What layers that are measured alone say of stages: seconds, and bytes of workspace.

The planner adds up the seconds of layers and takes the workspace of the largest. Here
the same layers run in stages, all on one device of one core, where nothing is sent:

    python -m benchmarks.planning.layers_and_stages
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax

import jpipe

from ..markdown import table
from ..peers.measure import pin
from .models import MODELS
from .ways import MICROBATCHES, square

MODEL = "equal blocks"
NUM_STAGES = (1, 2, 4)
REMATS = ("none", "min_cut", "full")


class OnOneDevice:
    """A training step of equal numbers of layers, with all stages on one device.

    Args:
      layers: the model.
      x: the mini-batch.
      num_stages: the number of stages.
      remat: the remat mode of all stages.
    """

    def __init__(
        self, layers: Sequence[Any], x: jax.Array, num_stages: int, remat: str
    ) -> None:
        tx = optax.sgd(1e-3)
        self._pipe = jpipe.pipeline(
            layers,
            MICROBATCHES,
            balance=[len(layers) // num_stages] * num_stages,
            devices=[jax.devices()[0]] * num_stages,
            remat=remat,
        )
        self._x = x
        self._state = self._pipe.init_train_state(jax.random.key(0), x, tx)
        self._step = self._pipe.train_step(square, tx)

    def backward_workspace(self) -> int:
        """The bytes that the backward of the first stage needs while it runs."""
        report = self._step.compile(self._state, self._x, ())
        (num_bytes,) = [
            program.workspace_bytes
            for program in report.programs
            if program.name == "stage0_backward_add_grads"
        ]
        assert num_bytes is not None, "XLA tells it of programs for CPUs"
        return num_bytes

    def median_seconds(self, num_steps: int) -> float:
        """The seconds of a micro-batch."""
        seconds = []
        for _ in range(num_steps + 2):  # the first two compile and allocate
            start = time.perf_counter()
            self._state, metrics = self._step(self._state, self._x, ())
            jax.block_until_ready((self._state, metrics))
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[2:]) / MICROBATCHES


def main() -> None:
    """Prints a table of seconds and one of bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    pin([0])
    layers, x = MODELS[MODEL]()
    profile = jpipe.profile(layers, x, num_microbatches=MICROBATCHES, loss_fn=square)

    alone = sum(layer.forward + layer.backward for layer in profile.layers)
    rows = [["layers alone, added up", f"{1000 * alone:.1f}"]]
    for num_stages in NUM_STAGES:
        run = OnOneDevice(layers, x, num_stages, "min_cut")
        seconds = run.median_seconds(options.steps)
        rows.append([f"stages: {num_stages}", f"{1000 * seconds:.1f}"])
    print(table([f"{MODEL}, a micro-batch", "ms"], rows))

    largest = max(layer.workspace_bytes or 0 for layer in profile.layers)
    rows = [["the largest layer alone", f"{largest / 2**20:.1f}"]]
    for remat in REMATS:
        num_bytes = OnOneDevice(layers, x, 2, remat).backward_workspace()
        rows.append([f"half of the layers, `{remat}`", f"{num_bytes / 2**20:.1f}"])
    print(f"\n{table(['workspace of a backward', 'MiB'], rows)}")


if __name__ == "__main__":
    main()
