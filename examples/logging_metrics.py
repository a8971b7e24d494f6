"""Logs the metrics of each step without stalling the pipeline.

A step returns as soon as its work is dispatched: while devices run it, Python prepares
the next batch and dispatches the next step. `float(loss)` in each step ends that. It
waits until all devices are done, and they wait until the next step is dispatched. So a
metric stays an array on its device, its copy to the host is started, and it is read
some steps later, when it is there. The program times both ways, with batches that take
20 ms to read; what is gained is at most that time and Python's own.

It writes `build/logs/metrics.csv`, and events for TensorBoard if tensorboardX is
installed (`pip install tensorboardX`; `tensorboard --logdir build/logs`).

    python examples/logging_metrics.py
"""

import argparse
import csv
import importlib.util
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from digits import convolutional_network, cross_entropy, read_digits

import jpipe

FOLDER = Path("build/logs")
BATCH_SIZE, READ_SECONDS = 64, 0.02


class MetricsLog:
    """Writes scalars to a CSV file, and to TensorBoard if tensorboardX is there.

    Args:
      folder: the folder of the files.
      delay: the number of steps after which the metrics of a step are read.
    """

    def __init__(self, folder: Path, delay: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._delay = delay
        self._unread: deque[tuple[int, Mapping[str, jax.Array]]] = deque()
        self._file = (folder / "metrics.csv").open("w", newline="")
        self._csv = csv.writer(self._file)
        self._events: Any = None
        if importlib.util.find_spec("tensorboardX"):
            import tensorboardX  # pyright: ignore[reportMissingImports]

            self._events = tensorboardX.SummaryWriter(str(folder))

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step, and writes those that are old enough."""
        for metric in metrics.values():
            metric.copy_to_host_async()
        self._unread.append((step, metrics))
        while len(self._unread) > self._delay:
            self._write_oldest()

    def close(self) -> None:
        """Writes all that is left."""
        while self._unread:
            self._write_oldest()
        self._file.close()
        if self._events:
            self._events.close()

    def _write_oldest(self) -> None:
        step, metrics = self._unread.popleft()
        numbers = {name: float(metric) for name, metric in metrics.items()}
        if step == 0:
            self._csv.writerow(["step", *numbers])
        self._csv.writerow([step, *numbers.values()])
        for name, number in numbers.items():
            if self._events:
                self._events.add_scalar(name, number, step)


def main() -> None:
    """Trains twice, and prints how long a step takes with each way to log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 4)
    devices = (4 * jax.devices())[:4]  # with fewer, stages share them
    layers = convolutional_network()
    pipe = jpipe.pipeline(layers, 8, balance=[2, 3, 2, 2], devices=devices)
    x, _, labels, _ = read_digits()
    tx = optax.adamw(1e-3)
    step = pipe.train_step(cross_entropy, tx)
    # The parameters are on four devices: `pipe.jit` sends one scalar of each.
    norm = pipe.jit(optax.tree.norm)

    for name, delay in [("at once", 0), ("four steps later", 4)]:
        rng = np.random.default_rng(0)
        state = pipe.init_train_state(jax.random.key(0), x[:BATCH_SIZE], tx)
        log = MetricsLog(FOLDER, delay)
        begin = time.perf_counter()
        for number in range(steps):
            rows = rng.integers(len(x), size=BATCH_SIZE)
            time.sleep(READ_SECONDS)  # as if the batch came from a disk
            state, metrics = step(state, x[rows], labels[rows])
            log.add(number, {**metrics, "parameter norm": norm(state.params)})
            if number == 0:  # it compiled
                jax.block_until_ready(state)
                begin = time.perf_counter()
        log.close()
        milliseconds = (time.perf_counter() - begin) / max(steps - 1, 1) * 1e3
        print(f"metrics read {name}: {milliseconds:.1f} ms a step", flush=True)
    print(f"wrote {FOLDER / 'metrics.csv'}, {steps} rows")


if __name__ == "__main__":
    main()
