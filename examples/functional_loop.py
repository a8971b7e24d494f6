"""A training loop of your own: gradients from jpipe, the rest as in any optax loop.

The parameters of the stages are on their devices; functions of all of them, such as a
norm or an average, go through `pipe.jit`.

    python examples/functional_loop.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jpipe


def main() -> None:
    """Trains, and tests the last parameters and their moving average."""
    rng = np.random.default_rng(0)
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    order = rng.permutation(len(labels))
    x, x_test = np.split(pixels[order].astype(np.float32) / 16, [1500])
    labels, labels_test = np.split(labels[order], [1500])

    jax.config.update("jax_num_cpu_devices", 3)
    devices = (3 * jax.devices())[:3]  # where there are fewer, stages share them
    layers = [nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(10)]
    pipe = jpipe.pipeline(
        layers, num_microbatches=4, balance=[2, 2, 1], devices=devices
    )

    @pipe.value_and_grad
    def loss_and_grads(logits, labels):
        """The mean cross-entropy of a batch."""
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # Each part runs where the parameters are; one scalar per device is sent.
    norm = pipe.jit(optax.tree.norm)

    @pipe.jit
    def average(old, new):
        """A moving average of the parameters."""
        return optax.incremental_update(new, old, step_size=0.02)

    @pipe.jit
    def accuracy(logits, labels):
        """The share of images whose digit is the likeliest."""
        return jnp.mean(logits.argmax(axis=-1) == labels)

    def variables(params):
        """The parameters as jpipe takes them, one entry per layer."""
        return [{"params": layer} for layer in params]

    initial = pipe.init(jax.random.key(0), x)
    params = averaged = tuple(layer.get("params", {}) for layer in initial)
    tx = pipe.optimizer(optax.adam(2e-3))
    opt_state = tx.init(params)
    for step in range(501):
        rows = rng.integers(len(x), size=64)
        loss, grads = loss_and_grads(variables(params), x[rows], labels[rows])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        averaged = average(averaged, params)
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}, gradient {norm(grads):.3f}")

    for name, tree in (("last", params), ("averaged", averaged)):
        share = accuracy(pipe.apply(variables(tree), x_test), labels_test)
        print(f"{name} parameters: accuracy {share:.1%} on {len(x_test)} unseen images")


if __name__ == "__main__":
    main()
