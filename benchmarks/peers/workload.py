"""The work that all sides do: sizes, weights and batches, as numpy arrays.

Nothing but numpy is needed here, so that each framework reads the same numbers: weights
are drawn once per layer from a seeded generator, and each side loads them into modules
of its own. Kernels are ``[in, out]``, as in Flax.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

# Names of arrays to arrays: the weights of one layer, none if it has none.
Weights = dict[str, np.ndarray]

LEARNING_RATE = 0.02


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are.

    Attributes:
      width: of the hidden activations.
      depth: Dense layers of the MLP, or Transformer blocks; even, for two equal stages.
      batch: examples in a mini-batch.
      time: tokens of an example; unused by the MLP.
      vocabulary: of the tokens; unused by the MLP.
      heads: of attention; unused by the MLP.
    """

    width: int
    depth: int
    batch: int
    time: int = 0
    vocabulary: int = 0
    heads: int = 0


SIZES = {
    "mlp": {
        "full": Size(1024, 8, 512),
        "small": Size(512, 4, 256),
        "tiny": Size(32, 2, 16),
    },
    "transformer": {
        "full": Size(256, 8, 32, time=64, vocabulary=256, heads=4),
        "small": Size(128, 4, 16, time=64, vocabulary=256, heads=4),
        "tiny": Size(16, 2, 16, time=8, vocabulary=16, heads=2),
    },
}
# Steps that are timed in each process, after those whose losses are compared.
STEPS = {"full": 6, "small": 6, "tiny": 2}
COMPARED = 3


@dataclass(frozen=True)
class Layer:
    """One layer of a model: what it is, and what its weights are drawn from.

    Attributes:
      kind: ``"dense"``, ``"relu"``, ``"embed"``, ``"block"`` or ``"norm"``.
      number: of the layer, the seed of its weights.
      inputs: the width of what it is given, or how many tokens there are.
      outputs: the width of what it makes.
      gain: of its activations, by those that it is given.
    """

    kind: str
    number: int
    inputs: int = 0
    outputs: int = 0
    gain: float = 1

    def weights(self) -> Weights:
        """Draws the weights: the same numbers each time, no others held meanwhile."""
        rng = np.random.default_rng([0, self.number])
        if self.kind == "dense":
            return _dense(rng, self.inputs, self.outputs, self.gain)
        if self.kind == "norm":
            return _norm(rng, self.outputs)
        if self.kind == "block":
            return _block(rng, self.outputs)
        shape = self.inputs, self.outputs
        return {} if self.kind == "relu" else {"table": _normal(rng, *shape)}


@dataclass(frozen=True)
class Case:
    """What one run does: given to its processes as JSON.

    Attributes:
      model: ``"mlp"`` or ``"transformer"``.
      scale: ``"full"``, ``"small"`` or ``"tiny"``.
      microbatches: how many a mini-batch is cut into, by the baseline as well.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"eager_1f1b"``; ``"baseline"`` is not a
        pipeline.
      remat: ``"none"``; ``"full"``: stages keep their inputs only; ``"default"``: each
        library as it comes; or ``"compiled"``: the same, with PyTorch's stages under
        `torch.compile`, which decides what autograd keeps.
      recomputed: of a baseline with remat ``"full"``: the stages whose forward it
        computes twice, those that the pipeline beside it computes twice.
    """

    model: str
    scale: str
    microbatches: int
    schedule: str = "baseline"
    remat: str = "none"
    recomputed: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Case":
        """From what `str` gives."""
        fields = json.loads(text)
        return cls(**(fields | {"recomputed": tuple(fields["recomputed"])}))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def size(self) -> Size:
        """Sizes of model and batch."""
        return SIZES[self.model][self.scale]

    @property
    def steps(self) -> int:
        """How many steps are timed in a process."""
        return STEPS[self.scale]

    def layers(self) -> list[Layer]:
        """The model."""
        return MODELS[self.model](self.size)

    def balance(self) -> list[int]:
        """Layers of each of the two stages: half of the blocks to each."""
        count, half = 0, self.size.depth // 2
        layers = self.layers()
        for number, layer in enumerate(layers):
            count += layer.kind in ("dense", "block")
            # Activations stay with the layer before them.
            if count == half + 1:
                return [number, len(layers) - number]
        raise ValueError(f"{self.model} has no two halves")

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """The mini-batch: inputs and targets."""
        size, rng = self.size, np.random.default_rng(1)
        if self.model == "mlp":
            x = rng.standard_normal((size.batch, size.width), dtype=np.float32)
            return x, rng.integers(size.width, size=size.batch, dtype=np.int32)
        shape = size.batch, size.time + 1
        tokens = rng.integers(size.vocabulary, size=shape, dtype=np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _dense(rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> Weights:
    """Weights whose outputs vary as their inputs do, times the gain; biases not zero.

    A bias or scale that is loaded into the wrong place would not show if it were all
    zeros or ones.
    """
    scale = np.float32(gain / math.sqrt(inputs))
    bias = np.float32(0.05) * _normal(rng, outputs)
    return {"kernel": scale * _normal(rng, inputs, outputs), "bias": bias}


def _norm(rng: np.random.Generator, width: int) -> Weights:
    scale, bias = np.float32(0.05) * _normal(rng, 2, width)
    return {"scale": 1 + scale, "bias": bias}


def _block(rng: np.random.Generator, width: int) -> Weights:
    """Of a pre-LN Transformer: attention, then an MLP of four times the width."""
    parts = {
        "norm1": _norm(rng, width),
        **{name: _dense(rng, width, width, 1) for name in ("query", "key", "value")},
        "out": _dense(rng, width, width, 0.5),
        "norm2": _norm(rng, width),
        "up": _dense(rng, width, 4 * width, 1),
        "down": _dense(rng, 4 * width, width, 0.5),
    }
    return {
        f"{part}/{name}": w for part, own in parts.items() for name, w in own.items()
    }


def _mlp(size: Size) -> list[Layer]:
    """Dense layers with ReLU between; the last gives logits of as many classes."""
    layers = []
    for number in range(0, 2 * size.depth, 2):
        # ReLU halves what passes: hidden layers make up for it.
        layers.append(Layer("dense", number, size.width, size.width, math.sqrt(2)))
        layers.append(Layer("relu", number + 1))
    layers.pop()
    layers[-1] = replace(layers[-1], gain=1)
    return layers


def _transformer(size: Size) -> list[Layer]:
    """A decoder: embedding, blocks, a last norm, logits of the next token."""
    width, last = size.width, size.depth + 1
    return [
        Layer("embed", 0, size.vocabulary, width),
        *(Layer("block", number, width, width) for number in range(1, last)),
        Layer("norm", last, width, width),
        Layer("dense", last + 1, width, size.vocabulary),
    ]


MODELS: dict[str, Callable[[Size], list[Layer]]] = {
    "mlp": _mlp,
    "transformer": _transformer,
}
