"""The arguments of `jpipe.profile`, checked, and what follows from them."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import _call, _microbatch, _variables
from .._arguments._batch import Axes, Batch
from .._arguments._objective import Objective
from .._instructions._transfer import Device
from .._jaxprs._jaxpr import is_inexact
from .._layers import _rng
from ._estimate import Rates
from ._layer_profile import count_faults, number_faults

PyTree = Any


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe.profile` of these names.

    Without keys of its own, training has any.

    Raises:
      ValueError: with every fault.
      TypeError: if the device is none, or a leaf belongs to a trace.
    """

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
        if self.rngs is None and self.train:
            keys: Any = jax.random.key(0) if self.measure else _rng.key_spec()
            object.__setattr__(self, "rngs", keys)

    def _faults(self) -> Iterator[str]:
        for name in ("num_microbatches", "rounds"):
            yield from count_faults(name, getattr(self, name))
        for name in ("peak_flops", "memory_bandwidth", "action_seconds"):
            rate = getattr(self, name)
            if rate is None:
                continue
            if self.measure:
                yield f"{name}={rate!r} is for an estimate; give measure=False too"
            elif name == "action_seconds":
                yield from number_faults(name, rate)
            elif not isinstance(rate, int | float) or not 0 < rate < math.inf:
                yield f"{name}={rate!r}: needs a number above 0, per second"
        if self.loss is None and jax.tree.leaves(self.targets):
            yield "targets are for a loss; give loss= too"

    def batch(self) -> Batch:
        """Specs of the mini-batch.

        Raises:
          TypeError: if a leaf is not an array.
          ValueError: if it cannot be cut.
        """
        names = "sample", "targets"
        given = tuple(map(_microbatch.array_specs, (self.sample, self.targets), names))
        axes = _call.axes_of(self.axes[:2], given, names)
        number = self.num_microbatches
        size = _call.batch_size(given, axes, number, names)
        flat = [axis for own in axes for axis in own]
        return Batch(given, flat, _microbatch.microbatch_sizes(size, number))

    @cached_property
    def where(self) -> Device | Rates:
        """The device to measure on; the rates of one on paper."""
        if self.measure:
            return jax.local_devices()[0] if self.device is None else self.device
        given = {
            "flops": self.peak_flops,
            "bandwidth": self.memory_bandwidth,
            "action": self.action_seconds,
        }
        return Rates(**{k: float(v) for k, v in given.items() if v is not None})

    @property
    def objective(self) -> Objective | None:
        """The loss, a part of the last layer."""
        if self.loss is None:
            return None
        return Objective(self.loss, self.has_aux, self.reduction)

    @property
    def axes(self) -> Axes:
        """Where the examples are."""
        return Axes(self.in_axes, self.target_axes, 0)

    def with_loss(self) -> "Request":
        """The same with any loss, where none was given."""
        if self.loss is not None:
            return self
        plain = {"has_aux": False, "reduction": "mean"}
        return dataclasses.replace(self, loss=any_loss, **plain)

    def resized(self, batch_size: int) -> "Request":
        """The same in one micro-batch of another size, of which nothing has values."""
        whole = dataclasses.replace(self, num_microbatches=1)
        x, targets = whole.batch().part(batch_size)
        return dataclasses.replace(whole, sample=x, targets=targets)


def any_loss(outputs: PyTree, _: PyTree) -> jax.Array:
    """A loss of any outputs, where none was given."""
    leaves = filter(is_inexact, jax.tree.leaves(outputs))
    return sum((jnp.real(jnp.sum(x)).astype(float) for x in leaves), jnp.zeros(()))
