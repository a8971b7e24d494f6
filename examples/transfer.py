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

SIGTERM writes a checkpoint and ends with status 75. The same command goes on
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

import jax
from images import read_folder, read_task
from learner import STAGES, Form, Learner, print_plan
from rich.progress import Progress
from runs import Runs
from transfer_report import draw_samples, make_row, write_report

import jpipe

COMPARED_STEPS = 5
TARGETS = ("scikit-learn digits", "MNIST", "Greek", "Cyrillic", "Hebrew", "Devanagari")
# Arm -> the checkpoint of the layers that it begins with; empty for new layers.
BODIES = {"tuned": "body", "scratch": ""}


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
        source="Latin",
        source_steps=300,
        targets=TARGETS,
        target_steps=80,
    ),
    # AmoebaNet-D, where Huang et al. have AmoebaNet-B.
    "paper": Form(
        num_layers=18, num_filters=512, size=480, batch_size=128, num_microbatches=32
    ),
}


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

    def is_stopped(step: int) -> bool:
        if step == options.preempt_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return jpipe.preempted()

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
