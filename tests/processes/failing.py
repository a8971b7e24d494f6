"""One of several processes, of which one fails, in the way that its argument names."""

import atexit
import sys

import jax


def train(how: str) -> None:
    """Trains until process 1 fails, in a way that has a name: see `main`."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn

    import jpipe

    fails = jax.process_index() == 1

    def other(name):
        return fails and how == name

    layers = [nn.Dense(5), jnp.sin, nn.Dense(4 if other("model") else 3)]
    if how == "whole":
        pipe = jpipe.pipeline(nn.Sequential(layers), 2, num_stages=2)
    else:
        pipe = jpipe.pipeline(layers, 2, balance=[1, 2])
    tx = optax.adam(1e-3)
    x, size = np.ones((8, 5), np.float32), 4 if other("model") else 3
    if other("shuffle") or other("whole"):
        x = x * np.arange(8.0, dtype=np.float32)[:, None]
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx)
    targets = np.ones((len(x), size), np.float32)
    if other("call"):
        pipe.apply(state.variables, x)
    for number in range(12):
        if number == 6 and other("raise"):
            raise ZeroDivisionError("by a test")
        if number == 3 and other("epoch"):
            x = x[::-1] * np.arange(8.0, dtype=np.float32)[:, None]
        state, metrics = step(state, x, targets)
        print("loss", float(metrics["loss"]))


def main(ways: str, _job: str) -> None:
    """Trains until process 1 fails; goes on where a program is refused.

    Args:
      ways: one, or several with commas between them, of which only the last ends the
        process. ``"model"``, ``"shuffle"``: process 1 runs another program, or on
        other examples; ``"epoch"``: only later; ``"whole"``: on others, of one model;
        ``"call"``: it calls another function.
        ``"raise"``: it ends in the middle.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    atexit.register(print, "what others do at the end")
    jpipe.distributed()
    *refused, last = ways.split(",")
    for how in refused:
        try:
            train(how)
        except ValueError as error:
            print(error)
    train(last)


if __name__ == "__main__":
    main(*sys.argv[1:])
