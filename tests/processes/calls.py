"""One of several processes, which make calls that go wrong, and go on after most."""

import sys
import traceback
from pathlib import Path

import jax


def main(folder: str, _job: str) -> None:
    """Prints what is said of each call.

    Args:
      folder: where to save.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed()
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn

    me, (first, last) = jax.process_index(), jax.devices()
    pipe = jpipe.pipeline([nn.Dense(5), nn.Dense(5)], 2)
    x = np.ones((4, 5), np.float32)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    variables = state.variables

    # Who is given nothing is slower than who tells it of what it was not given.
    for _ in range(200):
        y = pipe.apply(variables, x if me == 0 else None)
        jax.block_until_ready(y) if me else None
    print("200 calls were given nothing")

    back = jpipe.pipeline([nn.Dense(5), nn.Dense(5)], 2, devices=[last, first])
    back.apply(back.init(jax.random.key(0), x), y)
    print("the first input of another pipeline was taken")

    def refused(call):
        try:
            call()
        except Exception:
            traceback.print_exc(limit=0)
        else:
            print("nothing was said")

    square = pipe.value_and_grad(lambda y, t: jnp.mean((y - t) ** 2))
    refused(lambda: square(variables, x, x, rngs=jax.random.key(me)))
    (Path(folder) / "file").touch()
    refused(lambda: jpipe.checkpoint.save(Path(folder) / "file" / "state", state))
    path = Path(folder) / "state"
    jpipe.checkpoint.save(path, state)
    other = Path(folder) / "nowhere" if me else path
    refused(lambda: jpipe.checkpoint.restore(other, state))
    # As after Ctrl-C in both, which comes to one in a later step than to the other.
    own = jax.device_put(np.int32(me), jax.local_devices()[0])
    skewed = state.replace(
        step=jax.make_array_from_single_device_arrays((), state.step.sharding, [own])
    )
    refused(lambda: jpipe.checkpoint.save(Path(folder) / "skewed", skewed))

    # What comes now is of no use, which nobody can know before the end.
    if me == 0:
        pipe.apply(variables, x)
    y = pipe.apply(variables, x if me == 0 else None)
    jax.block_until_ready(y) if me else None


if __name__ == "__main__":
    main(*sys.argv[1:])
