"""Training runs by name: each is done once, goes on where it was stopped, is recorded.

A record is JSON: the losses, the test accuracies by step, the seconds of processor
time. Beside it is a checkpoint where a run was stopped, or where another run shall
begin with its layers.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from resume import STOPPED_EARLY
from rich.progress import Progress

import jpipe

TESTS = 4  # during a run, evenly


class Learner(Protocol):
    """What `Runs.fit` trains; `transfer.Learner` is one."""

    num_steps: int

    def init(self, seed: int, variables: Any = None) -> jpipe.TrainState:
        """The state before the first step, from new layers or from these."""
        ...

    def step(
        self, state: jpipe.TrainState, seed: int, position: int
    ) -> tuple[jpipe.TrainState, dict[str, jax.Array]]:
        """Trains on the batch of this position; returns the state and metrics."""
        ...

    def test(self, state: jpipe.TrainState) -> float:
        """The accuracy on images held back."""
        ...


class Runs:
    """Trains by name, each run once; what it has done is in a folder."""

    def __init__(self, folder: Path, stops: Callable[[int], bool], bar: Progress):
        self.folder = folder
        self.stops = stops
        self.bar = bar
        self.steps = 0  # of this process

    def fit(
        self, learner: Learner, name: str, seed: int, body: str = "", keep: str = ""
    ) -> dict[str, Any]:
        """The record of a run: losses, test accuracies by step, seconds.

        Args:
          learner: of the task.
          name: of the run, and of its files.
          seed: of the new layers, and of the batches.
          body: the checkpoint of all layers but the last that it begins with, if any.
          keep: such a checkpoint, which it writes at the end.

        Raises:
          SystemExit: after Ctrl-C, when a checkpoint has been written.
        """
        path = self.folder / f"{name}.json"
        record: dict[str, Any] = {"losses": [], "tests": {}, "seconds": 0.0}
        if path.exists():
            record = json.loads(path.read_text("utf-8"))
        if len(record["losses"]) == learner.num_steps:
            return record

        began = time.process_time()
        state = learner.init(seed)
        checkpoint = self.folder / f"{name}.state"
        if record["losses"]:
            state = jpipe.checkpoint.restore(checkpoint, state)
        elif body:
            *layers, last = state.variables
            layers = jpipe.checkpoint.restore(self.folder / body, layers)
            state = learner.init(seed, variables=[*layers, last])
        bar = self.bar.add_task(name, total=learner.num_steps)
        losses = list(
            record["losses"]
        )  # a new one is an array, which may be on its way
        is_stopped = False
        while len(losses) < learner.num_steps and not is_stopped:
            state, metrics = learner.step(state, seed, position=len(losses))
            losses.append(metrics["loss"])
            jax.block_until_ready(losses[-2:][0])  # the bar shows what is done
            self.bar.update(bar, completed=len(losses))
            if len(losses) * TESTS % learner.num_steps < TESTS:
                record["tests"][len(losses)] = learner.test(state)
            self.steps += 1
            is_stopped = self.stops(self.steps)

        if len(losses) < learner.num_steps:
            jpipe.checkpoint.save(checkpoint, state, overwrite=True)
        elif keep:
            layers = list(state.variables[:-1])
            jpipe.checkpoint.save(self.folder / keep, layers, overwrite=True)
        record["losses"] = [float(loss) for loss in losses]
        record["seconds"] += time.process_time() - began
        path.write_text(json.dumps(record), "utf-8")
        self.bar.remove_task(bar)
        tested = "".join(f", accuracy {test:.1%}" for test in record["tests"].values())
        shown = f"{name}: {len(losses)} steps, loss {losses[-1]:.6f}{tested}"
        self.bar.console.print(shown, soft_wrap=True)
        if is_stopped:
            raise SystemExit(STOPPED_EARLY)
        return record
