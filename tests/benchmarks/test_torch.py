"""Initial values and operations of the convolutional models against PyTorch's."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models import amoebanet
from benchmarks.models.resnet import convolution, linear, max_pool, resnet101

from .. import reference as ref
from .convolutions import DOUBLE, conv, largest, mean_inside, relu


def test_initial_values_are_those_of_torch():
    x = jnp.ones((1, 8, 8, 25))
    layers = [
        linear(400, 25),
        amoebanet.ReluConvNorm(400, (1, 7), (1, 2)),
        resnet101(width=50)[5],
    ]

    @jax.jit
    def init(key):
        switches = [], [False], []
        return [
            layer.init(key, x, *own)["params"]
            for layer, own in zip(layers, switches, strict=True)
        ]

    dense, cell, conv = init(jax.random.key(0))
    assert within(dense["kernel"], 1 / math.sqrt(25))
    assert within(dense["bias"], 1 / math.sqrt(25))
    assert within(cell["Conv_0"]["kernel"], 1 / math.sqrt(7 * 25))
    deviation = math.sqrt(2 / 50)
    assert jnp.std(conv["kernel"]) == pytest.approx(deviation, rel=0.1)
    assert jnp.abs(conv["kernel"]).max() > 2.5 * deviation  # not truncated


def within(values, bound):
    """Whether they are uniform between plus and minus a bound."""
    largest = float(jnp.abs(values).max())
    uniform = pytest.approx(bound / math.sqrt(3), rel=0.1)
    return 0.97 * bound < largest <= bound and jnp.std(values) == uniform


class TestAgainstTorch:
    """What both the models and the arithmetic by hand are made of, where torch is."""

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.fixture
    def x(self):
        # Odd and even, so that both kinds of padding are met.
        return np.random.default_rng(2).standard_normal((2, 9, 8, 4))

    def of(self, module, x, *weights):
        """What a torch module makes of images whose channels are last."""
        import torch

        for own, given in zip(module.parameters(), weights, strict=True):
            own.data = torch.from_numpy(np.ascontiguousarray(given))
        y = module.eval()(torch.from_numpy(x).permute(0, 3, 1, 2))
        return y.detach().permute(0, 2, 3, 1).numpy()

    @pytest.mark.parametrize("stride", [1, 2])
    def test_pools(self, double, torch, x, stride):
        average = torch.nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        expected = self.of(average, x)
        ref.assert_close(mean_inside(x, stride), expected, DOUBLE)
        given = amoebanet.average_pool_3x3(jnp.asarray(x), stride, None)
        ref.assert_close(given, expected, DOUBLE)
        for size, padding in ((3, 1), (2, 0)):
            expected = self.of(torch.nn.MaxPool2d(size, stride, padding), x)
            ref.assert_close(largest(x, size, stride, padding), expected, DOUBLE)
            ref.assert_close(max_pool(jnp.asarray(x), size, stride), expected, DOUBLE)

    @pytest.mark.parametrize(
        ("size", "strides", "padding"),
        [
            ((7, 7), (2, 2), (3, 3)),
            ((3, 3), (2, 2), (1, 1)),
            ((1, 1), (2, 2), (0, 0)),
            ((1, 7), (1, 2), (0, 3)),
            ((7, 1), (2, 1), (3, 0)),
        ],
    )
    def test_convolutions(self, double, torch, x, size, strides, padding):
        kernel = np.random.default_rng(3).standard_normal((*size, 4, 6))
        module = torch.nn.Conv2d(4, 6, size, strides, padding, bias=False)
        expected = self.of(module, x, kernel.transpose(3, 2, 0, 1))
        ref.assert_close(conv(x, kernel, strides, padding), expected, DOUBLE)
        given = convolution(6, size, strides).apply({"params": {"kernel": kernel}}, x)
        ref.assert_close(given, expected, DOUBLE)

    @pytest.mark.parametrize("rows", [8, 9])
    def test_factorized_reduce(self, double, torch, rows):
        rng = np.random.default_rng(4)
        x = rng.standard_normal((2, rows, rows, 4))
        first, second = rng.standard_normal((2, 1, 1, 4, 3))
        layer = amoebanet.FactorizedReduce(6)
        one = np.ones(6)
        convs = {"Conv_0": {"kernel": first}, "Conv_1": {"kernel": second}}
        variables = {
            "params": {**convs, "BatchNorm_0": {"scale": one, "bias": one}},
            "batch_stats": {"BatchNorm_0": {"mean": one, "var": one}},
        }
        convs = [torch.nn.Conv2d(4, 3, 1, 2, bias=False) for _ in range(2)]
        shifted = np.zeros_like(x)
        shifted[:, :-1, :-1] = x[:, 1:, 1:]
        halves = [
            self.of(convs[0], relu(x), first.transpose(3, 2, 0, 1)),
            self.of(convs[1], relu(shifted), second.transpose(3, 2, 0, 1)),
        ]
        # What the norm has is 1, whatever it is.
        expected = (np.concatenate(halves, -1) - 1) / np.sqrt(1 + 1e-5) + 1
        ref.assert_close(layer.apply(variables, x, False), expected, DOUBLE)
