"""The mini-batch, its loss, and how layers are profiled: arguments, checked."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import _call, _microbatch, _variables
from .._arguments._batch import Axes, Batch
from .._arguments._objective import Objective, explain_arguments
from .._instructions._transfer import Device
from .._jaxprs._jaxpr import is_inexact
from .._layers import _rng
from .._messages import source_text
from ._layer_profile import find_count_faults, find_number_faults
from ._origin import Rates

PyTree = Any


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe.profile` of these names.

    In training ``rngs`` are a key where the user gives none.

    Raises:
      ValueError: with every fault.
      TypeError: if the device is none, or a leaf belongs to a trace.
    """

    x: PyTree
    _: KW_ONLY
    num_microbatches: int = 1
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None
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
        leaves = jax.tree.leaves((self.x, self.targets, self.rngs))
        _variables.check_concrete(leaves)
        if self.rngs is None and self.train:
            keys: Any = jax.random.key(0) if self.measure else _rng.key_spec()
            object.__setattr__(self, "rngs", keys)

    def _faults(self) -> Iterator[str]:
        for name in ("num_microbatches", "rounds"):
            yield from find_count_faults(name, getattr(self, name))
        for name in Rates._fields:
            rate = getattr(self, name)
            if rate is None:
                continue
            if self.measure:
                yield f"{name}={rate!r} is for an estimate; give measure=False too"
            elif name == "action_seconds":
                yield from find_number_faults(name, rate)
            elif not isinstance(rate, int | float) or not 0 < rate < math.inf:
                yield f"{name}={rate!r}: needs a number above 0, per second"
        if self.loss_fn is None and jax.tree.leaves(self.targets):
            yield "targets are for a loss; give loss_fn= too"

    def batch(self) -> Batch:
        """Specs of the mini-batch.

        Raises:
          TypeError: if a leaf is not an array.
          ValueError: if it cannot be cut.
        """
        names = ("x", "targets")
        in_axes = (self.axes.in_axes, self.axes.target_axes)
        arguments = _call.describe_arguments((self.x, self.targets), in_axes, names)
        num_examples = _microbatch.count_examples(arguments, self.num_microbatches)
        x, targets = arguments
        return Batch(
            (x.specs, targets.specs),
            names,
            axes=[*x.axes, *targets.axes],
            sizes=_microbatch.microbatch_sizes(num_examples, self.num_microbatches),
        )

    @cached_property
    def device_or_rates(self) -> Device | Rates:
        """The device to measure on, or the rates of an estimate."""
        if self.measure:
            return jax.local_devices()[0] if self.device is None else self.device
        rates = {name: getattr(self, name) for name in Rates._fields}
        return Rates(
            **{name: float(rate) for name, rate in rates.items() if rate is not None}
        )

    @property
    def objective(self) -> Objective | None:
        """The loss, a part of the last layer."""
        if self.loss_fn is None:
            return None
        objective = Objective(self.loss_fn, self.has_aux, self.reduction)
        if jax.tree.leaves(self.targets) or explain_arguments(self.loss_fn):
            return objective
        return dataclasses.replace(
            objective, loss_fn=_explain_missing_targets(self.loss_fn)
        )

    @property
    def axes(self) -> Axes:
        """The axes of the examples."""
        return Axes(self.in_axes, self.target_axes, 0)

    def with_loss(self) -> "Request":
        """The request, with the sum of the outputs for a loss if it has none."""
        if self.loss_fn is not None:
            return self
        return dataclasses.replace(
            self, loss_fn=sum_outputs, has_aux=False, reduction="mean"
        )

    def resized(self, batch_size: int) -> "Request":
        """The request with specs of one micro-batch of another size."""
        one_microbatch = dataclasses.replace(self, num_microbatches=1)
        x, targets = one_microbatch.batch().microbatch_specs(batch_size)
        return dataclasses.replace(one_microbatch, x=x, targets=targets)


def _explain_missing_targets(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function, whose error without targets says what to type."""

    @functools.wraps(loss_fn)
    def call(outputs: PyTree, targets: PyTree) -> Any:
        try:
            return loss_fn(outputs, targets)
        except Exception as error:
            raise TypeError(
                f"loss_fn, {source_text(loss_fn)}, was called with targets="
                f"{targets!r}, and raised {type(error).__name__}: {error}\nType "
                f"targets=targets beside loss_fn=, those of the mini-batch, as arrays "
                f"or jax.ShapeDtypeStruct"
            ) from error

    return call


def sum_outputs(outputs: PyTree, _: PyTree) -> jax.Array:
    """The sum of all numbers of any outputs."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(outputs):
        if is_inexact(leaf):
            total += jnp.real(jnp.sum(leaf)).astype(float)
    return total
