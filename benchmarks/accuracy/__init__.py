"""Accuracy: does a pipeline reach the error of one device?

``"full"`` is ResNet-101 on ImageNet with the recipe of Goyal et al. (2017) and the
batches, micro-batches and balances of torchgpipe's table; ``"small"`` and ``"tiny"``
are a thin ResNet on digits.

References:
  Goyal et al., `Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour
  <https://arxiv.org/abs/1706.02677>`_ (2017).
  Kim et al., `torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
  Models <https://arxiv.org/abs/2004.09910>`_ (2020).
"""

from collections.abc import Sequence
from pathlib import Path

import jax
from rich.progress import Progress

from ..models.resnet import resnet101
from ..result import Cell, Rows
from . import digits
from .imagenet import ImageFolder
from .recipe import Recipe
from .train import Experiment, Training, cells

_EIGHT = (26, 22, 33, 44, 44, 66, 66, 69)
IMAGENET = {
    "pipeline-256": Experiment(256, 4, (140, 230)),
    "pipeline-1k": Experiment(1024, 64, _EIGHT),
    "pipeline-4k": Experiment(4096, 64, _EIGHT),
}
EXPERIMENTS: dict[str, list[str]] = {"full": list(IMAGENET)} | {
    scale: [*setting.experiments, digits.APART]
    for scale, setting in digits.SETTINGS.items()
}


def run(
    scale: str,
    *,
    experiments: Sequence[str] | None,
    seeds: int,
    data: Path | None,
    progress: Progress,
) -> Rows:
    """Trains experiments, each from several seeds.

    Args:
      scale: one of `EXPERIMENTS`.
      experiments: names of `EXPERIMENTS` at that scale; ``None``: all of them.
      seeds: from how many seeds each is trained: 0, 1, ...
      data: the folder of ImageNet, for ``"full"``; digits need none.
      progress: where the progress is shown.

    Returns:
      For each experiment ``"error"``, the top-1 error of the test images in percent,
      and ``"throughput"``: means over seeds with their standard deviations. For
      `digits.APART` only ``"difference"``, that of parameters after some steps.

    Raises:
      ValueError: if a name is unknown, or the images or devices are too few.
    """
    names = _chosen(scale, experiments)
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: needs at least 1")

    def train(name: str, training: Training) -> dict[str, Cell]:
        # Days of work leave a trace of each epoch, minutes do not need one.
        return _train(name, training, seeds, progress, keep=scale == "full")

    if scale in digits.SETTINGS:
        return digits.run(scale, names, train)
    images = ImageFolder(data)
    _check_devices(names)
    # All are made before any is trained: what does not fit shows now, not in days.
    made = {name: _training(name, images) for name in names}
    return {name: train(name, training) for name, training in made.items()}


def _chosen(scale: str, experiments: Sequence[str] | None) -> list[str]:
    if scale not in EXPERIMENTS:
        raise ValueError(f"scale={scale!r}: needs one of {', '.join(EXPERIMENTS)}")
    known = EXPERIMENTS[scale]
    names = known if experiments is None else list(dict.fromkeys(experiments))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"there is no experiment {', '.join(unknown)} at scale {scale}; there are "
            f"{', '.join(known)}"
        )
    return names


def _check_devices(names: Sequence[str]) -> None:
    found = jax.devices()
    needs = {name: len(IMAGENET[name].balance) for name in names}
    if lacking := [f"{name} {n}" for name, n in needs.items() if n > len(found)]:
        raise ValueError(
            f"there are {len(found)} devices of {found[0].device_kind}, one per stage "
            f"is needed: {', '.join(lacking)}; choose experiments with fewer stages, "
            f"or --scale small, which runs anywhere"
        )


def _training(name: str, images: ImageFolder) -> Training:
    layers = resnet101(images.num_classes)
    return Training(IMAGENET[name], layers, images, Recipe())


def _train(
    name: str, training: Training, seeds: int, progress: Progress, keep: bool
) -> dict[str, Cell]:
    """Trains an experiment from all seeds, and shows how far it is."""
    task = progress.add_task(name, total=seeds * training.recipe.epochs)

    def report(seed: int, epoch: int, errors: list[float]) -> None:
        text = f"{name}, seed {seed}, epoch {epoch}: error {errors[-1]:.2f} %"
        progress.update(task, advance=1, description=text)
        if keep:
            progress.console.print(text)

    return cells(training, [training.run(seed, report) for seed in range(seeds)])
