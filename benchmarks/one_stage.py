"""One stage and M micro-batches against the step that a user writes by hand.

Run it with ``python -m benchmarks.one_stage transformer``; `benchmarks.overhead` runs
it in several processes, since the luck of one process with its memory allocator
outweighs what is measured.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

PyTree = Any

# XLA on CPU asks malloc for the temporary memory of every call. By default glibc gives
# large blocks back to the system at once, and the next call meets them as page faults:
# on GPUs, whose allocator keeps what is freed, nothing of the kind happens.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_ARENA_MAX": "1",
}
# Pages of 2 MiB, from glibc 2.35 on: fewer entries for the processor to look up.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Block(nn.Module):
    """A pre-LN Transformer block with causal attention."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        mask = nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(self.heads)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


def transformer() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, tokens and next tokens: 3.3 M parameters, batch 128 of 64 tokens."""
    width, vocabulary = 256, 256
    layers = [nn.Embed(vocabulary, width), *(Block(width, 4) for _ in range(4))]
    layers += [nn.LayerNorm(), nn.Dense(vocabulary)]
    tokens = jax.random.randint(jax.random.key(1), (128, 65), 0, vocabulary)
    return layers, tokens[:, :-1], tokens[:, 1:]


def cnn() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, images and labels: four convolutions, batch 64 of 32 x 32."""
    layers = [
        nn.Conv(32, (3, 3)),
        nn.relu,
        nn.Conv(64, (3, 3), strides=(2, 2)),
        nn.relu,
        nn.Conv(64, (3, 3)),
        nn.relu,
        nn.Conv(128, (3, 3), strides=(2, 2)),
        nn.relu,
        lambda x: jnp.mean(x, axis=(1, 2)),
        nn.Dense(10),
    ]
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))
    return layers, images, jax.random.randint(jax.random.key(2), (64,), 0, 10)


MODELS: dict[str, Callable[[], Any]] = {"transformer": transformer, "cnn": cnn}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """A mean over examples."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def scan_step(
    layers: Sequence[Any],
    tx: optax.GradientTransformation,
    num_microbatches: int,
    unroll: bool,
) -> Callable[..., Any]:
    """The step that a user writes by hand: one jit, `lax.scan` over micro-batches.

    XLA on CPU runs a convolution inside a loop far slower than outside, so the scan
    can be unrolled; then XLA may also run micro-batches side by side.
    """

    def loss(params: PyTree, x: Any, targets: jax.Array) -> jax.Array:
        for layer, own in zip(layers, params, strict=True):
            is_module = isinstance(layer, nn.Module)
            x = layer.apply({"params": own}, x) if is_module else layer(x)
        return cross_entropy(x, targets)

    def step(params: PyTree, opt_state: PyTree, x: jax.Array, targets: jax.Array):
        def split(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(num_microbatches, -1, *leaf.shape[1:])

        def body(sums: PyTree, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        parts = split(x), split(targets)
        sums, _ = jax.lax.scan(body, zeros, parts, unroll=unroll)
        value, grads = jax.tree.map(lambda leaf: leaf / num_microbatches, sums)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def throughput(model: Callable[[], Any], rounds: int) -> dict[str, float]:
    """One stage and M micro-batches against the hand-written step, same model.

    Args:
      model: gives layers, inputs and targets.
      rounds: how many steps of each side are timed, in turns.

    Returns:
      The median milliseconds and page faults of a step of each side; and the
      throughput of jpipe by that of each hand-written step, the median of the rounds'
      ratios: what slows the machine for a while slows both sides of a round.
    """
    layers, x, targets = model()
    number, tx = 8, optax.adamw(1e-3)
    pipe = jpipe.sequential(layers, number)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(cross_entropy, tx)

    def run_by_hand(by_hand: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda state: by_hand(*state, x, targets)[:2]

    # Copies: every side overwrites its parameters.
    copies = [jax.tree.map(jnp.array, state.params) for _ in range(2)]
    states: dict[str, Any] = {"jpipe": state}
    runs: dict[str, Any] = {"jpipe": lambda state: step(state, x, targets)[0]}
    for name, params in zip(("scan", "unrolled"), copies, strict=True):
        states[name] = params, tx.init(params)
        runs[name] = run_by_hand(scan_step(layers, tx, number, name == "unrolled"))

    figures: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            faults, start = _page_faults(), time.perf_counter()
            states[name] = jax.block_until_ready(runs[name](states[name]))
            seconds = time.perf_counter() - start
            if turn > 1:  # before, all sides compile and warm up
                figures[name].append((1e3 * seconds, _page_faults() - faults))
    result = {}
    for name, pairs in figures.items():
        columns = zip(*pairs, strict=True)
        result[f"{name}_ms"], result[f"{name}_faults"] = map(statistics.median, columns)
    for name in ("scan", "unrolled"):
        rounds_of_both = zip(figures[name], figures["jpipe"], strict=True)
        ratios = [theirs / ours for (theirs, _), (ours, _) in rounds_of_both]
        result[f"by_{name}"] = statistics.median(ratios)
    return result


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Prints `throughput` of one model as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    options = parser.parse_args()
    print(json.dumps(throughput(MODELS[options.model], options.rounds)))


if __name__ == "__main__":
    main()
