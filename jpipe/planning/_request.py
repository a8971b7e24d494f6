"""What `jpipe.profile` is asked: its arguments checked, and what follows from them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from .._functions._objective import Objective
from .._functions._trainable import Trainable
from .._instructions._transfer import Device
from .._layers import _rng
from .._run import _variables
from .._run._context import outside_of_meshes
from ._estimate import Rates
from ._layer import misfit
from ._made import made
from ._traced import Sample, Traced

PyTree = Any


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe.profile` of these names.

    Raises:
      ValueError: with every fault.
      TypeError: if the device is none, or a leaf belongs to a trace.
    """

    layers: Any
    sample: PyTree
    num_microbatches: int = 1
    loss: Callable[[PyTree, PyTree], Any] | None = None
    targets: PyTree = ()
    has_aux: bool = False
    reduction: str = "mean"
    trainable: Any = None
    in_axes: Any = 0
    target_axes: Any = 0
    rngs: _rng.Rngs = None
    train: bool = True
    measure: bool = True
    rounds: int = 5
    device: Device | None = None
    peak_flops: float | None = None
    memory_bandwidth: float | None = None
    action_seconds: float | None = None

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError(f"profile: {'; '.join(faults)}")
        if self.device is not None and not isinstance(self.device, jax.Device):
            raise TypeError(
                f"device={self.device!r} is a {type(self.device).__name__}; needs one "
                f"jax.Device, such as device=jax.devices()[0]"
            )
        leaves = jax.tree.leaves((self.sample, self.targets, self.rngs))
        _variables.check_concrete(leaves)

    def _faults(self) -> Iterator[str]:
        for name in ("num_microbatches", "rounds"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                yield f"{name}={count!r}: needs an int of at least 1"
        for name in ("peak_flops", "memory_bandwidth", "action_seconds"):
            rate = getattr(self, name)
            if rate is None:
                continue
            if self.measure:
                yield f"{name}={rate!r} is for an estimate; give measure=False too"
            elif name == "action_seconds":
                yield from misfit(name, rate)
            elif not isinstance(rate, int | float) or not 0 < rate < math.inf:
                yield f"{name}={rate!r}: needs a number above 0, per second"
        if self.loss is None and jax.tree.leaves(self.targets):
            yield "targets are for a loss; give loss= too"

    @cached_property
    def batch(self) -> Sample:
        """The mini-batch; without keys of its own in training, with any."""
        rngs: Any = self.rngs
        if rngs is None and self.train:
            rngs = jax.random.key(0) if self.measure else _rng.key_spec()
        return Sample(
            self.sample,
            self.targets,
            rngs,
            self.in_axes,
            self.target_axes,
            self.num_microbatches,
        )

    @cached_property
    def where(self) -> Device | Rates:
        """The device to measure on; the rates of one on paper."""
        if self.measure:
            return jax.devices()[0] if self.device is None else self.device
        given = {
            "flops": self.peak_flops,
            "bandwidth": self.memory_bandwidth,
            "action": self.action_seconds,
        }
        return Rates(**{k: float(v) for k, v in given.items() if v is not None})

    @cached_property
    def model(self) -> Traced:
        """The layers, traced."""
        objective = None
        if self.loss is not None:
            objective = Objective(self.loss, self.has_aux, self.reduction)
        trainable = Trainable(self.trainable)
        return Traced.of(self.layers, self.batch, objective, trainable, self.train)

    def resized(self, batch_size: int) -> "Request":
        """The same for a mini-batch of another size, of which nothing has values."""
        batch = self.batch._replace(num_microbatches=1).batch()

        def resized(tree: PyTree, axes: Sequence[int | None]) -> PyTree:
            specs, structure = jax.tree.flatten(tree)
            for i, axis in enumerate(axes):
                if axis is not None:
                    shape = list(specs[i].shape)
                    shape[axis] = batch_size
                    specs[i] = specs[i].update(shape=tuple(shape))
            return jax.tree.unflatten(structure, specs)

        return dataclasses.replace(
            self,
            sample=resized(batch.x, batch.x_axes),
            targets=resized(batch.targets, batch.target_axes),
        )

    @property
    def made(self) -> dict[str, str]:
        """What a profile is made on that answers this."""
        return made(self.model, self.train, self.where)


@outside_of_meshes
def made_on(layers: Any, sample: PyTree, **options: Any) -> dict[str, str]:
    """What `jpipe.profile` says of these arguments as ``made``; nothing is measured.

    A profile that was loaded is for these layers if it says the same.

    Args:
      layers: as for `jpipe.profile`.
      sample: likewise.
      **options: likewise, by name.
    """
    return Request(layers, sample, **options).made
