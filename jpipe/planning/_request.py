"""What `jpipe.profile` is asked: its arguments checked, and what follows from them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .._functions._objective import Objective
from .._functions._weights import is_inexact
from .._instructions._progress import counted
from .._instructions._transfer import Device
from .._layers import _rng
from .._run import _variables
from .._run._context import outside_of_meshes
from .._slices._built import Built
from ..schedules import Schedule
from ._estimate import Rates
from ._layer import misfit
from ._made import made
from ._subject import subject
from ._traced import Sample, Traced

PyTree = Any
_NO_TARGETS = (
    "loss= was given and no targets=: the loss was called with () in their place"
)


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
        object.__setattr__(self, "layers", subject(self.layers))
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
            self._objective,
            self.trainable,
            self.train,
        )

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

    @cached_property
    def model(self) -> Traced:
        """The layers, or pieces of a model, each by itself."""
        with self._explained():
            return self.layers.traced(self.batch, None, "none")

    @outside_of_meshes
    def kept(self, balance: Sequence[int], mode: str) -> list[int]:
        """What stages store of a micro-batch: their layers are traced together."""
        with self._explained():
            traced = self.layers.traced(self.batch, balance, mode)
        stages = range(len(balance))
        found = counted("stages traced", [traced.functions(s, mode) for s in stages])
        return [own.kept.nbytes[mode] if own.has_backward else 0 for own in found]

    @outside_of_meshes
    def lowered(
        self,
        balance: Sequence[int],
        remat: Sequence[str],
        schedule: Schedule,
        data: int = 1,
    ) -> Built:
        """The loss and its gradients of a mini-batch, on devices that are not there."""
        loss = self._objective or Objective(_any)
        sample = self.batch._replace(objective=loss)
        with self._explained():
            return self.layers.lowered(sample, balance, remat, schedule, data)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to an error of a loss that it was given no targets."""
        try:
            yield
        except Exception as error:
            if self.loss is not None and not jax.tree.leaves(self.targets):
                error.add_note(_NO_TARGETS)
            raise

    @property
    def _objective(self) -> Objective | None:
        """The loss, a part of the last layer."""
        if self.loss is None:
            return None
        return Objective(self.loss, self.has_aux, self.reduction)

    def resized(self, batch_size: int) -> "Request":
        """The same for a mini-batch of another size, of which nothing has values."""
        own = self.batch.resized(batch_size)
        return dataclasses.replace(self, sample=own.x, targets=own.targets)

    @property
    def made(self) -> dict[str, str]:
        """What a profile is made on that answers this."""
        return made(self.model, self.train, self.where)


def _any(outputs: PyTree, _: PyTree) -> jax.Array:
    """A loss of any outputs."""
    leaves = filter(is_inexact, jax.tree.leaves(outputs))
    return sum((jnp.real(jnp.sum(x)).astype(float) for x in leaves), jnp.zeros(()))
