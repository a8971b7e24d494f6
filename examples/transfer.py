"""GPipe's image task at a small size: AmoebaNet-D, trained on letters, then fine-tuned.

Huang et al. (2019, Table 4) train AmoebaNet-B (18, 512) on ImageNet, and fine-tune it
onto seven other sets of images, with a new last layer. Here AmoebaNet-D (3, 16) learns
the Latin letters, in four stages, and then other scripts and digits, five times each:
from the layers that it has, and from scratch, by the same steps otherwise.

    python examples/transfer.py                  # each target once
    python examples/transfer.py --table          # each target with five seeds
    python examples/transfer.py --tiny           # two targets, a few steps
    python examples/transfer.py --plan paper     # the model of the paper, not run
    python examples/transfer.py --data DIR       # a folder of images for each class

Ctrl-C writes a checkpoint. The same command goes on from it to the same losses, and
trains nothing anew that is finished. All results are in ``build/transfer``.
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

STAGES, TEST_BATCH, COMPARED = 4, 256, 5
PEAK_RATE, WEIGHT_DECAY, SMOOTHING = 3e-3, 1e-4, 0.1
SOURCE = "Latin"
TARGETS = ("scikit-learn digits", "MNIST", "Greek", "Cyrillic", "Hebrew", "Devanagari")


class Form(NamedTuple):
    """A model, its images, and how long it is trained.

    Attributes:
      num_layers: normal cells of AmoebaNet-D, L.
      num_filters: channels of a state in its first group, D.
      size: pixels of a side of an image.
      batch_size: images of a mini-batch.
      num_microbatches: parts of a mini-batch.
      source_steps: mini-batches of the first task.
      target_steps: mini-batches of each target, fine-tuned and from scratch.
      targets: the names of the other tasks.
    """

    num_layers: int
    num_filters: int
    size: int
    batch_size: int
    num_microbatches: int
    source_steps: int = 0
    target_steps: int = 0
    targets: tuple[str, ...] = TARGETS


FORMS = {
    "tiny": Form(3, 8, 32, 16, 4, 4, 4, ("scikit-learn digits", "Greek")),
    "small": Form(3, 16, 32, 128, 4, 300, 40),
    "paper": Form(18, 512, 480, 128, 32),  # of D, where Huang et al. have B
}
# Of a device that is planned for: operations and bytes of memory per second, bytes of
# memory, bytes per second to another device.
ACCELERATOR = {"measure": False, "peak_flops": 1e14, "memory_bandwidth": 1e12}
MEMORY, BANDWIDTH = 16 * 2**30, 5e10


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, with labels that are smoothed a little."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


class Learner:
    """A task, and the pipeline that learns it."""

    def __init__(self, task: Task, form: Form, num_steps: int, is_pipelined=True):
        layers = amoebanetd(task.num_classes, form.num_layers, form.num_filters)
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

    def init(self, seed: int, variables: Any = None) -> jpipe.TrainState:
        """The state before the first step, from new layers or from these."""
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
        """Trains on a batch, which follows from the seed and the number of the step."""
        number = len(self.task.x)
        rng = np.random.default_rng([seed, position])
        size = self.form.batch_size
        rows = rng.choice(number, size, replace=number < size)
        key = jax.random.fold_in(jax.random.key(seed), position)
        x = augment(key, self.task.x[rows])
        return self.train_step(state, x, self.task.labels[rows])

    def test(self, state: jpipe.TrainState) -> float:
        """The share of the images held back whose class is named."""
        number = len(self.task.x_test)
        right = 0
        for start in range(0, number, TEST_BATCH):
            count = min(TEST_BATCH, number - start)
            rows = np.resize(np.arange(start, start + count), TEST_BATCH)
            logits = self.pipe.apply(state.variables, normalize(self.task.x_test[rows]))
            hits = np.argmax(logits, axis=-1) == self.task.labels_test[rows]
            right += int(hits[:count].sum())
        return right / number


def compare(learner: Learner, path: Path) -> dict[str, list[float]]:
    """Losses of the first steps in four stages and unpipelined, from one state."""
    if path.exists():
        return json.loads(path.read_text("utf-8"))
    twin = Learner(learner.task, learner.form, learner.num_steps, is_pipelined=False)
    losses: dict[str, list[float]] = {}
    for name, candidate in {"pipelined": learner, "unpipelined": twin}.items():
        state = candidate.init(seed=0)
        losses[name] = []
        for position in range(COMPARED):
            state, metrics = candidate.step(state, seed=0, position=position)
            losses[name].append(float(metrics["loss"]))
    path.write_text(json.dumps(losses), "utf-8")
    return losses


def print_plan(form: Form, classes: int = 1000) -> None:
    """Prints where a model is cut in four, and what each device holds; runs nothing."""
    layers = amoebanetd(classes, form.num_layers, form.num_filters)
    shape = (form.batch_size, form.size, form.size, 3)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    job: dict[str, Any] = {
        "loss": loss_fn,
        "targets": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
        "num_microbatches": form.num_microbatches,
    }
    profile = jpipe.profile(layers, images, **ACCELERATOR, **job)
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
    print(f"AmoebaNet-D ({form.num_layers}, {form.num_filters}), {num_params:,} params")
    print(plan)


def main() -> int:
    """Trains the first task, then all others in both ways; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=TARGETS, help="default: all")
    add("--seeds", type=int, default=1, help="how often a target is learnt")
    add("--table", action="store_true", help="five seeds")
    add("--tiny", action="store_true", help="a few steps on small images")
    add("--plan", choices=[*FORMS], help="print the plan of a model, and run nothing")
    add("--data", type=Path, help="the target: one folder of images for each class")
    add("--folder", type=Path, default=Path("build/transfer"), help="of the results")
    add("--interrupt-after", type=int, help="the step after which Ctrl-C arrives")
    options = parser.parse_args()
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    # Pipelines of two tasks differ in the last layer: the programs of all others, and
    # after Ctrl-C of all, are compiled already.
    jax.config.update("jax_compilation_cache_dir", "build/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if options.plan:
        print_plan(FORMS[options.plan])
        return 0

    form = FORMS["tiny" if options.tiny else "small"]
    folder = options.folder / ("tiny" if options.tiny else "small")
    folder.mkdir(parents=True, exist_ok=True)
    source = read_task(SOURCE, form.size)
    if options.data is None:
        tasks = [read_task(n, form.size) for n in options.targets or form.targets]
    else:
        tasks = [read_folder(options.data, form.size)]
    draw_samples([source, *tasks], folder / "images.png")
    is_asked_to_stop = catch_signals()

    def stops(step: int) -> bool:
        if step == options.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)
        return is_asked_to_stop(step)

    with Progress() as bar:
        runs = Runs(folder, stops, bar)
        learner = Learner(source, form, form.source_steps)
        record = runs.fit(learner, SOURCE, seed=0, keep="body")
        rows = [make_row(source, {"scratch": [record]})]
        learners = [Learner(task, form, form.target_steps) for task in tasks]
        rows += [make_row(task, {"tuned": [], "scratch": []}) for task in tasks]
        for seed in range(1, 1 + (5 if options.table else options.seeds)):
            for target, row in zip(learners, rows[1:], strict=True):
                for arm, body in {"tuned": "body", "scratch": ""}.items():
                    name = f"{row.name}-{arm}-{seed}"
                    row.records[arm].append(runs.fit(target, name, seed, body))
        losses = compare(learner, folder / "compared.json")
    model = f"AmoebaNet-D ({form.num_layers}, {form.num_filters})"
    write_report(folder, rows, losses, shlex.join(["python", *sys.argv]), model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
