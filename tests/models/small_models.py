"""Models as their authors write them, small: of one, several and optional inputs."""

import functools
import itertools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

VOCAB, WIDTH, HEADS = 11, 8, 2
WIDE = {"param_dtype": jnp.float64}
Attention = functools.partial(nn.MultiHeadDotProductAttention, HEADS, **WIDE)
BatchNorm = functools.partial(nn.BatchNorm, momentum=0.9, **WIDE)
Conv = functools.partial(nn.Conv, **WIDE)
Dense = functools.partial(nn.Dense, **WIDE)
Embed = functools.partial(nn.Embed, features=WIDTH, **WIDE)
GroupNorm = functools.partial(nn.GroupNorm, num_groups=2, **WIDE)
LayerNorm = functools.partial(nn.LayerNorm, **WIDE)
normal = nn.initializers.normal(0.5, jnp.float64)


class Feedforward(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.gelu(Dense(2 * WIDTH)(LayerNorm()(x)))
        return x + nn.Dropout(self.rate)(Dense(WIDTH)(h), deterministic=not train)


class Block(nn.Module):
    """Self-attention, attention to a memory if there is one, and a feed-forward."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask=None, memory=None, memory_mask=None, train=False):
        attend = functools.partial(Attention, dropout_rate=self.rate)
        h = LayerNorm()(x)
        h = attend(deterministic=not train)(h, h, mask=mask)
        x = x + nn.Dropout(self.rate)(h, deterministic=not train)
        if memory is not None:
            h = attend(deterministic=not train)(
                LayerNorm()(x), memory, mask=memory_mask
            )
            x = x + nn.Dropout(self.rate)(h, deterministic=not train)
        return Feedforward(self.rate)(x, train)


class GPT(nn.Module):
    """A tied embedding, learned positions, a causal mask."""

    layers: int = 2
    rate: float = 0.2

    @nn.compact
    def __call__(self, tokens, mask=None, train=False, return_hidden=False):
        embed = Embed(VOCAB)
        mask = nn.combine_masks(nn.make_causal_mask(tokens), mask)
        x = embed(tokens) + self.param("positions", normal, (tokens.shape[1], WIDTH))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        for _ in range(self.layers):
            x = Block(self.rate)(x, mask, train=train)
        x = LayerNorm()(x)
        return x if return_hidden else embed.attend(x)


class Bert(nn.Module):
    """Three inputs and two outputs: of each token, and of the sequence."""

    @nn.compact
    def __call__(self, tokens, token_types, attention_mask, deterministic=True):
        mask = nn.make_attention_mask(attention_mask, attention_mask)
        positions = jnp.arange(tokens.shape[1])[None]
        x = Embed(VOCAB)(tokens) + Embed(2)(token_types) + Embed(16)(positions)
        x = nn.Dropout(0.1)(LayerNorm()(x), deterministic)
        for _ in range(2):
            x = Block()(x, mask)
        return Dense(VOCAB)(x), Dense(2)(jnp.tanh(Dense(WIDTH)(x[:, 0])))


class Translator(nn.Module):
    """An encoder and a decoder by methods, with one table for both and the output."""

    def setup(self):
        self.embed = Embed(VOCAB)
        self.encoder = [Block() for _ in range(2)]
        self.decoder = [Block()]
        self.norms = [LayerNorm(), LayerNorm()]

    def encode(self, x, mask):
        for block in self.encoder:
            x = block(x, mask)
        return self.norms[0](x)

    def decode(self, y, memory, mask, memory_mask):
        for block in self.decoder:
            y = block(y, mask, memory, memory_mask)
        return self.embed.attend(self.norms[1](y))

    def __call__(self, source, target):
        """The target is embedded before the encoder runs."""
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        x, y = self.embed(source), self.embed(shifted)
        memory = self.encode(x, nn.make_attention_mask(source > 0, source > 0))
        mask = nn.make_causal_mask(target)
        across = nn.make_attention_mask(target > 0, source > 0)
        return self.decode(y, memory, mask, across)


class ViT(nn.Module):
    """Patches, and a token of its own for the class."""

    @nn.compact
    def __call__(self, images):
        x = Conv(WIDTH, (2, 2), strides=(2, 2), padding="VALID")(images)
        x = x.reshape(len(x), -1, WIDTH)
        first = self.param("first", normal, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(first, (len(x), 1, 1)), x], axis=1)
        x = x + self.param("positions", normal, (1, *x.shape[1:]))
        for _ in range(2):
            x = Block()(x)
        return Dense(3)(LayerNorm()(x)[:, 0])


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = Conv(WIDTH, (2, 2), strides=(2, 2))(images).reshape(len(images), -1, WIDTH)
        for _ in range(2):
            h = LayerNorm()(x).swapaxes(1, 2)
            h = Dense(h.shape[-1])(nn.gelu(Dense(6)(h)))
            x = Feedforward()(x + h.swapaxes(1, 2))
        return Dense(3)(LayerNorm()(x).mean(1))


class Albert(nn.Module):
    """One block many times, and a narrow table that is projected."""

    @nn.compact
    def __call__(self, tokens):
        x = Dense(WIDTH)(Embed(VOCAB, features=3)(tokens))
        block = Block()
        for _ in range(3):
            x = block(x)
        return Dense(VOCAB)(x)


class Residual(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(BatchNorm, use_running_average=not train)
        stride = (self.stride, self.stride)
        y = nn.relu(norm()(Conv(self.features, (3, 3), stride, use_bias=False)(x)))
        y = norm()(Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = Conv(self.features, (1, 1), stride, use_bias=False, name="project")(x)
            x = norm(name="norm_project")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = Conv(4, (3, 3), use_bias=False, name="stem")(x)
        x = nn.relu(BatchNorm(use_running_average=not train)(x))
        for features, stride in ((4, 1), (8, 2)):
            x = Residual(features, stride)(x, train)
        return Dense(3)(x.mean((1, 2)))


class VAE(nn.Module):
    """Noise from a stream of its own; three outputs."""

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(Dense(16)(nn.tanh(Dense(16)(x))))
        mean, logvar = Dense(3)(h), Dense(3)(h)
        noise = jax.random.normal(self.make_rng("noise"), mean.shape, mean.dtype)
        z = mean + jnp.exp(0.5 * logvar) * noise
        return Dense(x.shape[-1])(nn.tanh(Dense(16)(z))), mean, logvar


class Seq2Seq(nn.Module):
    """Two recurrent networks, each a loop; the second starts where the first ends."""

    @nn.compact
    def __call__(self, source, target):
        embed = Embed(VOCAB)
        encoder = nn.RNN(nn.LSTMCell(WIDTH, **WIDE), return_carry=True)
        carry, _ = encoder(embed(source))
        decoder = nn.RNN(nn.LSTMCell(WIDTH, **WIDE))
        return Dense(VOCAB)(decoder(embed(target), initial_carry=carry))


class UNet(nn.Module):
    """Of an image and a time; what is made on the way down is read on the way up."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * 10.0 ** -jnp.arange(4)
        embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        embedded = nn.swish(Dense(WIDTH)(embedded))

        def block(x, features):
            h = Conv(features, (3, 3))(nn.swish(GroupNorm()(x)))
            h = h + Dense(features)(embedded)[:, None, None]
            return nn.swish(GroupNorm()(h)) + Conv(features, (1, 1))(x)

        x, skips = Conv(4, (3, 3))(x), []
        for features in (4, 8):
            x = block(x, features)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = Conv(8, (3, 3))(x)
        for features in (8, 4):
            x = x.repeat(2, 1).repeat(2, 2)
            x = block(jnp.concatenate([x, skips.pop()], -1), features)
        return Conv(2, (3, 3))(GroupNorm()(x))


class TwoTower(nn.Module):
    """Of images and texts; a learned temperature beside the two embeddings."""

    @nn.compact
    def __call__(self, images, tokens):
        a = images.reshape(len(images), -1)
        b = Embed(VOCAB)(tokens).mean(1)
        for _ in range(2):
            a = nn.gelu(Dense(16)(a))
        for _ in range(2):
            b = nn.gelu(Dense(16)(b))
        a, b = Dense(WIDTH)(a), Dense(WIDTH)(b)
        scale = self.param("scale", nn.initializers.ones, (), jnp.float64)
        unit = [v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b)]
        return (*unit, jnp.exp(scale))


class LoRADense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        down = self.param("lora_a", normal, (x.shape[-1], 2))
        up = self.param("lora_b", normal, (2, self.features))
        return Dense(self.features)(x) + x @ down @ up


class LoRA(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Dense(WIDTH)(x)
        for _ in range(2):
            x = x + nn.tanh(LoRADense(WIDTH)(LayerNorm()(x)))
        return LoRADense(3)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rate: float, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs, **WIDE) for _ in "ab"])
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, rngs=rngs, **WIDE
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **WIDE)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **WIDE)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norms[0](x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class NnxGPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.2):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **WIDE)
        self.positions = nnx.Param(normal(rngs.params(), (6, WIDTH)))
        self.blocks = nnx.List([NnxBlock(rate, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **WIDE)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class NnxCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        widths = (2, 4, 8, 8)
        self.convs, self.norms = nnx.List(), nnx.List()
        for before, after in itertools.pairwise(widths):
            self.convs.append(nnx.Conv(before, after, (3, 3), rngs=rngs, **WIDE))
            self.norms.append(nnx.BatchNorm(after, momentum=0.9, rngs=rngs, **WIDE))
        self.head = nnx.Linear(widths[-1], 3, rngs=rngs, **WIDE)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))
