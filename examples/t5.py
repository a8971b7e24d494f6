"""An encoder-decoder in the manner of T5, and its loss function, through a pipeline.

What makes it hard to divide: one table of embeddings serves the encoder, the decoder
and the head; one table of relative positions serves all blocks of a side, wherever they
run; every decoder block reads what the encoder made, and masks. Nothing in the model or
in the loss knows of it: `jpipe.value_and_grad` stands in the place of
`jax.value_and_grad`. It learns to sort.

    python examples/t5.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arrays import largest_difference
from flax import linen as nn

import jpipe

STAGES, PAD, VOCAB, WIDTH, HEADS, BLOCKS, LENGTH = 4, 0, 32, 48, 4, 2, 12


class RelativeBias(nn.Module):
    """What a head adds for how far apart two tokens are; shared by the blocks."""

    buckets: int = 2 * LENGTH

    @nn.compact
    def __call__(self, length):
        """The bias ``[head, from, to]`` of so many tokens."""
        table = self.param("table", nn.initializers.normal(0.1), (self.buckets, HEADS))
        at = jnp.arange(length)
        apart = jnp.clip(at[None] - at[:, None] + LENGTH, 0, self.buckets - 1)
        return table[apart].transpose(2, 0, 1)


class Attention(nn.Module):
    """T5's attention: no bias in its products, no scaling, relative positions."""

    @nn.compact
    def __call__(self, h, memory, mask, bias=0.0):
        """What ``h`` finds in ``memory``, both ``[batch, length, width]``."""

        def heads(name, x):
            made = nn.Dense(WIDTH, use_bias=False, name=name)(x)
            return made.reshape(*x.shape[:-1], HEADS, -1)

        q, k, v = heads("q", h), heads("k", memory), heads("v", memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        weights = nn.softmax(jnp.where(mask, scores, -1e9))
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape)
        return nn.Dense(WIDTH, use_bias=False, name="o")(h)


class Block(nn.Module):
    """A block of the encoder, or of the decoder if it is given the encoder's output."""

    bias: Any
    rate: float = 0.1

    @nn.compact
    def __call__(self, h, mask, memory=None, memory_mask=None, *, deterministic):
        """Vectors ``[batch, length, width]`` to the same."""
        drop = nn.Dropout(self.rate, deterministic=deterministic)
        a = nn.RMSNorm()(h)
        h = h + drop(Attention(name="self")(a, a, mask, self.bias(h.shape[1])))
        if memory is not None:
            a = Attention(name="cross")(nn.RMSNorm()(h), memory, memory_mask)
            h = h + drop(a)
        m = nn.relu(nn.Dense(4 * WIDTH, use_bias=False, name="wi")(nn.RMSNorm()(h)))
        return h + drop(nn.Dense(WIDTH, use_bias=False, name="wo")(drop(m)))


def masks_of(tokens, shifted):
    """Who sees whom in the encoder, in the decoder, and across."""
    there = (tokens != PAD)[:, None, None]
    return {"encoder": there, "decoder": nn.make_causal_mask(shifted), "across": there}


class T5(nn.Module):
    """The model: source and shifted target to logits."""

    def setup(self):
        """Makes the parts."""
        self.embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(0.3))
        self.left, self.right = RelativeBias(), RelativeBias()
        self.encoder = [Block(self.left) for _ in range(BLOCKS)]
        self.decoder = [Block(self.right) for _ in range(BLOCKS)]

    def __call__(self, x, deterministic=True):
        """Source and shifted target to logits."""
        rest = {"deterministic": deterministic}
        masks = masks_of(x["source"], x["shifted"])
        memory, h = self.embed(x["source"]), self.embed(x["shifted"])
        for block in self.encoder:
            memory = block(memory, masks["encoder"], **rest)
        for block in self.decoder:
            h = block(h, masks["decoder"], memory, masks["across"], **rest)
        return self.embed.attend(nn.standardize(h))


# --------------------------------------------------------------------------- training


def batch_of(rng, size):
    """Letters, padded, and the same letters sorted."""
    source = np.zeros((size, LENGTH), np.int32)
    target = np.zeros((size, LENGTH), np.int32)
    for row, length in enumerate(rng.integers(4, LENGTH + 1, size)):
        letters = rng.integers(2, VOCAB, length)
        source[row, :length], target[row, :length] = letters, np.sort(letters)
    shifted = np.concatenate([np.ones((size, 1), np.int32), target[:, :-1]], axis=1)
    return {"source": source, "shifted": shifted}, target


def loss_fn(variables, x, targets, key=None):
    """The total over the tokens that are there, and their number."""
    rngs = None if key is None else {"dropout": key}
    logits: Any = T5().apply(variables, x, deterministic=key is None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * (targets != PAD)).sum(), (targets != PAD).sum()


def main() -> None:
    """Compares a step with the module on one device, and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=201, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    rng = np.random.default_rng(0)
    x, targets = batch_of(rng, 32)
    variables = T5().init(jax.random.key(0), x)
    grad_fn = jpipe.value_and_grad(
        loss_fn,
        num_microbatches=8,
        num_stages=STAGES,
        reduction="weighted",
        devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share them
    )

    def whole(variables):
        total, weight = loss_fn(variables, x, targets)
        return total / weight

    loss, expected = jax.value_and_grad(whole)(variables)
    variables = grad_fn.place(variables, x, targets)
    ours, grads = grad_fn(variables, x, targets)
    print(grad_fn)
    print(f"loss {ours:.6f}, of the module on one device {loss:.6f}")
    print(f"gradients differ by at most {largest_difference(grads, expected):.1e}")

    tx = grad_fn.optimizer(optax.adam(3e-3))
    apply_updates = grad_fn.jit(optax.apply_updates)
    opt_state, key = tx.init(variables), jax.random.key(1)
    for number in range(steps):
        batch = *batch_of(rng, 32), jax.random.fold_in(key, number)
        loss, grads = grad_fn(variables, *batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        variables = apply_updates(variables, updates)
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}")
    x, targets = batch_of(rng, 128)
    logits: Any = T5().apply(jax.device_put(variables, jax.devices()[0]), x)
    right = np.asarray(logits.argmax(-1) == targets)
    print(f"{right[targets != PAD].mean():.1%} of the letters are right")


if __name__ == "__main__":
    main()
