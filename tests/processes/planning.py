"""One of several processes, which plans for the devices of all and builds the plan."""

import sys

import jax


def main(_job: str) -> None:
    """Plans, builds the plan and takes a step."""
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed()
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    layers = [nn.Dense(64) for _ in range(4)]
    x = jnp.ones((64, 64))
    tx = optax.sgd(0.1)
    # Of devices that compute so slowly, two for each stage would be the fastest.
    plan = jpipe.plan(layers, x, tx, measure=False, peak_flops=1e9, bandwidth=1e12)
    pipe = jpipe.pipeline(layers, plan=plan)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(lambda y, _: jnp.mean(y**2), tx)
    _, metrics = step(state, x, ())
    print("devices", len(pipe.devices), "loss", float(metrics["loss"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
