"""GPT-2, as its users write it in Flax, trained through a pipeline.

The model is one module, with positions, a padding mask that every block takes,
dropout and a head tied to the embedding; nothing in it knows of a pipeline. The
program compares a step with the module itself on one device.

    python examples/gpt2.py
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arrays import largest_difference
from flax import linen as nn
from stdlib_text import VOCAB_SIZE, random_batches, read_corpus

import jpipe

STAGES, PAD = 4, 0


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes; GPT-2 small has 50257, 1024, 768, 12 and 12."""

    vocab_size: int = VOCAB_SIZE
    positions: int = 64
    width: int = 64
    heads: int = 4
    blocks: int = 6
    dropout: float = 0.1


class Attention(nn.Module):
    """Self-attention that sees what is before and what is not padding."""

    config: Config

    @nn.compact
    def __call__(self, h, mask, deterministic=True):
        """Vectors ``[batch, length, width]`` to the same, and the weights."""
        c, split = self.config, (*h.shape[:-1], self.config.heads, -1)
        q, k, v = (
            part.reshape(split)
            for part in jnp.split(nn.Dense(3 * c.width, name="c_attn")(h), 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        weights = nn.softmax(jnp.where(mask, scores, -1e9))  # [batch, head, from, to]
        weights = nn.Dropout(c.dropout)(weights, deterministic=deterministic)
        h = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape)
        return nn.Dense(c.width, name="c_proj")(h), weights


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm; returns a tuple, as theirs do."""

    config: Config

    @nn.compact
    def __call__(self, h, attention_mask, deterministic=True, output_attentions=False):
        """Vectors ``[batch, length, width]`` to the same."""
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=deterministic)
        a, weights = Attention(c, name="attn")(
            nn.LayerNorm(name="ln_1")(h), attention_mask, deterministic
        )
        h = h + drop(a)
        m = nn.gelu(nn.Dense(4 * c.width, name="c_fc")(nn.LayerNorm(name="ln_2")(h)))
        h = h + drop(nn.Dense(c.width, name="mlp_proj")(m))
        return (h, weights) if output_attentions else (h,)


class GPT2(nn.Module):
    """The language model: tokens ``[batch, length]`` to logits."""

    config: Config

    def setup(self):
        """Makes the parts."""
        c, init = self.config, nn.initializers.normal(0.02)
        self.wte = nn.Embed(c.vocab_size, c.width, embedding_init=init)
        self.wpe = nn.Embed(c.positions, c.width, embedding_init=init)
        self.drop = nn.Dropout(c.dropout)
        self.h = [Block(c) for _ in range(c.blocks)]
        self.ln_f = nn.LayerNorm()

    def embed(self, tokens, deterministic=True):
        """Tokens to vectors."""
        h = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[-1]))
        return self.drop(h, deterministic=deterministic)

    def head(self, h):
        """Vectors to logits, by the table of `embed`."""
        return self.wte.attend(self.ln_f(h))

    def __call__(self, tokens, deterministic=True):
        """Tokens ``[batch, length]`` to logits."""
        h, mask = self.embed(tokens, deterministic), mask_of(tokens)
        for block in self.h:
            h = block(h, mask, deterministic=deterministic)[0]
        return self.head(h)


def mask_of(tokens):
    """Who sees whom, ``[batch, 1, from, to]``."""
    return nn.combine_masks(nn.make_causal_mask(tokens), (tokens != PAD)[:, None, None])


# --------------------------------------------------------------------------- training


def loss_fn(logits, targets):
    """The total over the tokens that are there, and their number."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * (targets != PAD)).sum(), (targets != PAD).sum()


def main() -> None:
    """Trains, and compares a step with the module on one device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    config = Config()
    batches = random_batches(read_corpus().training, 32, config.positions, seed=0)
    x, targets = next(batches)
    model = GPT2(config)
    variables = model.init(jax.random.key(0), x)  # or pretrained ones

    pipe = jpipe.pipeline(
        model,
        num_microbatches=8,
        num_stages=STAGES,
        devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share them
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    state = pipe.init_train_state(jax.random.key(1), x, tx, variables=variables)
    step = pipe.train_step(loss_fn, tx, reduction="weighted")

    def whole(params):
        total, weight = loss_fn(model.apply({"params": params}, x), targets)
        return total / weight

    loss, expected = jax.value_and_grad(whole)(variables["params"])
    ours, grads = pipe.value_and_grad(loss_fn, reduction="weighted")(
        state.variables, x, targets, train=False
    )
    print(pipe)
    print(f"loss {ours:.6f}, of the module on one device {loss:.6f}")
    print(f"gradients differ by at most {largest_difference(grads, expected):.1e}")

    for number in range(steps):
        state, metrics = step(state, *next(batches))
        if number % 20 == 0:
            print(f"step {number}: {metrics['loss'] / np.log(2):.2f} bits per byte")


if __name__ == "__main__":
    main()
