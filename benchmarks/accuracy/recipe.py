"""How long to train, and how fast: the recipe of Goyal et al. (2017).

A batch that is k times larger is trained k times faster: the learning rate is
proportional to the batch, and reached gradually, since at first the weights change too
quickly for that rule.

Where torchgpipe's own training differs from that paper, this follows torchgpipe, for it
stands beside its table: all parameters are decayed, those of batch norms too; the
warm-up takes four epochs; and the last scale of a block starts at one.

References:
  Goyal et al., `Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour
  <https://arxiv.org/abs/1706.02677>`_ (2017).
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Recipe:
    """Everything about the optimization that is not the batch.

    Attributes:
      epochs: passes over the training images.
      warmup: epochs in which the rate goes from `rate` to that of the batch.
      drops: the epochs at which the rate is multiplied by `factor`.
      factor: that factor.
      rate: the learning rate of a batch of `batch`.
      batch: the batch to which `rate` belongs.
      momentum: of Nesterov's method.
      weight_decay: of all parameters.
    """

    epochs: int = 90
    warmup: float = 4
    drops: tuple[float, ...] = (30, 60, 80)
    factor: float = 0.1
    rate: float = 0.1
    batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def shortened(self, epochs: int) -> "Recipe":
        """The same course in fewer epochs: warm-up and drops at the same fractions."""
        return replace(
            self,
            epochs=epochs,
            warmup=self.warmup * epochs / self.epochs,
            drops=tuple(drop * epochs / self.epochs for drop in self.drops),
        )

    def peak(self, batch: int) -> float:
        """The learning rate of a batch once it is warm."""
        return self.rate * batch / self.batch

    def learning_rate(self, batch: int, steps_per_epoch: int) -> optax.Schedule:
        """The learning rate by iteration.

        Args:
          batch: the number of images in a mini-batch.
          steps_per_epoch: how many mini-batches an epoch has.

        Returns:
          ``f(step) -> rate``, where step 0 is the first update; for `jax.jit`.
        """
        peak = self.peak(batch)
        warm = self.warmup * steps_per_epoch
        # Whole steps, so that no rounding moves a drop: `step >= ceil(x)` is `>= x`.
        drops = jnp.array([math.ceil(d * steps_per_epoch) for d in self.drops])

        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            step = jnp.asarray(step)
            done = jnp.minimum(step.astype(jnp.float32) / warm, 1.0) if warm else 1.0
            dropped = jnp.sum(step >= drops)
            return (self.rate + (peak - self.rate) * done) * self.factor**dropped

        return rate

    def optimizer(
        self, batch: int, steps_per_epoch: int
    ) -> optax.GradientTransformation:
        """Nesterov's momentum, with the learning rate outside of it.

        Outside, a change of the rate rescales the momentum too, which is what the
        linear rule asks for (their remark 2).

        Args:
          batch: as for `learning_rate`.
          steps_per_epoch: as for `learning_rate`.

        Returns:
          The optimizer.
        """
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay),
            optax.trace(self.momentum, nesterov=True),
            optax.scale_by_learning_rate(self.learning_rate(batch, steps_per_epoch)),
        )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
