"""What the first step costs, which compiles, by the same model as one plain `jax.jit`.

Run it with ``python -m benchmarks.overhead.first_step gpt 2``; with ``--from-init`` it
counts the variables and an evaluation too, which programs of their own make.
``python -m benchmarks.overhead --part first-step``, or ``from-init``, runs each side in
processes of its own, in turns, since a process compiles nothing twice.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import monitoring

import jpipe

from ..experiment import mean_cross_entropy

PyTree = Any
# The event that JAX records for each program that XLA compiles.
_COMPILED = "/jax/core/compile/backend_compile_duration"
WIDTH, HEADS, MICROBATCHES, BATCH, LENGTH, VOCABULARY = 64, 4, 4, 16, 32, 64


class Block(nn.Module):
    """A pre-LN Transformer block, with dropout or without."""

    drop: float = 0.0
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        h = nn.LayerNorm()(x)
        attend = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=self.drop)
        x = x + nn.Dropout(self.drop)(
            attend(h, mask=mask, deterministic=not train), deterministic=not train
        )
        h = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        h = nn.Dense(WIDTH)(nn.gelu(h))
        return x + nn.Dropout(self.drop)(h, deterministic=not train)


class TurnOfScan(nn.Module):
    """A block as `nn.scan` calls it."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Float ``[batch, time, width]`` to the same, and no result of its own."""
        return Block(causal=True)(x), None


class ScannedBlocks(nn.Module):
    """Equal blocks whose parameters are stacked."""

    count: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        scanned = nn.scan(
            TurnOfScan,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.count,
        )
        return scanned()(x, None)[0]


class Embed(nn.Module):
    """Tokens or patches, with their positions."""

    tokens: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Tokens or images to float ``[batch, time, width]``."""
        if self.tokens:
            h = nn.Embed(VOCABULARY, WIDTH)(x)
        else:
            h = nn.Conv(WIDTH, (4, 4), (4, 4))(x).reshape(len(x), -1, WIDTH)
        init = nn.initializers.normal(0.02)
        return h + self.param("positions", init, h.shape[1:])


class Head(nn.Module):
    """The last layer."""

    pooled: bool
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to logits."""
        x = nn.LayerNorm()(x)
        return nn.Dense(self.size)(x.mean(1) if self.pooled else x)


class Model(NamedTuple):
    """A model, and what it is trained on.

    Attributes:
      layers: one after the other.
      x: the input of a mini-batch.
      targets: its targets.
    """

    layers: Sequence[Any]
    x: jax.Array
    targets: jax.Array


def _mlp() -> Model:
    layers = [nn.Dense(512), nn.relu, nn.Dense(512), nn.relu, nn.Dense(10)]
    x = jax.random.normal(jax.random.key(1), (64, 784))
    return Model(layers, x, jnp.arange(64) % 10)


def _vit() -> Model:
    layers = [Embed(False), *(Block() for _ in range(4)), Head(True, 10)]
    x = jax.random.normal(jax.random.key(1), (BATCH, 16, 16, 3))
    return Model(layers, x, jnp.arange(BATCH) % 10)


def _blocks(drops: Sequence[float]) -> list[Block]:
    return [Block(drop, causal=True) for drop in drops]


def _gpt(blocks: Sequence[Any]) -> Model:
    layers = [Embed(True), *blocks, Head(False, VOCABULARY)]
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)
    return Model(layers, tokens, jnp.roll(tokens, -1, 1))


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": _mlp,
    "vit": _vit,
    "gpt": lambda: _gpt(_blocks([0.0] * 4)),
    "gpt-dropout": lambda: _gpt(_blocks([0.1] * 4)),
    "unequal-drops": lambda: _gpt(_blocks([0.02 * (i + 1) for i in range(8)])),
    "loop-8": lambda: _gpt(_blocks([0.0] * 8)),
    "loop-32": lambda: _gpt(_blocks([0.0] * 32)),
    "scan-8": lambda: _gpt([ScannedBlocks(8)]),
    "scan-32": lambda: _gpt([ScannedBlocks(32)]),
    "scan-128": lambda: _gpt([ScannedBlocks(128)]),
}


class Training(NamedTuple):
    """What a side does, in this order.

    Attributes:
      init: ``() -> state``.
      evaluate: ``state -> outputs``, without dropout; ``None`` if it is not measured.
      step: ``state -> state``.
    """

    init: Callable[[], PyTree]
    evaluate: Callable[[PyTree], Any] | None
    step: Callable[[PyTree], PyTree]


def _apply(
    layers: Sequence[Any],
    params: Sequence[PyTree],
    x: Any,
    key: jax.Array | None = None,
    first: int = 0,
) -> Any:
    """The layers in a row, the first of which has this number; a key for training."""
    for i, (layer, own) in enumerate(zip(layers, params, strict=True), start=first):
        if isinstance(layer, Block) and key is not None:
            rngs = {"dropout": jax.random.fold_in(key, i)}
            x = layer.apply(own, x, train=True, rngs=rngs)
        else:
            x = layer.apply(own, x) if isinstance(layer, nn.Module) else layer(x)
    return x


def _initial(model: Model, key: jax.Array) -> list[PyTree]:
    x, params = model.x, list[PyTree]()
    for i, layer in enumerate(model.layers):
        params.append({})
        if isinstance(layer, nn.Module):
            x, params[-1] = layer.init_with_output(jax.random.fold_in(key, i), x)
        else:
            x = layer(x)
    return params


class Whole(nn.Module):
    """The layers as one module."""

    layers: Sequence[Any]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """The input of the first layer to the output of the last."""
        for layer in self.layers:
            x = layer(x, train) if isinstance(layer, Block) else layer(x)
        return x


def pipeline(model: Model, stages: int) -> jpipe.Pipeline:
    """The layers in so many stages, their blocks divided equally."""
    return jpipe.pipeline(model.layers, MICROBATCHES, balance=balanced(model, stages))


def module_pipeline(model: Model, stages: int) -> jpipe.Pipeline:
    """The layers as one module, which is divided by itself."""
    return jpipe.pipeline(Whole(model.layers), MICROBATCHES, num_stages=stages)


def pipelined(
    model: Model, stages: int, build: Callable[[Model, int], jpipe.Pipeline]
) -> Training:
    """A pipeline."""
    pipe = build(model, stages)
    tx = optax.adamw(1e-3)

    def step(state: jpipe.TrainState) -> jpipe.TrainState:
        train_step = pipe.train_step(mean_cross_entropy, tx)
        return train_step(state, model.x, model.targets)[0]

    return Training(
        init=lambda: pipe.init_train_state(jax.random.key(0), model.x, tx),
        evaluate=lambda state: pipe.apply(state.variables, model.x),
        step=step,
    )


def balanced(model: Model, stages: int) -> list[int]:
    """As many blocks in each; the first and the last have a layer more."""
    blocks = len(model.layers) - 2
    balance = [blocks * (i + 1) // stages - blocks * i // stages for i in range(stages)]
    balance[0] += 1
    balance[-1] += 1
    return balance


def plain(model: Model) -> Training:
    """The same on one device, each function one program of the whole batch."""
    tx = optax.adamw(1e-3)

    @jax.jit
    def init(key: jax.Array) -> PyTree:
        params = _initial(model, key)
        return params, tx.init(params), key

    @jax.jit
    def evaluate(params: list[PyTree]) -> jax.Array:
        return _apply(model.layers, params, model.x)

    def loss(params: list[PyTree], key: jax.Array) -> jax.Array:
        y = _apply(model.layers, params, model.x, key)
        return mean_cross_entropy(y, model.targets)

    @jax.jit
    def step(state: PyTree) -> PyTree:
        params, opt_state, key = state
        key, own = jax.random.split(key)
        grads = jax.grad(loss)(params, own)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    return Training(
        init=lambda: init(jax.random.key(0)),
        evaluate=lambda state: evaluate(state[0]),
        step=step,
    )


def by_hand(model: Model) -> Training:
    """Two stages on two devices, as few programs as it takes, each by `jax.jit`.

    Nothing is computed again, checked or scheduled: what is left is what XLA takes for
    a forward, a backward, a last stage and two updates, as programs of their own.
    """
    tx, count = optax.adamw(1e-3), balanced(model, 2)[0]
    devices = jax.devices()[:2]
    add = partial(jax.tree.map, jnp.add)

    @jax.jit
    def forward(params: PyTree, x: jax.Array, key: jax.Array) -> Any:
        own = model.layers[:count]
        return jax.vjp(lambda params: _apply(own, params, x, key, 0), params)

    @partial(jax.jit, donate_argnums=2)
    def backward(pullback: Any, cotangent: jax.Array, sums: PyTree) -> PyTree:
        return add(sums, pullback(cotangent)[0])

    @partial(jax.jit, donate_argnums=4)
    def last(
        params: PyTree, y: jax.Array, targets: jax.Array, key: jax.Array, sums: PyTree
    ) -> Any:
        def loss(params: PyTree, y: jax.Array) -> jax.Array:
            outputs = _apply(model.layers[count:], params, y, key, count)
            return mean_cross_entropy(outputs, targets)

        grads, cotangent = jax.grad(loss, (0, 1))(params, y)
        return add(sums, grads), cotangent

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: PyTree, opt_state: PyTree, sums: PyTree) -> Any:
        grads = jax.tree.map(lambda leaf: leaf / MICROBATCHES, sums)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def advance(key: jax.Array) -> list[jax.Array]:
        return list(jax.random.split(key, MICROBATCHES + 1))

    # On its device: sums elsewhere would make other programs of the first call.
    zeros = [
        jax.jit(
            partial(jax.tree.map, jnp.zeros_like),
            out_shardings=jax.sharding.SingleDeviceSharding(device),
        )
        for device in devices
    ]

    def step(state: PyTree) -> PyTree:
        params, opt_state, key = state
        sums = [make(own) for make, own in zip(zeros, params, strict=True)]
        key, *keys = advance(key)
        parts = (np.split(np.asarray(a), MICROBATCHES) for a in model[1:])
        for x, targets, own in zip(*parts, keys, strict=True):
            at = [jax.device_put(own, device) for device in devices]
            y, pullback = forward(params[0], jax.device_put(x, devices[0]), at[0])
            y, targets = jax.device_put((y, targets), devices[1])
            sums[1], cotangent = last(params[1], y, targets, at[1], sums[1])
            sums[0] = backward(pullback, jax.device_put(cotangent, devices[0]), sums[0])
        new = [update(*own) for own in zip(params, opt_state, sums, strict=True)]
        return *map(list, zip(*new, strict=True)), key

    def init() -> PyTree:
        whole = _initial(model, jax.random.key(0))
        params = [
            jax.device_put(own, device)
            for own, device in zip((whole[:count], whole[count:]), devices, strict=True)
        ]
        return params, [jax.jit(tx.init)(own) for own in params], jax.random.key(0)

    return Training(init, evaluate=None, step=step)


SIDES: dict[str, Callable[[Model], Training]] = {
    "plain": plain,
    "hand": by_hand,
    **{
        f"{stages}": partial(pipelined, stages=stages, build=pipeline)
        for stages in (1, 2, 4)
    },
    **{
        f"model-{stages}": partial(pipelined, stages=stages, build=module_pipeline)
        for stages in (2, 4)
    },
}


def first_step(name: str, side: str, *, from_init: bool = False) -> dict[str, float]:
    """What a first step takes: tracing, compiling and one run.

    Args:
      name: a key of `MODELS`.
      side: a key of `SIDES`.
      from_init: True to count what `Training` does before it, too.

    Returns:
      Seconds of the clock and of the processor; the number of programs that XLA
      compiles, and its seconds, added up over threads.

    Raises:
      ValueError: if all is to be counted of a side that does not evaluate.
    """
    training = SIDES[side](MODELS[name]())
    evaluate = training.evaluate
    if from_init and evaluate is None:
        raise ValueError(f"{side} does not evaluate, so it has a first step alone")
    state = None if from_init else jax.block_until_ready(training.init())
    compile_seconds: list[float] = []

    def note_duration(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            compile_seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(note_duration)
    wall, cpu = time.perf_counter(), time.process_time()
    if from_init and evaluate is not None:
        state = jax.block_until_ready(training.init())
        jax.block_until_ready(evaluate(state))
    jax.block_until_ready(training.step(state))
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "programs": len(compile_seconds),
        "compile_s": sum(compile_seconds),
    }


def main() -> None:
    """Prints one side as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("side", choices=list(SIDES))
    parser.add_argument(
        "--from-init",
        action="store_true",
        help="count the variables and an evaluation before the step, too",
    )
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    seconds = first_step(options.model, options.side, from_init=options.from_init)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
