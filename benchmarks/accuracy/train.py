"""Training one experiment from several seeds, and the error of what was trained."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import jpipe

from ..result import MEASURED, Cell
from .recipe import Recipe, cross_entropy

Batch = tuple[np.ndarray, np.ndarray]

# Goyal et al. report the median error of the last five epochs: what the last epoch
# alone happened to give says less.
LAST_EPOCHS = 5
# Those after which parameters are compared are few, since differences grow.
STEPS = 10


class Data(Protocol):
    """Images with labels; `ImageFolder` and `Digits` are such."""

    shape: tuple[int, ...]
    num_classes: int
    num_training: int

    def training(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, all of the same size."""
        ...

    def test(self, batch: int) -> Iterator[Batch]:
        """The images to test on; the last batch may be smaller."""
        ...


class Experiment(NamedTuple):
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

    def run(self, seed: int, name: str) -> tuple[list[float], float]:
        """Trains from one seed, and tells the error of each epoch.

        Args:
          seed: of weights, order and augmentation.
          name: of the experiment, for the reader.

        Returns:
          The errors of the test images after each epoch, in percent; and samples
          trained on per second, reading them included, the mean over the epochs but
          the first, in which programs are compiled.
        """
        state = self.initial(seed)
        errors: list[float] = []
        seconds: list[float] = []
        for epoch in range(self.recipe.epochs):
            start = time.perf_counter()
            state = self.epoch(state, self.steps(seed, epoch))
            seconds.append(time.perf_counter() - start)
            errors.append(self.error(state))
            told = f"{name}, seed {seed}, epoch {epoch + 1}: error {errors[-1]:.2f} %"
            print(f"  {told}", flush=True)
        images = self.steps_per_epoch * self.experiment.batch
        return errors, images / statistics.mean(seconds[1:] or seconds)


def cells(training: Training, name: str, seeds: int) -> dict[str, Cell]:
    """Trains an experiment from all seeds.

    Args:
      training: the experiment.
      name: of it.
      seeds: how many.

    Returns:
      The cells ``"error"``, of the median of the last epochs, and ``"throughput"``.
    """
    experiment = training.experiment
    recipe = training.recipe
    outcomes = [training.run(seed, name) for seed in range(seeds)]
    detail = {
        "batch": experiment.batch,
        "microbatches": experiment.chunks,
        "balance": list(experiment.balance),
        "epochs": recipe.epochs,
        "learning rate": recipe.peak(experiment.batch),
        "steps per epoch": training.steps_per_epoch,
    }
    of_errors = {
        "statistic": f"median of the last {min(LAST_EPOCHS, recipe.epochs)} epochs",
        "by epoch": [errors for errors, _ in outcomes],
    }
    of_speeds = {"statistic": "mean of epochs but the first"}
    errors = [statistics.median(errors[-LAST_EPOCHS:]) for errors, _ in outcomes]
    speeds = [speed for _, speed in outcomes]
    return {
        "error": _cell(errors, "%", detail | of_errors),
        "throughput": _cell(speeds, "samples/s", detail | of_speeds),
    }


def _cell(values: list[float], unit: str, detail: dict[str, Any]) -> Cell:
    """The mean over seeds, and their standard deviation if there are several."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    by_seed = {"by seed": values}
    return Cell(statistics.mean(values), MEASURED, unit, spread, detail | by_seed)


def apart(many: Training, one: Training, steps: int = STEPS) -> Cell:
    """How far two trainings from the same seed are from each other after some steps.

    Args:
      many: the one in stages.
      one: the one on one device, with as many micro-batches.
      steps: how many.

    Returns:
      The largest difference of a parameter, as a part of the largest number in its
      array.
    """
    trainings = (many, one)
    states = [training.initial(0) for training in trainings]
    by_step = []
    for batch in islice(many.steps(0, 0), steps):
        states = [
            training.epoch(state, [batch])
            for training, state in zip(trainings, states, strict=True)
        ]
        params = [jax.tree.leaves(jax.device_get(state.params)) for state in states]
        pairs = zip(*params, strict=True)
        by_step.append(
            max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        )
    detail = {
        "steps": len(by_step),
        "by step": by_step,
        "batch": many.experiment.batch,
        "microbatches": many.experiment.chunks,
        "statistic": "largest difference of a parameter by the largest of its array",
    }
    return Cell(by_step[-1], MEASURED, "", None, detail)
