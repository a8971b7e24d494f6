"""Experiments cut by jpipe: layers are profiled, then partitioned."""

import dataclasses
from typing import Any

import jpipe

from ..experiment import Setting
from .compiled import Way
from .predict import Link, one_core


class Cutter:
    """Profiles models once and cuts them.

    Args:
      device: where layers are measured.
      most_examples: the largest micro-batch that is measured.
    """

    def __init__(self, device: Any, most_examples: int | None = None) -> None:
        self._device = device
        self._most = most_examples
        self._profiles: dict[Any, jpipe.Profile] = {}

    def cut(self, setting: Setting, way: Way, link: Link) -> Setting:
        """The same experiment with the balance that `jpipe.partition` finds."""
        timed = min(setting.size, self._most or setting.size)
        scale = setting.size / timed
        profile = self._profile(setting, timed)
        if way.remat == "except_last":
            # Of all micro-batches but one forwards run twice, in the last stage too.
            profile = _twice(profile)
        balance = jpipe.partition(
            profile,
            len(setting.balance),
            objective="step",
            num_microbatches=setting.microbatches,
            bandwidth=link.bandwidth,
            # Times and bytes are those of fewer examples.
            latency=link.latency / scale,
            schedule=way.schedule,
            remat="none" if way.remat == "except_last" else way.remat,
        )
        return dataclasses.replace(setting, balance=tuple(balance))

    def _profile(self, setting: Setting, examples: int) -> jpipe.Profile:
        work = setting.work
        # Rows of one table mostly have the same layers.
        key = tuple(work.layers), examples
        if key not in self._profiles:
            x, targets = work.specs(examples)
            with one_core():
                self._profiles[key] = jpipe.profile(
                    work.layers,
                    x,
                    loss=work.loss,
                    targets=targets,
                    rounds=3,
                    device=self._device,
                )
        return self._profiles[key]


def _twice(profile: jpipe.Profile) -> jpipe.Profile:
    """Each backward with the forward that it computes again."""
    layers = (
        dataclasses.replace(layer, backward=layer.forward + layer.backward)
        for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=tuple(layers))
