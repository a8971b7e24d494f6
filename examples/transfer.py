"""GPipe's image task at a small size: AmoebaNet-D, trained on letters, then fine-tuned.

Huang et al. (2019, Table 4) train AmoebaNet-B (18, 512) on ImageNet. Then they give it
a new last layer and fine-tune it onto seven other sets of images. Here AmoebaNet-D
(3, 16) learns the Latin letters, in four stages. Then it learns each other set twice,
in as many steps: fine-tuned, from the layers that know Latin, and from scratch.

    python examples/transfer.py                  # each target once
    python examples/transfer.py --table          # each target with five seeds
    python examples/transfer.py --tiny           # two small tasks, a few steps
    python examples/transfer.py --plan paper     # the model of the paper, not run
    python examples/transfer.py --data DIR       # a folder of images for each class

Ctrl-C and SIGTERM write a checkpoint and end with status 75. The same command goes on
from there, to the losses of one run. A training that is finished is not done again.
Checkpoints and results are in ``build/transfer``.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from images import Task, augment, normalize, read_folder, read_task
from resume import catch_signals
from rich.progress import Progress
from runs import Runs
from transfer_report import draw_samples, make_row, write_report

import jpipe

# The model is the one of the benchmarks, which are beside this folder.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.models.amoebanet import amoebanetd

STAGES = 4
TEST_BATCH = 256  # images
COMPARED_STEPS = 5
PEAK_RATE = 3e-3
WEIGHT_DECAY = 1e-4
SMOOTHING = 0.1  # of labels
TARGETS = ("scikit-learn digits", "MNIST", "Greek", "Cyrillic", "Hebrew", "Devanagari")
# Arm -> the checkpoint of the layers that it begins with; empty for new layers.
BODIES = {"tuned": "body", "scratch": ""}


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
    source: str = "Latin"
    source_steps: int = 0
    targets: tuple[str, ...] = TARGETS
    target_steps: int = 0

    def __str__(self) -> str:
        """The model."""
        return f"AmoebaNet-D ({self.num_layers}, {self.num_filters})"


FORMS = {
    "tiny": Form(
        num_layers=3,
        num_filters=8,
        size=32,
        batch_size=16,
        num_microbatches=4,
        source="scikit-learn digits",
        source_steps=4,
        targets=("Hebrew",),
        target_steps=4,
    ),
    "small": Form(
        num_layers=3,
        num_filters=16,
        size=32,
        batch_size=128,
        num_microbatches=4,
        source_steps=300,
        target_steps=40,
    ),
    # AmoebaNet-D, where Huang et al. have AmoebaNet-B.
    "paper": Form(
        num_layers=18, num_filters=512, size=480, batch_size=128, num_microbatches=32
    ),
}
# The device that is planned for: operations and bytes of memory per second, bytes of
# memory, and bytes per second to another device.
DEVICE = {"measure": False, "peak_flops": 1e14, "memory_bandwidth": 1e12}
MEMORY = 16 * 2**30
BANDWIDTH = 5e10
PAPER_CLASSES = 1000


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


def compare(learner: Learner, path: Path) -> dict[str, list[float]]:
    """The losses of the first steps in four stages and unpipelined, from one state.

    Args:
      learner: a pipelined learner.
      path: a file for the losses; if it is there, nothing is trained.
    """
    if path.exists():
        return json.loads(path.read_text("utf-8"))
    unpipelined = Learner(
        learner.task, learner.form, learner.num_steps, is_pipelined=False
    )
    losses: dict[str, list[float]] = {"pipelined": [], "unpipelined": []}
    for name, candidate in {"pipelined": learner, "unpipelined": unpipelined}.items():
        state = candidate.init(seed=0)
        for position in range(COMPARED_STEPS):
            state, metrics = candidate.step(state, seed=0, position=position)
            losses[name].append(float(metrics["loss"]))
    path.write_text(json.dumps(losses), "utf-8")
    return losses


def print_plan(form: Form) -> None:
    """Prints where a model is cut in four, and what each device holds; runs nothing."""
    layers = amoebanetd(
        PAPER_CLASSES, num_layers=form.num_layers, num_filters=form.num_filters
    )
    shape = (form.batch_size, form.size, form.size, 3)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    job: dict[str, Any] = {
        "loss": loss_fn,
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


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seeds", type=int, default=1, help="how often each target is learnt")
    add("--table", dest="seeds", action="store_const", const=5, help="five seeds")
    add("--tiny", action="store_true", help="two small tasks, a few steps")
    add("--plan", choices=[*FORMS], help="print the plan of a model, and run nothing")
    add("--folder", type=Path, default=Path("build/transfer"), help="of the results")
    add("--preempt-after", type=int, help="the step after which SIGTERM arrives")
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument("--targets", nargs="+", choices=TARGETS, help="default: all")
    targets.add_argument(
        "--data", type=Path, help="the target: one folder of images for each class"
    )
    return parser.parse_args()


def main() -> int:
    """Trains the first task, then all others in both ways; returns the exit status."""
    options = parse_options()
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    # Pipelines of two tasks differ in the last stage. All other programs are compiled
    # once, and the next start of this program reads all of them.
    jax.config.update("jax_compilation_cache_dir", "build/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if options.plan:
        print_plan(FORMS[options.plan])
        return 0

    form_name = "tiny" if options.tiny else "small"
    form = FORMS[form_name]
    folder = options.folder / form_name
    folder.mkdir(parents=True, exist_ok=True)
    source = read_task(form.source, form.size)
    if options.data:
        targets = [read_folder(options.data, form.size)]
    else:
        names = options.targets or form.targets
        targets = [read_task(name, form.size) for name in names]
    draw_samples([source, *targets], folder / "images.png")
    is_asked_to_stop = catch_signals()

    def is_stopped(step: int) -> bool:
        if step == options.preempt_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return is_asked_to_stop(step)

    with Progress() as progress:
        runs = Runs(folder, is_stopped, progress)
        source_learner = Learner(source, form, form.source_steps)
        record = runs.fit(source_learner, source.name, seed=0, keep=BODIES["tuned"])
        source_row = make_row(source, {"scratch": [record]})
        learners = [Learner(task, form, form.target_steps) for task in targets]
        rows = [make_row(task, {arm: [] for arm in BODIES}) for task in targets]
        for seed in range(1, options.seeds + 1):
            for learner, row in zip(learners, rows, strict=True):
                for arm, body in BODIES.items():
                    name = f"{row.name}-{arm}-{seed}"
                    record = runs.fit(learner, name, seed=seed, body=body)
                    row.records[arm].append(record)
        losses = compare(source_learner, folder / "compared.json")
    write_report(
        folder,
        rows=[source_row, *rows],
        losses=losses,
        command=shlex.join(["python", *sys.argv]),
        model=str(form),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
