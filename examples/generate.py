"""Text from a GPT in stages: caches stay on the devices of their layers.

The model is trained for a while, then decodes token by token, with groups of prompts in
flight, greedily and by sampling. The program compares tokens with those of the module
itself on one device, and the time that both take.

    python examples/generate.py
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from stdlib_text import VOCAB_SIZE, random_batches, read_corpus

import jpipe

PyTree = Any
# (variables, tokens [prompts, 1]) -> logits [prompts, 1, vocab], variables
Step = Callable[[PyTree, jax.Array], tuple[jax.Array, PyTree]]


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    decode: bool

    @nn.compact
    def __call__(self, x):
        """Vectors ``[batch, length, width]`` to the same."""
        width = x.shape[-1]
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(4, decode=self.decode)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(h)


class GPT(nn.Module):
    """A GPT; with ``decode`` it takes a token at a time, and counts them."""

    blocks: int
    width: int
    length: int
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``."""
        embed = nn.Embed(VOCAB_SIZE, self.width)
        positions = jnp.arange(tokens.shape[1])
        if self.decode:
            is_made = self.has_variable("cache", "position")
            position = self.variable(
                "cache", "position", lambda: jnp.zeros((), jnp.int32)
            )
            if is_made:
                positions = positions + position.value
                position.value += 1
        x = embed(tokens) + nn.Embed(self.length, self.width)(positions)
        for _ in range(self.blocks):
            x = Block(self.decode)(x)
        return embed.attend(nn.LayerNorm()(x))


def cross_entropy(logits, targets):
    """The mean over all tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@functools.partial(jax.jit, static_argnums=3)
def choose(logits, key, position, temperature):
    """The next tokens ``[prompts, 1]``: the likeliest, or drawn at a temperature."""
    if not temperature:
        return logits.argmax(-1)
    key = jax.random.fold_in(key, position)
    return jax.random.categorical(key, logits / temperature)


def generate(
    step: Step, variables: PyTree, prompts: jax.Array, length: int, temperature: float
) -> jax.Array:
    """Continues prompts ``[prompts, n]`` to texts ``[prompts, length]``.

    Nothing waits: the next token goes from the last device to the first.
    """
    key = jax.random.key(0)
    tokens = jnp.split(prompts, prompts.shape[1], axis=1)
    for position in range(length - 1):
        logits, variables = step(variables, tokens[position])
        if position + 1 == len(tokens):
            tokens.append(choose(logits, key, position, temperature))
    return jnp.concatenate(jax.device_get(tokens), axis=1)


def train(model: GPT, steps: int, devices: Any) -> PyTree:
    """The parameters of the model after some steps."""
    batches = random_batches(read_corpus().training, 16, model.length, seed=0)
    pipe = jpipe.pipeline(model, num_microbatches=4, num_stages=2, devices=devices)
    tx = optax.adamw(2e-3)
    state = pipe.init_train_state(jax.random.key(0), next(batches).x, tx)
    step = pipe.train_step(cross_entropy, tx)
    for i in range(steps):
        state, metrics = step(state, *next(batches))
        if i % 50 == 0:
            print(f"step {i}: loss {metrics['loss']:.3f}")
    return state.params


def main() -> None:
    """Trains, generates in stages and on one device, and compares."""
    parser = argparse.ArgumentParser(description="Generates text in stages.")
    parser.add_argument("--steps", type=int, default=201)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 2)
    devices = (2 * jax.devices())[:2]  # where there is one, both stages run on it
    model = GPT(args.blocks, args.width, args.length)
    params = train(model, args.steps, devices)

    text = read_corpus().held_back
    rows = np.stack([text[i * 997 :][: args.length] for i in range(args.prompts)])
    prompts = jnp.asarray(rows[:, : args.length // 4])
    decoder = model.clone(decode=True)
    pipe = jpipe.pipeline(decoder, args.groups, num_stages=2, devices=devices)

    def in_stages(variables: PyTree, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        logits, state = pipe.apply(variables, tokens, mutable=["cache"], donate=True)
        return logits, {**variables, **state}

    @jax.jit
    def on_one_device(params: PyTree, cache: PyTree, tokens: jax.Array) -> Any:
        variables = {"params": params, **cache}
        return decoder.apply(variables, tokens, mutable=["cache"])

    def alone(variables: PyTree, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        params, cache = variables
        logits, cache = on_one_device(params, cache, tokens)
        return logits, (params, cache)

    cache = {"cache": pipe.init(jax.random.key(0), rows)["cache"]}
    whole = jax.device_put(({"params": params}, cache), devices[0])

    def run(step: Any, temperature: float) -> tuple[np.ndarray, float]:
        """The tokens of a text, and the seconds that they took."""
        variables = (whole[0]["params"], whole[1])
        if step is in_stages:
            # A step overwrites the cache: each text begins with a new one.
            fresh = jax.tree.map(jnp.copy, {**whole[0], **whole[1]})
            variables = pipe.place(fresh, rows)
        start = time.perf_counter()
        tokens = generate(step, variables, prompts, args.length, temperature)
        return np.asarray(tokens), time.perf_counter() - start

    for temperature in (0.0, 0.8):
        texts, seconds = [], []
        for step in (in_stages, alone):
            run(step, temperature)  # compiles
            tokens, elapsed = run(step, temperature)
            texts.append(tokens)
            seconds.append(elapsed)
        words = f"sampled at {temperature}" if temperature else "greedy"
        count = texts[0].size
        print(
            f"\n{words}: {(texts[0] == texts[1]).mean():.1%} of {count} tokens are "
            f"those of one device; {count / seconds[0]:,.0f} tokens/s in 2 stages with "
            f"{args.groups} groups, {count / seconds[1]:,.0f} on one device"
        )
        print(repr(bytes(texts[0][0].astype(np.uint8)).decode(errors="replace")))


if __name__ == "__main__":
    main()
