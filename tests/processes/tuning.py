"""One of several processes, which tune together and run the plan."""

import math
import sys

import jax


def main(_job: str) -> None:
    """Tunes, builds the plan and takes a step."""
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed()
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    from jpipe._api._process_link import measure_process_link

    layers = [nn.Dense(64) for _ in range(4)]
    x = jnp.ones((64, 64))
    tx = optax.sgd(0.1)

    def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((outputs - targets) ** 2)

    plan = jpipe.tune(
        layers,
        x,
        x,
        loss_fn,
        tx,
        schedules=("1f1b", "zb_h1"),
        num_microbatches=(1, 4),
        rounds=2,
    )
    link = measure_process_link(*jax.devices()[:2])
    print("transfers", link and link.latency > 0 and 0 < link.bandwidth < math.inf)
    pipe = jpipe.pipeline(layers, plan=plan)
    assert plan.forecast is not None
    seconds = [trial.seconds for trial in plan.forecast.trials]
    print("tuned", len(plan.stages), plan.schedule.name, plan.balance, seconds)
    if any(device.process_index == jax.process_index() for device in pipe.devices):
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        _, metrics = pipe.train_step(loss_fn, tx)(state, x, x)
        print("loss", float(metrics["loss"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
