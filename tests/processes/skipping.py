"""One of several processes that take a step whose gradients are not finite."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


@jax.custom_vjp
def spoil(h):
    """The input; where it is large, its gradient is infinite."""
    return h


spoil.defvjp(
    lambda h: (h, jnp.max(jnp.abs(h))),
    lambda largest, grad: (jnp.where(largest > 1e3, grad + jnp.inf, grad),),
)


def layers():
    """Of the first one alone the gradient is spoiled; two write statistics."""
    return [
        nn.Dense(8),
        spoil,
        jnp.tanh,
        nn.BatchNorm(),
        nn.Dense(8),
        nn.BatchNorm(),
        jnp.tanh,
        nn.Dense(4),
    ]


def main(num_devices: str, _job: str) -> None:
    """Prints the losses, which steps were skipped, and how the last one changed.

    Args:
      num_devices: the devices of all processes.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_num_cpu_devices", int(num_devices))
    jpipe.distributed()
    devices = jax.devices()[:: jax.process_count()][: int(num_devices)]
    pipe = jpipe.pipeline(layers(), 4, balance=[4, 4], devices=devices)
    x = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
    spoiled = x.copy()
    spoiled[3] = 1e4
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx, skip_nonfinite=True)
    losses = list[str]()
    skipped = list[int]()
    for batch in (x, spoiled, x):
        state, metrics = step(state, batch, x[:, :4])
        losses.append(np.float32(metrics["loss"]).tobytes().hex())
        skipped.append(int(metrics["skipped"]))
    print(f"losses {losses}, skipped {skipped}")


if __name__ == "__main__":
    main(*sys.argv[1:])
