"""A training loop of one's own: gradients from jpipe, one optax update per stage."""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jpipe

rng = np.random.default_rng(0)
pixels, labels = map(np.asarray, load_digits(return_X_y=True))
rows = rng.permutation(len(labels))
x, x_test = np.split(pixels[rows].astype(np.float32) / 16, [1500])
labels, labels_test = np.split(labels[rows], [1500])

jax.config.update("jax_num_cpu_devices", 3)
devices = [jax.devices()[i % jax.device_count()] for i in range(3)]
layers = [nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(10)]
stages = [slice(0, 2), slice(2, 4), slice(4, 5)]
pipe = jpipe.pipeline(layers, num_microbatches=4, balance=[2, 2, 1], devices=devices)
tx = optax.adam(2e-3)


@pipe.value_and_grad
def loss_and_grads(logits, labels):
    """The mean cross-entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def update(params, opt_state, grads):
    """Updates the layers of one stage, on the device that holds them."""
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def variables():
    """The parameters as jpipe takes them, one entry per layer."""
    return [{"params": layer} for stage in params for layer in stage]


made = [layer.get("params", {}) for layer in pipe.init(jax.random.key(0), x)]
params = [tuple(made[stage]) for stage in stages]
opt_states = [tx.init(stage) for stage in params]
for step in range(501):
    rows = rng.integers(len(x), size=64)
    loss, grads = loss_and_grads(variables(), x[rows], labels[rows])
    for i, stage in enumerate(stages):
        params[i], opt_states[i] = update(params[i], opt_states[i], grads[stage])
    if step % 100 == 0:
        print(f"step {step}: loss {loss:.4f}")

guesses = np.argmax(pipe.apply(variables(), x_test), axis=-1)
print(f"accuracy {np.mean(guesses == labels_test):.1%} on {len(x_test)} unseen images")
