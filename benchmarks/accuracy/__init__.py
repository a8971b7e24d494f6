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

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import jax

from ..models.resnet import resnet101
from ..result import Cell
from . import digits
from .imagenet import ImageFolder
from .recipe import Recipe
from .train import Experiment, Training, apart, cells

_EIGHT = (26, 22, 33, 44, 44, 66, 66, 69)
IMAGENET = {
    "pipeline-256": Experiment(256, 4, (140, 230)),
    "pipeline-1k": Experiment(1024, 64, _EIGHT),
    "pipeline-4k": Experiment(4096, 64, _EIGHT),
}
# The line that compares parameters.
APART = "pipeline-4 against one device"
EXPERIMENTS: dict[str, list[str]] = {"full": list(IMAGENET)} | {
    scale: [*setting.experiments, APART] for scale, setting in digits.SETTINGS.items()
}
Jobs = list[tuple[str, Callable[[], dict[str, Cell]]]]


def jobs(
    scale: str, *, experiments: Sequence[str] | None, seeds: int, data: Path | None
) -> Jobs:
    """What trains each experiment, from several seeds.

    All are built before any is trained: what does not fit shows now, not in days.

    Args:
      scale: one of `EXPERIMENTS`.
      experiments: names of `EXPERIMENTS` at that scale; ``None``: all of them.
      seeds: from how many seeds each is trained: 0, 1, ...
      data: the folder of ImageNet, for ``"full"``; digits need none.

    Returns:
      For each experiment its name and what gives its cells: ``"error"``, the top-1
      error of the test images in percent, and at full scale ``"throughput"``: means
      over seeds with their standard deviations. For `APART` only ``"difference"``, that
      of parameters after some steps.

    Raises:
      ValueError: if a name is unknown, or the images or devices are too few.
    """
    names = _chosen(scale, experiments)
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: needs at least 1")
    if scale == "full":
        images = ImageFolder(data)
        _check_devices(names)
        return [
            (name, partial(cells, _imagenet_training(name, images), name, seeds))
            for name in names
        ]

    setting = digits.SETTINGS[scale]
    images = digits.Digits(setting.scale, setting.images)

    @cache  # what `APART` compares is compiled for its own line
    def training(name: str, chunks: int | None = None) -> Training:
        experiment = setting.experiments[name]
        if chunks is not None:
            experiment = experiment._replace(chunks=chunks)
        return Training(experiment, setting.layers(), images, setting.recipe)

    def compare() -> dict[str, Cell]:
        batch, chunks = next(iter(setting.chunks.items()))
        one = training(f"one-device-{batch}", chunks)
        return {"difference": apart(training(f"pipeline-4-{batch}"), one)}

    def train(name: str) -> dict[str, Cell]:
        # A model this thin on cores that stages share: no throughput to speak of.
        return {"error": cells(training(name), name, seeds)["error"]}

    return [
        (name, compare if name == APART else partial(train, name)) for name in names
    ]


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
    devices = jax.devices()
    needs = {name: len(IMAGENET[name].balance) for name in names}
    if lacking := [f"{name} {n}" for name, n in needs.items() if n > len(devices)]:
        raise ValueError(
            f"there are {len(devices)} devices of {devices[0].device_kind}, one per "
            f"stage is needed: {', '.join(lacking)}; choose experiments with fewer "
            f"stages, or --scale small, which runs anywhere"
        )


def _imagenet_training(name: str, images: ImageFolder) -> Training:
    return Training(IMAGENET[name], resnet101(images.num_classes), images, Recipe())
