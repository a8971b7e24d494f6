"""Models that scan over their layers, in the forms in which large ones are written."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .small_models import (
    VOCAB,
    WIDTH,
    Block,
    Dense,
    Embed,
    Feedforward,
    LayerNorm,
    normal,
)

LAYERS = 4


class DecoderLayer(nn.Module):
    """A layer with broadcast positions and mask, and keys of its own for dropout."""

    rate: float

    @nn.compact
    def __call__(self, x, mask, train):
        return Block(self.rate)(x, mask, train=train), None


class Decoder(nn.Module):
    """Layers stacked along axis 1, each under remat with a policy."""

    rate: float = 0.2
    layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = Embed(VOCAB)
        x = nn.Dropout(self.rate, deterministic=not train)(embed(tokens))
        layer = nn.remat(
            DecoderLayer,
            policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            prevent_cse=False,
            static_argnums=(3,),
        )
        scanned = nn.scan(
            layer,
            variable_axes={"params": 1},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=self.layers,
        )
        mask = nn.make_causal_mask(tokens)
        x, _ = scanned(self.rate, name="layers")(x, mask, train)
        return embed.attend(LayerNorm()(x))


class PositionedLayer(nn.Module):
    """A layer that turns its input by positions, which all layers share."""

    @nn.compact
    def __call__(self, x, positions, mask):
        angles = positions[..., None] / 10.0 ** jnp.arange(WIDTH)
        return Block()(x * jnp.cos(angles), mask), None


class PositionedDecoder(nn.Module):
    """Layers that store nothing, stacked on axis 0; scaled embeddings."""

    @nn.compact
    def __call__(self, tokens):
        embed = Embed(VOCAB)
        layer = nn.remat(
            PositionedLayer,
            policy=jax.checkpoint_policies.nothing_saveable,
            prevent_cse=False,
        )
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=LAYERS,
        )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = embed(tokens) * WIDTH**0.5
        mask = nn.make_causal_mask(tokens)
        x, _ = scanned(name="layers")(x, positions.astype(x.dtype), mask)
        return embed.attend(LayerNorm()(x))


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return Block()(x, mask), None


class CrossLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask, memory, memory_mask):
        return Block()(x, mask, memory, memory_mask), None


class EncoderDecoder(nn.Module):
    """Two scans; each turn of the second reads the result of the first."""

    @nn.compact
    def __call__(self, source, targets):
        embed = Embed(VOCAB)
        options: Any = {
            "variable_axes": {"params": 1},
            "split_rngs": {"params": True},
            "length": LAYERS,
        }
        encoder = nn.scan(
            nn.remat(EncoderLayer, prevent_cse=False),
            in_axes=nn.broadcast,
            **options,
        )
        decoder = nn.scan(
            nn.remat(CrossLayer, prevent_cse=False),
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
            **options,
        )
        source_mask = nn.make_attention_mask(source > 0, source > 0)
        memory, _ = encoder(name="encoder")(embed(source), source_mask)
        memory = LayerNorm()(memory)
        x, _ = decoder(name="decoder")(
            embed(targets),
            nn.make_causal_mask(targets),
            memory,
            nn.make_attention_mask(targets > 0, source > 0),
        )
        return embed.attend(LayerNorm()(x))


class ImageLayer(nn.Module):
    """A layer that returns its activations beside its result."""

    @nn.compact
    def __call__(self, x, train):
        out = {"sa": x}
        x = Block()(x, train=train)
        out["mlp"] = x
        return x, out


class ScannedViT(nn.Module):
    """Each activation of each layer is a result, and some are read by their number."""

    @nn.compact
    def __call__(self, images, train=False):
        out = {}
        x = nn.Conv(WIDTH, (2, 2), strides=2, param_dtype=jnp.float64)(images)
        x = x.reshape(len(x), -1, WIDTH)
        x = x + self.param("positions", normal, x.shape[1:])
        scanned = nn.scan(
            nn.remat(ImageLayer, prevent_cse=False, static_argnums=(2,)),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, scan_out = scanned(name="encoderblock")(x, train)
        for layer in range(LAYERS):
            out[f"block{layer:02d}"] = jax.tree.map(lambda o, i=layer: o[i], scan_out)
        middle = out["block01"]["mlp"].mean(1)
        return Dense(3)(LayerNorm()(x).mean(1) + middle)


class PlainLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Feedforward()(x), None


class ScannedMLP(nn.Module):
    """Feed-forward layers, and a layer before and behind them."""

    layers: int = LAYERS

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            PlainLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = scanned(name="layers")(Dense(WIDTH)(x), None)
        return Dense(3)(x)


class RematScan(nn.Module):
    """Scans in scans: two blocks of two layers."""

    @nn.compact
    def __call__(self, x):
        layers = nn.remat_scan(Feedforward, lengths=(4, 2))
        return Dense(3)(layers(name="layers")(Dense(WIDTH)(x)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.inner = linear(WIDTH, 2 * WIDTH)
        self.outer = linear(2 * WIDTH, WIDTH)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x):
        return x + self.outer(jnp.tanh(self.inner(self.norm(x))))


class NnxScan(nnx.Module):
    """Layers made by `nnx.vmap` and called by `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NnxBlock(rngs)

        self.first = nnx.Linear(6, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.layers = make(rngs)
        self.last = nnx.Linear(WIDTH, 3, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return layer(x)

        return self.last(forward(self.first(x), self.layers))


class NnxByHand(NnxScan):
    """A `jax.lax.scan` by hand, of parameters stacked along axis 1."""

    def __init__(self, rngs):
        super().__init__(rngs)
        graph, state = nnx.split(self.layers)
        self.layers = nnx.merge(
            graph, jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), state)
        )

    def __call__(self, x):
        graph, params, others = nnx.split(self.layers, nnx.Param, ...)
        params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), params)
        others = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), others)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def layer(x, of_layer):
            return nnx.merge(graph, *of_layer)(x), None

        x, _ = jax.lax.scan(layer, self.first(x), (params, others))
        return self.last(x)


class Recurrent(nn.Module):
    """A scan over time, whose parameters are those of every step."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH, param_dtype=jnp.float64))(
            Embed(VOCAB)(tokens)
        )
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH, param_dtype=jnp.float64))(x)
        return Dense(VOCAB)(x)
