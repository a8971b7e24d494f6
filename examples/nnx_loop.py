"""Trains an nnx model in a loop of its own, in three stages.

The model is one ordinary `nnx.Module` with dropout. `pipe.init` copies its values, each
to the device of its stage; gradients come from `pipe.value_and_grad`, the update from
any optax optimizer. At the end the values go back into the module.

    python examples/nnx_loop.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import read_digits, shuffled_batches
from flax import nnx

import jpipe

STAGES, WIDTH, BLOCKS = 3, 128, 6


class Block(nnx.Module):
    """A perceptron beside the residual stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, WIDTH]`` to the same shape."""
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Network(nnx.Module):
    """Images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.last = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to logits."""
        x = self.first(x.reshape(len(x), -1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    """Trains, puts the values back into the module, and tests that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="times over all images")
    epochs = parser.parse_args().epochs
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    devices = (STAGES * jax.devices())[:STAGES]  # with fewer, stages share them
    model = Network(nnx.Rngs(0))
    pipe = jpipe.pipeline(model, 4, num_stages=STAGES, devices=devices)
    x, x_test, labels, labels_test = read_digits()

    variables = pipe.init(None, x)  # the module has values: no key is needed
    print(pipe, flush=True)
    params = variables["params"]
    grad_fn = pipe.value_and_grad(loss_fn)
    tx = pipe.optimizer(optax.adamw(1e-3))  # runs each leaf where it is
    apply_updates = pipe.jit(optax.apply_updates)
    opt_state = tx.init(params)
    key = jax.random.key(1)
    number = 0
    for epoch in range(epochs):
        losses = []
        for rows in shuffled_batches(len(x), seed=epoch):
            rngs = jax.random.fold_in(key, number)  # of the dropout
            batch_variables = {**variables, "params": params}
            loss, grads = grad_fn(batch_variables, x[rows], labels[rows], rngs=rngs)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = apply_updates(params, updates)
            losses.append(loss)
            number += 1
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)

    nnx.update(model, jax.device_get(params))
    model.eval()
    accuracy = np.mean(model(jnp.asarray(x_test)).argmax(axis=-1) == labels_test)
    print(f"accuracy {accuracy:.1%} of the module on {len(x_test)} unseen images")


if __name__ == "__main__":
    main()
