"""Trains a GPT whose layers are scanned, as large models write it, in four stages.

`nn.scan` traces and compiles one layer, however many there are, and stacks the
parameters of all layers along a new first axis. The pipeline divides the scan between
layers: each stage makes, holds, differentiates and updates its own layers only, and no
device ever holds a whole stack. Nothing in the model knows of that. The program takes
the same steps without a pipeline too; the exit status is 1 if a loss differs.

    python examples/scanned_gpt.py
    python examples/scanned_gpt.py --layers 16
"""

import argparse
import sys

import jax
import optax
from arrays import count_bytes
from flax import linen as nn
from stdlib_text import VOCAB_SIZE, random_batches, read_corpus

import jpipe

STAGES, WIDTH, HEADS, CONTEXT, BATCH_SIZE = 4, 64, 4, 64, 16
CLOSE = 1e-4  # float32 has 7 digits, and each program adds in its own order


class Layer(nn.Module):
    """Causal attention and a perceptron, in the form that `nn.scan` calls."""

    @nn.compact
    def __call__(self, x, mask):
        """Maps ``[batch, length, width]`` to the same shape, and nothing to stack."""
        h = nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        x = x + h
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class GPT(nn.Module):
    """A language model by layers that are stacked and scanned."""

    num_layers: int

    @nn.compact
    def __call__(self, tokens):
        """Maps integers ``[batch, length]`` to ``[batch, length, VOCAB_SIZE]``."""
        embed = nn.Embed(VOCAB_SIZE, WIDTH)
        init = nn.initializers.normal(0.02)
        x = embed(tokens) + self.param("positions", init, (CONTEXT, WIDTH))
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},  # layer i has row i of each parameter,
            split_rngs={"params": True},  # with initial values of its own
            # All layers read one mask.
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=self.num_layers,
        )
        x, _ = layers(name="layers")(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def loss_fn(logits, targets):
    """The mean over all tokens, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main() -> int:
    """Trains with and without a pipeline; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    options = parser.parse_args()
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    model = GPT(options.layers)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    batches = random_batches(read_corpus().training, BATCH_SIZE, CONTEXT, seed=0)
    x, targets = next(batches)

    devices = (STAGES * jax.devices())[:STAGES]  # with fewer, stages share them
    pipe = jpipe.pipeline(model, 4, num_stages=STAGES, devices=devices)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(loss_fn, tx)
    print(pipe, flush=True)
    for device, size in count_bytes((state.params, state.opt_state)).items():
        print(f"{device}: {size / 2**20:.2f} MiB of parameters and Adam")

    # The same model and optimizer on one device, without a pipeline.
    params = model.init(jax.random.key(0), x)["params"]
    opt_state = tx.init(params)

    def whole_loss(params, x, targets):
        return loss_fn(model.apply({"params": params}, x), targets)

    @jax.jit
    def plain_step(params, opt_state, x, targets):
        loss, grads = jax.value_and_grad(whole_loss)(params, x, targets)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    print("\nstep   pipeline  one device")
    worst = 0.0
    for number in range(options.steps):
        state, metrics = step(state, x, targets)
        params, opt_state, expected = plain_step(params, opt_state, x, targets)
        loss = float(metrics["loss"])
        worst = max(worst, abs(loss - float(expected)))
        if number % 10 == 0 or number == options.steps - 1:
            print(f"{number:4}   {loss:.6f}  {expected:.6f}", flush=True)
        x, targets = next(batches)
    print(f"losses differ by at most {worst:.1e}")
    return 0 if worst <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
