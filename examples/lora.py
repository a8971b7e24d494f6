"""Adapts a trained network to new data through adapters of low rank (LoRA).

A network learns handwritten digits. Then it is shown the same digits upside down, and
only its adapters learn, a few percent of its parameters: the rest has no gradient, no
sum of gradients, no optimizer state, and keeps nothing for a backward. The same is
done with all parameters, for comparison.

    python examples/lora.py
"""

from typing import Any

import jax
import numpy as np
import optax
from digits import cross_entropy, read_digits
from flax import nnx

import jpipe

WIDTH, RANK, BLOCKS = 256, 4, 6
BATCH_SIZE, STEPS = 256, 60


class Block(nnx.Module):
    """A two-layer perceptron beside the residual stream, with adapters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.LoRALinear(WIDTH, 2 * WIDTH, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(2 * WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, WIDTH]`` to the same shape."""
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def network() -> list[nnx.Module]:
    """The layers, from pixels to logits."""
    rngs = nnx.Rngs(0)
    blocks = [Block(rngs) for _ in range(BLOCKS)]
    return [nnx.Linear(64, WIDTH, rngs=rngs), *blocks, nnx.Linear(WIDTH, 10, rngs=rngs)]


def main() -> None:
    """Trains on digits, then on what is new of them in two ways, and compares."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 4)
    devices = (4 * jax.devices())[:4]  # where there are fewer, stages share them
    pipe = jpipe.pipeline(network(), 4, balance=[2] * 4, devices=devices, remat="none")
    images, images_test, labels, labels_test = read_digits()
    upright = images.reshape(len(images), -1)
    upright_test = images_test.reshape(len(images_test), -1)
    turned = upright[:, ::-1]
    turned_test = upright_test[:, ::-1]

    def train(variables: Any, x: np.ndarray, trainable: Any) -> Any:
        """The variables after training some of the parameters."""
        tx = optax.adamw(3e-3)
        state = pipe.init_train_state(
            jax.random.key(0),
            x[:BATCH_SIZE],
            tx,
            variables=variables,
            trainable=trainable,
        )
        step = pipe.train_step(cross_entropy, tx, trainable=trainable)
        rng = np.random.default_rng(0)
        for _ in range(STEPS):
            rows = rng.integers(len(x), size=BATCH_SIZE)
            state, _ = step(state, x[rows], labels[rows])
        num_trained = sum(stage.num_trained or 0 for stage in step.plan.stages)
        # What a step holds on all devices, and what the optimizer remembers.
        num_bytes = sum(num_bytes for _, num_bytes in step.plan.peak_bytes)
        num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
        print(f"  {num_trained:,} parameters trained, {num_bytes / 2**20:.0f} MiB held")
        return state.variables

    def show_accuracy(variables: Any, x: np.ndarray, text: str) -> None:
        guesses = np.argmax(pipe.apply(variables, x), axis=-1)
        print(f"  {np.mean(guesses == labels_test):.1%} of {text}", flush=True)

    print("pretrains all but the adapters")
    pretrained = train(pipe.init(None, upright), upright, nnx.Not(nnx.LoRAParam))
    show_accuracy(pretrained, upright_test, "unseen digits")
    show_accuracy(pretrained, turned_test, "unseen digits upside down")
    print("learns digits upside down with all parameters")
    show_accuracy(train(pretrained, turned, None), turned_test, "them")
    print("learns digits upside down with the adapters")
    show_accuracy(train(pretrained, turned, nnx.LoRAParam), turned_test, "them")


if __name__ == "__main__":
    main()
