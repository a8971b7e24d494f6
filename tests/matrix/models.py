"""The models of the matrix: small, and together with every kind of layer there is.

Each is a list of layers and a mini-batch, of a dtype and a number of examples, in the
vocabulary of `tests.fuzz`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

import jpipe

from ..fuzz.check import (
    Around,
    Averages,
    Batch,
    Block,
    Fill,
    Keep,
    NnxBlock,
    Odd,
    Scanned,
    Table,
    add,
    attend,
    batch_first,
    batch_norm,
    conv,
    dense,
    embed,
    floats,
    forget,
    group_norm,
    join,
    keep,
    layer_norm,
    masked,
    nnx_batch_norm,
    nnx_linear,
    noise,
    same,
    scale,
    stop,
    time_major,
    tokens,
    tree,
    unwrap,
    with_memory,
    wrap,
)

Layers = list[Any]


class Adapted(nn.Module):
    """A matrix beside a product of two small ones, such as of LoRA."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(1.0)
        down = self.param("lora_a", normal, (x.shape[-1], 1), self.dtype)
        up = self.param("lora_b", normal, (1, 3), self.dtype)
        return jnp.tanh(dense(3, self.dtype)(x) + x @ down @ up)


def digits(x):
    """Integers alone, which have no gradient."""
    return jnp.argmax(x, -1)


class Model(NamedTuple):
    """A model, and what is particular about it.

    Attributes:
      traits: words. "norm": gradients before it may be rounding errors; "batch": in
        training it looks at all examples; "random": in training it draws. "flat": some
        gradients are zero, or are not there; "bare": layers without parameters between
        others. The other words say themselves what is particular.
      layers: of a dtype.
      batch: of so many examples and a dtype.
    """

    traits: str
    layers: Callable[[Any], Layers]
    batch: Callable[[int, Any], Batch]


def _images(size: int, dtype: Any) -> Batch:
    return floats(size, 2, dtype)


def _rows(size: int, dtype: Any) -> Batch:
    return floats(size, 1, dtype)


def _vectors(size: int, dtype: Any) -> Batch:
    return floats(size, 0, dtype)


def _mlp(t: Any) -> Layers:
    return [dense(3, t), jnp.tanh, Block(t), jnp.sin, Block(t), dense(2, t)]


def _equal(t: Any) -> Layers:
    return [Adapted(t) for _ in range(8)]


def _convolutions(t: Any) -> Layers:
    return [conv(2, t), batch_norm(t), nn.relu, conv(2, t), join, dense(2, t)]


def _tied(t: Any) -> Layers:
    table, again = embed(t), dense(3, t)
    layers = [table, again, jnp.tanh, again, Block(t), again]
    return [*layers, jpipe.layer(table, "attend")]


def _methods(t: Any) -> Layers:
    table = Table(t)
    back = jpipe.layer(table, "back")
    return [dense(3, t), table, jnp.tanh, back, dense(3, t), jpipe.layer(table), back]


def _shared_child(t: Any) -> Layers:
    child, block = dense(3, t), Block(t)
    layers = [Around(child), jnp.sin, Around(block), child, Around(child)]
    return [*layers, jpipe.isolate(block, "other")]


def _nnx(t: Any) -> Layers:
    twice = NnxBlock(3, t)
    return [
        nnx_linear(3, 3, t),
        jnp.tanh,
        twice,
        dense(3, t),
        twice,
        nnx_linear(3, 2, t),
    ]


def _nnx_norm(t: Any) -> Layers:
    return [nnx_linear(3, 3, t), nnx_batch_norm(3, t), NnxBlock(3, t), dense(2, t)]


def _skips(t: Any) -> Layers:
    layers = [dense(3, t), keep("a"), Keep("b", t), jnp.sin, keep("c"), dense(3, t)]
    return [*layers, add("c"), add("a"), Block(t), add("b")]


def _isolated_skips(t: Any) -> Layers:
    def there(name: str, layer: Any) -> Any:
        return jpipe.isolate(jpipe.isolate(layer, name), "outer")

    layers = [Fill(t), there("a", keep("skip")), there("b", keep("skip")), masked]
    return [
        *layers,
        there("a", add("skip")),
        Around(dense(3, t)),
        there("b", add("skip")),
    ]


def _tree(t: Any) -> Layers:
    return [
        Fill(t),
        masked,
        Around(Block(t)),
        same,
        masked,
        Fill(t),
        unwrap,
        dense(2, t),
    ]


def _time_major(t: Any) -> Layers:
    return [batch_first, dense(3, t), group_norm(t), conv(1, t), jnp.tanh, wrap]


def _memory(t: Any) -> Layers:
    return [attend, keep("a"), dense(3, t), jnp.tanh, Block(t), add("a"), dense(2, t)]


def _constants(t: Any) -> Layers:
    return [scale(t), wrap, masked, Around(dense(3, t)), unwrap, scale(t), scale(t)]


def _dropout(t: Any) -> Layers:
    layers = [dense(3, t), nn.Dropout(0.5), Block(t, 0.5), noise, Block(t)]
    return [*layers, Around(Block(t, 0.5)), noise]


def _nnx_dropout(t: Any) -> Layers:
    layers = [dense(3, t), nn.Dropout(0.5), Block(t, 0.5), noise, NnxBlock(3, t, 0.5)]
    return [*layers, Around(Block(t, 0.5)), noise]


def _scans(t: Any) -> Layers:
    twice = Scanned(t)
    return [twice, dense(2, t), Scanned(t), jnp.sin, dense(3, t), twice, same]


def _remat_blocks(t: Any) -> Layers:
    block = nn.remat(Block, static_argnums=2)
    return [jnp.sin, block(t), block(t), NnxBlock(3, t), same, dense(2, t)]


def _odd(t: Any) -> Layers:
    return [Odd(t), jnp.tanh, Scanned(t), Odd(t), scale(t), dense(2, t), Odd(t)]


def _bare(t: Any) -> Layers:
    return [jnp.sin, same, dense(3, t), jnp.tanh, dense(2, t), jnp.cos]


def _integers(t: Any) -> Layers:
    return [dense(3, t), keep("x"), digits, embed(t), Block(t), add("x"), dense(3, t)]


def _averages(t: Any) -> Layers:
    return [dense(3, t), Averages(t), scale(t), jnp.tanh, dense(2, t), Averages(t)]


def _stopped(t: Any) -> Layers:
    layers = [dense(3, t), stop, dense(3, t), keep("a"), forget, NnxBlock(3, t)]
    return [*layers, add("a"), stop, dense(2, t)]


def _norms(t: Any) -> Layers:
    return [dense(3, t), layer_norm(t), Block(t), conv(1, t), jnp.tanh, dense(2, t)]


MODELS = {
    "mlp": Model("bare", _mlp, _vectors),
    "equal": Model("", _equal, _vectors),
    "conv_norm": Model("batch norm", _convolutions, _images),
    "tied": Model("shared", _tied, tokens),
    "methods": Model("shared", _methods, _rows),
    "child": Model("shared", _shared_child, _vectors),
    "nnx": Model("nnx shared", _nnx, _rows),
    "nnx_norm": Model("nnx batch norm", _nnx_norm, _vectors),
    "skips": Model("skips", _skips, _rows),
    "isolated": Model("skips tree", _isolated_skips, tree),
    "tree": Model("tree", _tree, tree),
    "time_major": Model("axes norm tree", _time_major, time_major),
    "memory": Model("axes skips", _memory, with_memory),
    "constants": Model("constants tree", _constants, _vectors),
    "dropout": Model("random", _dropout, _rows),
    "nnx_dropout": Model("random nnx", _nnx_dropout, _rows),
    "scans": Model("loops shared bare", _scans, _vectors),
    "remat": Model("loops nnx bare", _remat_blocks, _vectors),
    "odd": Model("flat constants loops", _odd, _rows),
    "bare": Model("bare", _bare, _vectors),
    "integers": Model("flat skips bare", _integers, _vectors),
    "averages": Model("batch constants", _averages, _rows),
    "stopped": Model("flat nnx skips", _stopped, _vectors),
    "norms": Model("norm", _norms, _rows),
}
