"""A task of images, and the pipeline of AmoebaNet-D that learns it.

A `Form` says the sizes. A `Learner` has the layers in four stages, the loss, the
optimizer and the batches: all that a training needs but the loop around it (`runs`).
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from images import Task, augment, normalize

import jpipe

# The model is the one of the benchmarks, which are beside this folder.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.models.amoebanet import amoebanetd

STAGES = 4
TEST_BATCH = 256  # images
PEAK_RATE = 3e-3
WEIGHT_DECAY = 1e-4
SMOOTHING = 0.1  # of labels
# The device that is planned for: operations and bytes of memory per second, bytes of
# memory, and bytes per second to another device.
DEVICE = {"measure": False, "peak_flops": 1e14, "memory_bandwidth": 1e12}
MEMORY = 16 * 2**30
BANDWIDTH = 5e10
PAPER_CLASSES = 1000


class Form(NamedTuple):
    """A model, its images, and how long it is trained.

    Attributes:
      num_layers: normal cells of AmoebaNet-D, L.
      num_filters: channels of a state in its first group, D.
      size: pixels of a side of an image.
      batch_size: images of a mini-batch.
      num_microbatches: parts of a mini-batch.
      source: the name of the first task.
      source_steps: mini-batches of the first task.
      targets: the names of the other tasks.
      target_steps: mini-batches of each target, fine-tuned and from scratch.
    """

    num_layers: int
    num_filters: int
    size: int
    batch_size: int
    num_microbatches: int
    source: str = ""
    source_steps: int = 0
    targets: tuple[str, ...] = ()
    target_steps: int = 0

    def __str__(self) -> str:
        """The model."""
        return f"AmoebaNet-D ({self.num_layers}, {self.num_filters})"


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, with labels that are smoothed a little."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


class Learner:
    """A task, and the pipeline that learns it.

    Attributes:
      task: the images.
      form: the model and the batches.
      num_steps: mini-batches of a training.
      pipe: the model in four stages, or in one.
      tx: the optimizer.
      train_step: ``(state, x, labels) -> (state, metrics)``.
    """

    def __init__(
        self, task: Task, form: Form, num_steps: int, *, is_pipelined: bool = True
    ) -> None:
        layers = amoebanetd(
            task.num_classes, num_layers=form.num_layers, num_filters=form.num_filters
        )
        if is_pipelined:
            self.pipe = jpipe.pipeline(
                layers,
                num_microbatches=form.num_microbatches,
                balance=jpipe.partition([1] * len(layers), STAGES),
                devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share
            )
        else:
            self.pipe = jpipe.sequential(layers, form.num_microbatches)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, PEAK_RATE, warmup_steps=num_steps // 10, decay_steps=num_steps
        )
        self.tx = optax.adamw(rate, weight_decay=WEIGHT_DECAY)
        self.train_step = self.pipe.train_step(loss_fn, self.tx)
        self.task = task
        self.form = form
        self.num_steps = num_steps

    @property
    def recipe(self) -> str:
        """What a training is of, for `Runs`: another is not taken for it."""
        batches = f"{self.num_steps} steps of {self.form.batch_size}"
        return f"{self.form}, {batches}, images {self.task.checksum():08x}"

    def init(self, seed: int, variables: Any = None) -> jpipe.TrainState:
        """The state before the first step, of new layers or of these variables."""
        shape = (self.form.batch_size, self.form.size, self.form.size, 3)
        return self.pipe.init_train_state(
            jax.random.key(seed),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            self.tx,
            variables=variables,
        )

    def step(
        self, state: jpipe.TrainState, seed: int, position: int
    ) -> tuple[jpipe.TrainState, dict[str, jax.Array]]:
        """Trains on a batch, which follows from the seed and the steps before it."""
        num_images = len(self.task.x)
        rng = np.random.default_rng([seed, position])
        batch_size = self.form.batch_size
        rows = rng.choice(num_images, batch_size, replace=num_images < batch_size)
        key = jax.random.fold_in(jax.random.key(seed), position)
        x = augment(key, self.task.x[rows])
        return self.train_step(state, x, self.task.labels[rows])

    def test(self, state: jpipe.TrainState) -> float:
        """The share of the images held back to which it gives the right class."""
        num_images = len(self.task.x_test)
        num_right = 0
        for start in range(0, num_images, TEST_BATCH):
            count = min(TEST_BATCH, num_images - start)
            # The last batch is filled up with images that do not count.
            rows = np.resize(np.arange(start, start + count), TEST_BATCH)
            logits = self.pipe.apply(state.variables, normalize(self.task.x_test[rows]))
            is_right = np.argmax(logits, axis=-1) == self.task.labels_test[rows]
            num_right += int(is_right[:count].sum())
        return num_right / num_images


def print_plan(form: Form) -> None:
    """Prints where a model is cut in four, and what each device holds; runs nothing."""
    layers = amoebanetd(
        PAPER_CLASSES, num_layers=form.num_layers, num_filters=form.num_filters
    )
    shape = (form.batch_size, form.size, form.size, 3)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    job: dict[str, Any] = {
        "loss_fn": loss_fn,
        "targets": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
        "num_microbatches": form.num_microbatches,
    }
    profile = jpipe.profile(layers, images, **DEVICE, **job)
    plan = jpipe.plan(
        layers,
        images,
        optax.rmsprop(0.01, momentum=0.9),
        profile=profile,
        num_devices=STAGES,
        memory_limit=MEMORY,
        bandwidth=BANDWIDTH,
        schedules="gpipe",
        remat="full",
        **job,
    )
    num_params = sum(layer.num_params for layer in profile.layers)
    print(f"{form}, {num_params:,} params")
    print(plan)
