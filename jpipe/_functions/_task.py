"""The work of one stage on one micro-batch, as a function of flat leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr
from .._layers import _batchnorm
from .._layers._skip import NO_PORTS, Ports
from .._layers._stage import StageFunction
from ._vjp import Differentiable, Leaves
from ._weights import Weights, accumulate, is_inexact, sum_spec

PyTree = Any

# What a stage is given on a micro-batch beside its input, in this order, and only what
# it reads. The numbers are that of the micro-batch and that of the stage's first layer.
EXTRA = ("targets", "rngs", "numbers", "share")


@dataclass(frozen=True)
class Task:
    """One stage on micro-batches of one size.

    Its function gives ``(outputs, aux)``: the outputs are differentiated. They are
    the floating leaves of the stage's output, or the loss on the stage that has it.
    The aux are ``num_passed`` leaves that go on with the outputs (integers; the weight
    of a weighted loss), ``num_loss_aux`` that go to the caller, and those `changed`.

    Attributes:
      stage: its layers.
      weights: the variables of the stage.
      x: specs of the leaves of its input.
      x_tree: their structure.
      extra: specs of the leaves beside the input, by name: see `EXTRA`.
      y: specs of its output as a pytree, of ``(skips, output)`` if skip connections
        leave it; of the aux of the loss where the loss is.
      wanted: what is differentiated.
      changed: the positions in ``weights`` of the leaves that training changes.
      has_loss: whether the loss is in this stage.
      num_passed: see above.
      num_loss_aux: see above.
      closed: the jaxpr of the function, over the leaves of weights, x and extra.
      ports: the skip connections that enter with x and leave with y.
      norms: of each batch norm where its mean and its variance stand in ``changed``,
        and its momentum.
      outputs: specs of what the loss is given, where it is.
    """

    stage: StageFunction
    weights: Weights
    x: tuple[jax.ShapeDtypeStruct, ...]
    x_tree: Any
    extra: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]]
    y: PyTree
    wanted: Differentiable
    changed: tuple[int, ...]
    has_loss: bool
    num_passed: int
    num_loss_aux: int
    closed: core.ClosedJaxpr
    ports: Ports = NO_PORTS
    norms: tuple[tuple[int, int, float], ...] = ()
    outputs: PyTree = ()

    @property
    def index(self) -> int:
        """The number of the stage."""
        return self.stage.index

    @property
    def num_outputs(self) -> int:
        """How many results are differentiated."""
        aux = self.num_passed + self.num_loss_aux + len(self.changed)
        return self.num_results - aux

    @property
    def num_results(self) -> int:
        """How many results there are."""
        return len(self.closed.jaxpr.outvars)

    @property
    def num_aux(self) -> int:
        """How many results are not."""
        return self.num_results - self.num_outputs

    @property
    def num_losses(self) -> int:
        """How many of the sums are those of the loss."""
        return 1 + self.num_passed if self.has_loss else 0

    @property
    def divisors(self) -> list[Any]:
        """Of what the loss is divided by, its weight, the spec; empty if of nothing."""
        return self.closed.out_avals[1 : self.num_losses]

    @property
    def changes_integers(self) -> bool:
        """Whether training changes a leaf of integers: the last micro-batch's stays."""
        return any(not is_inexact(self.weights.specs[i]) for i in self.changed)

    @property
    def _has_means(self) -> bool:
        """Whether training changes a leaf that is a mean over the examples."""
        return any(is_inexact(self.weights.specs[i]) for i in self.changed)

    @property
    def extra_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the leaves beside the input, in order."""
        return [leaf for leaves in self.extra.values() for leaf in leaves]

    @property
    def share_at(self) -> int:
        """The position of the micro-batch's share among the extra leaves."""
        names = list(self.extra)[: list(self.extra).index("share")]
        return sum(len(self.extra[name]) for name in names)

    @property
    def sum_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the running sums that the forward of this stage keeps."""
        sums = self.closed.out_avals[: self.num_outputs + self.num_passed]
        changed = [self.weights.specs[i] for i in self.changed]
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))
        seen = [share] if self._has_means else []
        kept = [*(sums if self.has_loss else []), *changed, *seen]
        return [sum_spec(leaf) for leaf in kept]

    def sent(self, results: Sequence[Any]) -> list[Any]:
        """Of the results those that leave the stage, in the order of ``y``."""
        free = iter(results[: self.num_outputs])
        fixed = iter(results[self.num_outputs : self.num_results])
        leaves = [] if self.has_loss else jax.tree.leaves(self.y)
        return [next(free) if is_inexact(leaf) else next(fixed) for leaf in leaves]

    def run(self, weights: Leaves, x: Leaves, extra: Leaves) -> tuple[list, list]:
        """``(outputs, aux)`` of flat leaves."""
        flat = _jaxpr.as_traced(self.closed)(*weights, *x, *extra)
        return flat[: self.num_outputs], flat[self.num_outputs :]

    def loss_aux(self, results: Sequence[Any]) -> list[Any]:
        """Of the results what the loss function returned beside the loss."""
        first = self.num_outputs + self.num_passed
        return list(results[first : first + self.num_loss_aux])

    def add_results(
        self, sums: Leaves, outputs: Leaves, aux: Leaves, extra: Leaves
    ) -> list[Any]:
        """Adds one micro-batch: its loss, and its share of what training changes.

        A changed leaf becomes the mean over the examples of what the micro-batches
        made of it, and statistics of a batch norm become those of all micro-batches;
        a changed leaf of integers is what the last one made of it.
        """
        losses = [*outputs, *aux[: self.num_passed]] if self.has_loss else []
        states = aux[self.num_passed + self.num_loss_aux :]
        total = accumulate(sums[: len(losses)], losses)
        before = sums[len(losses) : len(losses) + len(states)]
        if not self._has_means:
            return [*total, *states]
        share, seen = extra[self.share_at], sums[-1]
        weight = share / (seen + share)
        after = [
            _mean(old, new, weight) if is_inexact(old) else new
            for old, new in zip(before, states, strict=True)
        ]
        for mean, var, _ in self.norms:
            so_far = _batchnorm.Merged(before[mean], before[var])
            merged = _batchnorm.merge(so_far, states[mean], states[var], seen, share)
            # The share may be of a wider dtype than the statistics.
            after[mean] = merged.mean.astype(so_far.mean.dtype)
            after[var] = merged.m2.astype(so_far.m2.dtype)
        return [*total, *after, seen + share]

    def merge_sums(self, sums: Leaves, others: Leaves) -> list[Any]:
        """The running sums of some micro-batches and of others as those of all."""
        losses = self.num_losses
        total = accumulate(sums[:losses], others[:losses])
        before, after = sums[losses:], others[losses:]
        if not self._has_means:
            return [*total, *after]
        seen, share = before[-1], after[-1]
        merged = [
            _mean(old, new, share / (seen + share)) if is_inexact(old) else new
            for old, new in zip(before[:-1], after[:-1], strict=True)
        ]
        for mean, var, _ in self.norms:
            so_far = _batchnorm.Merged(before[mean], before[var])
            one = _batchnorm.merge(so_far, after[mean], after[var] / share, seen, share)
            merged[mean] = one.mean.astype(so_far.mean.dtype)
            merged[var] = one.m2.astype(so_far.m2.dtype)
        return [*total, *merged, seen + share]

    def commit(self, old: Leaves, sums: Leaves) -> list[Any]:
        """What training makes of the changed leaves, once all micro-batches ran.

        Args:
          old: these leaves before the mini-batch.
          sums: the running sums, without those of losses.

        Returns:
          Their new values.
        """
        new = list(sums[: len(self.changed)])
        for mean, var, momentum in self.norms:
            for at in (mean, var):
                new[at] = _batchnorm.commit(old[at], new[at], momentum)
        return [x.astype(leaf.dtype) for x, leaf in zip(new, old, strict=True)]


def _mean(so_far: jax.Array, new: jax.Array, weight: jax.Array) -> jax.Array:
    """A mean with one more value; the mean of equal ones is that value to the bit."""
    new = new.astype(so_far.dtype)
    weight = weight.astype(so_far.dtype)
    # Not by their difference, which may overflow, or be none of two infinities.
    return jnp.where(new == so_far, so_far, so_far * (1 - weight) + new * weight)
