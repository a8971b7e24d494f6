"""The models in PyTorch, and its plain training step; see `workload`."""

# pyright: reportMissingImports=false
# PyTorch is optional and need not be where the types are checked.

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .measure import Training
from .workload import LEARNING_RATE, Case, Layer, Size, Weights

# Flax's default, as that of PyTorch is another.
EPSILON = 1e-6


def tensor(array: np.ndarray) -> Any:
    """A tensor with memory of its own."""
    return torch.from_numpy(np.array(array, order="C"))


def _linear(kernel: np.ndarray, bias: np.ndarray) -> Any:
    made = nn.Linear(*kernel.shape)
    _load(made, weight=kernel.T, bias=bias)
    return made


def _norm(scale: np.ndarray, bias: np.ndarray) -> Any:
    made = nn.LayerNorm(scale.size, eps=EPSILON)
    _load(made, weight=scale, bias=bias)
    return made


def _load(module: Any, **arrays: np.ndarray) -> None:
    made = {name: tensor(array) for name, array in arrays.items()}
    module.load_state_dict(made, strict=True)


class Block(nn.Module):
    """A pre-LN Transformer block with causal attention, as `models.block.Block`.

    Args:
      weights: as `workload` draws them.
      heads: of attention.
    """

    def __init__(self, weights: Weights, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("query", "key", "value", "out", "up", "down"):
            kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]
            self.add_module(name, _linear(kernel, bias))
        for name in ("norm1", "norm2"):
            made = _norm(weights[f"{name}/scale"], weights[f"{name}/bias"])
            self.add_module(name, made)

    def forward(self, x: Any) -> Any:
        """Float ``[batch, time, width]`` to the same."""
        h = self.norm1(x)
        heads = [
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        h = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(h)


def module(layer: Layer, size: Size) -> Any:
    """The PyTorch module of a layer, with its weights loaded."""
    weights = layer.weights()
    if layer.kind == "block":
        return Block(weights, size.heads)
    if layer.kind == "embed":
        made = nn.Embedding(*weights["table"].shape)
        _load(made, weight=weights["table"])
        return made
    if layer.kind == "relu":
        return nn.ReLU()
    return (_linear if layer.kind == "dense" else _norm)(**weights)


def half(case: Case, stage: int) -> Any:
    """One of the two stages, an `nn.Sequential`; nothing is made for the other."""
    first, _ = case.balance()
    layers = case.layers()
    own = layers[first:] if stage else layers[:first]
    made = nn.Sequential(*(module(layer, case.size) for layer in own))
    if case.remat == "compiled":
        made.compile()
    return made


class Recomputed(nn.Module):
    """A stage that keeps its input only and computes its forward again.

    Args:
      stage: what it runs.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Any) -> Any:
        """As the stage does."""
        return checkpoint(self.stage, x, use_reentrant=False)


def data(case: Case) -> tuple[Any, Any]:
    """The mini-batch, targets as PyTorch wants them."""
    x, targets = map(tensor, case.data())
    return x, targets.long()


def cross_entropy(logits: Any, labels: Any) -> Any:
    """A mean over examples, or over their tokens."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def optimizer(model: Any) -> Any:
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def count(model: Any) -> int:
    """How many numbers a model trains."""
    return sum(p.numel() for p in model.parameters())


def baseline(case: Case) -> Training:
    """The plain step: gradients add up in place over micro-batches."""
    stages = [
        Recomputed(half(case, number))
        if number in case.recomputed
        else half(case, number)
        for number in range(2)
    ]
    model = nn.Sequential(*stages)
    sgd = optimizer(model)
    x, targets = data(case)
    parts = list(
        zip(x.chunk(case.microbatches), targets.chunk(case.microbatches), strict=True)
    )

    def step() -> float:
        total = 0.0
        for part, labels in parts:
            loss = cross_entropy(model(part), labels) / case.microbatches
            loss.backward()
            total += loss.detach()
        sgd.step()
        sgd.zero_grad()
        return float(total)

    return Training(count(model), step)


def warm_up(case: Case) -> None:
    """Starts what every process of PyTorch begins with, on one thread."""
    torch.set_num_threads(1)
    # PyTorch imports a good part of itself with the first optimizer.
    number = nn.Linear(1, 1)
    number(torch.zeros(1, 1)).backward()
    optimizer(number).step()
