"""Training one experiment from several seeds, and the error of what was trained."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

import jpipe

from ..result import MEASURED, Cell
from .recipe import Recipe, cross_entropy

Batch = tuple[np.ndarray, np.ndarray]
Report = Callable[[int, int, list[float]], None]

# Goyal et al. report the median error of the last five epochs: what the last epoch
# alone happened to give says less.
LAST_EPOCHS = 5


class Data(Protocol):
    """Images with labels; `ImageFolder` and `Digits` are such."""

    shape: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        ...

    @property
    def num_training(self) -> int:
        """How many images there are to train on."""
        ...

    def training(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, all of the same size."""
        ...

    def test(self, batch: int) -> Iterator[Batch]:
        """The images to test on; the last batch may be smaller."""
        ...


@dataclass(frozen=True)
class Experiment:
    """One line of the table.

    Attributes:
      batch: images in a mini-batch.
      chunks: micro-batches in a mini-batch.
      balance: layers per stage.
    """

    batch: int
    chunks: int
    balance: tuple[int, ...]

    def pipeline(self, layers: Sequence[Any]) -> jpipe.Pipeline:
        """The layers as this experiment runs them; one stage keeps everything."""
        if len(self.balance) == 1:
            return jpipe.sequential(layers, self.chunks)
        return jpipe.pipeline(layers, self.chunks, balance=self.balance)


@dataclass(frozen=True)
class Outcome:
    """One training.

    Attributes:
      errors: of the test images, in percent, after each epoch.
      throughput: samples trained on per second, reading them included; mean over the
        epochs but the first, in which programs are compiled.
    """

    errors: list[float]
    throughput: float

    @property
    def error(self) -> float:
        """The median of the last epochs."""
        return statistics.median(self.errors[-LAST_EPOCHS:])


class Training:
    """An experiment, compiled once and trained from as many seeds as wanted.

    Args:
      experiment: what to train.
      layers: the model.
      data: the images.
      recipe: how to train.

    Raises:
      ValueError: if there are fewer images than a batch has, or too few devices.
    """

    def __init__(
        self, experiment: Experiment, layers: Sequence[Any], data: Data, recipe: Recipe
    ) -> None:
        self.experiment, self.data, self.recipe = experiment, data, recipe
        self.steps_per_epoch = data.num_training // experiment.batch
        if not self.steps_per_epoch:
            raise ValueError(
                f"a batch has {experiment.batch} images, there are {data.num_training} "
                f"to train on; choose an experiment with smaller batches or give more"
            )
        self.pipe = experiment.pipeline(layers)
        self._tx = recipe.optimizer(experiment.batch, self.steps_per_epoch)
        self._step = self.pipe.train_step(cross_entropy, self._tx)

    def initial(self, seed: int) -> jpipe.TrainState:
        """The state at step 0. One seed gives all experiments the same weights."""
        # Of one image: weights do not depend on the batch, but the programs that make
        # them would be compiled for each.
        x = jax.ShapeDtypeStruct((1, *self.data.shape), np.float32)
        return self.pipe.init_train_state(jax.random.key(seed), x, self._tx)

    def steps(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch. One seed gives the same to all of that size."""
        return self.data.training(self.experiment.batch, seed, epoch)

    def epoch(
        self, state: jpipe.TrainState, batches: Iterable[Batch]
    ) -> jpipe.TrainState:
        """Takes a step per batch; returns when the last is done."""
        before = None
        for x, labels in batches:
            state, metrics = self._step(state, x, labels)
            # Steps return when they are dispatched: without a limit all batches of
            # the epoch would lie on the device.
            if before is not None:
                before.block_until_ready()
            before = metrics["loss"]
        return jax.block_until_ready(state)

    def error(self, state: jpipe.TrainState) -> float:
        """Test images of which another class is the likeliest, in percent."""
        wrong = total = 0
        for x, labels in self.data.test(self.experiment.batch):
            # A smaller batch would be another program: the last one is filled up.
            missing = self.experiment.batch - len(x)
            x = np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
            guesses = np.argmax(self.pipe.apply(state.variables, x), axis=-1)
            wrong += int(np.sum(guesses[: len(labels)] != labels))
            total += len(labels)
        return 100 * wrong / total

    def run(self, seed: int, report: Report) -> Outcome:
        """Trains from one seed.

        Args:
          seed: of weights, order and augmentation.
          report: called after each epoch with the seed, the number of epochs done and
            the errors so far.

        Returns:
          The errors and the speed.
        """
        state, errors, seconds = self.initial(seed), [], []
        for epoch in range(self.recipe.epochs):
            start = time.perf_counter()
            state = self.epoch(state, self.steps(seed, epoch))
            seconds.append(time.perf_counter() - start)
            errors.append(self.error(state))
            report(seed, epoch + 1, errors)
        images = self.steps_per_epoch * self.experiment.batch
        return Outcome(errors, images / statistics.mean(seconds[1:] or seconds))


def cells(training: Training, outcomes: Sequence[Outcome]) -> dict[str, Cell]:
    """What the table says of an experiment.

    Args:
      training: the experiment.
      outcomes: one per seed, from 0.

    Returns:
      The cells ``"error"`` and ``"throughput"``.
    """
    experiment, recipe = training.experiment, training.recipe
    detail = {
        "batch": experiment.batch,
        "microbatches": experiment.chunks,
        "balance": list(experiment.balance),
        "epochs": recipe.epochs,
        "learning rate": recipe.peak(experiment.batch),
        "steps per epoch": training.steps_per_epoch,
    }
    errors = [outcome.error for outcome in outcomes]
    speeds = [outcome.throughput for outcome in outcomes]
    last = min(LAST_EPOCHS, recipe.epochs)
    return {
        "error": _cell(
            errors,
            "%",
            detail
            | {
                "statistic": f"median of the last {last} epochs",
                "by epoch": [outcome.errors for outcome in outcomes],
            },
        ),
        "throughput": _cell(
            speeds, "samples/s", detail | {"statistic": "mean of epochs but the first"}
        ),
    }


def _cell(values: Sequence[float], unit: str, detail: dict[str, Any]) -> Cell:
    """The mean over seeds, and their standard deviation if there are several."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    by_seed = {"by seed": list(values)}
    return Cell(statistics.mean(values), MEASURED, unit, spread, detail | by_seed)
