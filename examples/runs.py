"""Training runs by name: each is done once, goes on where it was stopped, is recorded.

A record is JSON: the recipe, the losses, the test accuracies by step, the seconds of
processor time. Beside it is a checkpoint where a run was stopped, or where another run
shall begin with its layers.
"""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from resume import STOPPED_EARLY
from rich.progress import Progress

import jpipe

NUM_TESTS = 4  # during a run, evenly


class Learner(Protocol):
    """What `Runs.fit` trains; `transfer.Learner` is one."""

    num_steps: int

    @property
    def recipe(self) -> str:
        """A text that differs for trainings that shall not be taken for each other."""
        ...

    def init(self, seed: int, variables: Any = None) -> jpipe.TrainState:
        """The state before the first step, of new layers or of these variables."""
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
    """Trains by name, each run once; its results are in a folder.

    Attributes:
      num_steps: the steps of all runs of this process.
    """

    def __init__(
        self, folder: Path, is_stopped: Callable[[int], bool], progress: Progress
    ) -> None:
        """Prepares to train.

        Args:
          folder: a folder for records and checkpoints.
          is_stopped: says after each step, by `num_steps`, whether to stop there.
          progress: the bars.
        """
        self.num_steps = 0
        self._folder = folder
        self._is_stopped = is_stopped
        self._progress = progress

    def fit(
        self,
        learner: Learner,
        name: str,
        *,
        seed: int,
        body: str = "",
        keep: str = "",
    ) -> dict[str, Any]:
        """The record of a run, which is trained unless it is finished.

        Args:
          learner: the learner of the task.
          name: the name of the run and of its files.
          seed: the seed of new layers and of the batches.
          body: the checkpoint of all layers but the last that it begins with, if any.
          keep: the checkpoint of such layers that it writes at the end, if any.

        Returns:
          The recipe, the losses, the test accuracies by step, and the seconds.

        Raises:
          SystemExit: after SIGTERM, when a checkpoint has been written.
          ValueError: if the folder has a run of this name and another recipe.
        """
        path = self._folder / f"{name}.json"
        record: dict[str, Any] = {
            "recipe": learner.recipe,
            "losses": [],
            "tests": {},
            "seconds": 0.0,
        }
        if path.exists():
            record = json.loads(path.read_text("utf-8"))
        if record["recipe"] != learner.recipe:
            raise ValueError(
                f"{path} is a run of {record['recipe']}, not of {learner.recipe}: "
                "remove the file, or name another folder with --folder"
            )
        losses = list(record["losses"])
        if len(losses) == learner.num_steps:
            return record

        began = time.process_time()
        state = learner.init(seed)
        resumed = self._checkpoint(name, len(losses))
        if losses:
            state = jpipe.checkpoint.restore(resumed, state)
        elif body:
            *layers, last = state.variables
            layers = jpipe.checkpoint.restore(self._folder / body, layers)
            state = learner.init(seed, variables=[*layers, last])

        bar = self._progress.add_task(name, total=learner.num_steps)
        parts = range(1, NUM_TESTS + 1)
        tested = {math.ceil(learner.num_steps * part / NUM_TESTS) for part in parts}
        is_stopped = False
        while len(losses) < learner.num_steps and not is_stopped:
            state, metrics = learner.step(state, seed, position=len(losses))
            losses.append(metrics["loss"])
            # One step is on its way while the host prepares the next.
            jax.block_until_ready(losses[-2:][0])
            self._progress.update(bar, completed=len(losses))
            if len(losses) in tested:
                record["tests"][str(len(losses))] = learner.test(state)
            self.num_steps += 1
            is_stopped = self._is_stopped(self.num_steps)

        if len(losses) < learner.num_steps:
            self._save(self._checkpoint(name, len(losses)), state)
        elif keep:
            self._save(self._folder / keep, list(state.variables[:-1]))
        record["losses"] = [float(loss) for loss in losses]
        record["seconds"] += time.process_time() - began
        path.write_text(json.dumps(record), "utf-8")
        shutil.rmtree(resumed, ignore_errors=True)  # the record is of a later step

        self._progress.remove_task(bar)
        tests = record["tests"].values()
        accuracies = "".join(f", accuracy {test:.1%}" for test in tests)
        shown = f"{name}: {len(losses)} steps, loss {losses[-1]:.6f}{accuracies}"
        self._progress.console.print(shown, soft_wrap=True)
        if is_stopped:
            raise SystemExit(STOPPED_EARLY)
        return record

    def _save(self, path: Path, tree: Any) -> None:
        """Saves a tree in place of that of a run whose record was not written."""
        shutil.rmtree(path, ignore_errors=True)
        jpipe.checkpoint.save(path, tree)

    def _checkpoint(self, name: str, num_steps: int) -> Path:
        """The checkpoint of a run that was stopped after so many steps."""
        return self._folder / f"{name}-step_{num_steps:06}"
