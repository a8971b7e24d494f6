"""AmoebaNet-D, of any depth and width: the model that GPipe was scaled with.

A cell maps the outputs of the two cells before it to its own, so that what goes from
layer to layer is a pair. Inside it makes five more states, each the sum of two
operations on states that are there already, and concatenates some. Which operations
on which states is data: `NORMAL` and `REDUCTION`; each reduction doubles the channels.

References:
  Real et al., `Regularized Evolution for Image Classifier Architecture Search
  <https://arxiv.org/abs/1802.01548>`_ (2018), for the cells.
  Huang et al., `GPipe <https://arxiv.org/abs/1811.06965>`_ (2019), for the sizes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from .resnet import TORCH_UNIFORM, convolution, linear, max_pool, norm

Pair = tuple[jax.Array, jax.Array]
# (x, stride, conv) -> y of as many channels; conv is what `Cell` makes convolutions by.
Operation = Callable[[jax.Array, int, Callable[..., jax.Array]], jax.Array]
_conv = partial(convolution, kernel_init=TORCH_UNIFORM)


def amoebanetd(
    num_classes: int = 1000,
    num_layers: int = 18,
    num_filters: int = 256,
    *,
    average_for_max: bool = False,
    dtype: Any = None,
) -> list[Any]:
    """Layers from images ``[batch, height, width, 3]`` to ``[batch, num_classes]``.

    They are three of the stem, three groups of normal cells with a reduction cell
    between two groups, and the classifier: ``num_layers + 6``. Height and width are
    halved five times; 7 x 7 are left of 224 x 224.

    Args:
      num_classes: the number of classes.
      num_layers: the number of normal cells, a multiple of 3.
      num_filters: channels of a state in the first group, a multiple of 8.
      average_for_max: whether the max pools of 3 x 3 are average pools, as they are by
        a slip in torchgpipe's model; the number of parameters is the same.
      dtype: of the computation; parameters and running statistics stay float32.

    Raises:
      ValueError: if one of the numbers is no such multiple.
    """
    if num_layers < 3 or num_layers % 3:
        raise ValueError(f"num_layers={num_layers}: needs a positive multiple of 3")
    if num_filters < 8 or num_filters % 8:
        raise ValueError(f"num_filters={num_filters}: needs a positive multiple of 8")
    cell = partial(Cell, average_for_max=average_for_max, dtype=dtype)

    def group(channels: int) -> list[Cell]:
        firsts = [number == 0 for number in range(num_layers // 3)]
        return [cell(NORMAL, channels, first, name="normal") for first in firsts]

    scores = linear(num_classes, 16 * num_filters, dtype)
    return [
        ReluConvNorm(num_filters // 4, (3, 3), (2, 2), dtype, name="stem1"),
        cell(REDUCTION, num_filters // 2, name="stem2"),
        cell(REDUCTION, num_filters, True, name="stem3"),
        *group(num_filters),
        cell(REDUCTION, 2 * num_filters, name="reduction"),
        *group(2 * num_filters),
        cell(REDUCTION, 4 * num_filters, name="reduction"),
        *group(4 * num_filters),
        nn.Sequential((mean_of_output, scores), name="classify"),
    ]


class ReluConvNorm(nn.Module):
    """The rectifier, a convolution without bias and a batch norm, in this order.

    Attributes:
      channels: what it makes.
      window: height and width of the kernel, odd.
      strides: along height and width.
      dtype: of the computation.
    """

    channels: int
    window: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps ``[batch, height, width, features]`` to ``[..., channels]``."""
        x = _conv(self.channels, self.window, self.strides, self.dtype)(nn.relu(x))
        return norm(self.dtype)(x, use_running_average=not train)


class FactorizedReduce(nn.Module):
    """Halves height and width: one convolution sees even rows and columns, one odd.

    Attributes:
      channels: what the two make together.
      dtype: of the computation.
    """

    channels: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps ``[batch, height, width, features]`` to half the height and width."""
        even = nn.relu(x)
        # The zeros are looked at where height or width is odd.
        odd = jnp.pad(even[:, 1:, 1:], ((0, 0), (0, 1), (0, 1), (0, 0)))
        half = partial(_conv, self.channels // 2, (1, 1), (2, 2), self.dtype)
        x = jnp.concatenate([half()(even), half()(odd)], axis=-1)
        return norm(self.dtype)(x, use_running_average=not train)


def none(x, stride, conv):
    """The state itself; no cell asks for it at another stride."""
    assert stride == 1
    return x


def average_pool_3x3(x, stride, conv):
    """The mean over what is in the image: padding counts for nothing."""
    window = (3, 3), (stride, stride), ((1, 1), (1, 1))
    # Flax would count in float32, and make all that follows float32.
    count = nn.pool(jnp.ones_like(x[:1, :, :, :1]), 0.0, jax.lax.add, *window)
    return nn.pool(x, 0.0, jax.lax.add, *window) / count


def max_pool_3x3(x, stride, conv):
    """The largest of nine; padding never is."""
    return max_pool(x, 3, stride)


def max_pool_2x2(x, stride, conv):
    """The largest of four, without padding."""
    return max_pool(x, 2, stride)


def conv_1x1(x, stride, conv):
    """One convolution."""
    return conv(x, x.shape[-1], (1, 1), (stride, stride))


def conv_3x3(x, stride, conv):
    """A convolution in a quarter of the channels."""
    inner = conv(x, x.shape[-1] // 4)
    inner = conv(inner, inner.shape[-1], (3, 3), (stride, stride))
    return conv(inner, x.shape[-1])


def conv_1x7_7x1(x, stride, conv):
    """A row and a column, in a quarter of the channels."""
    inner = conv(x, x.shape[-1] // 4)
    inner = conv(inner, inner.shape[-1], (1, 7), (1, stride))
    inner = conv(inner, inner.shape[-1], (7, 1), (stride, 1))
    return conv(inner, x.shape[-1])


class Genotype(NamedTuple):
    """What a cell is, but for its width.

    Attributes:
      pairs: of each new state, the operations that are added, and what each is given.
      concat: the states that make up the output.
      stride: of the operations that are applied to the first two states.
    """

    pairs: tuple[tuple[tuple[Operation, int], tuple[Operation, int]], ...]
    concat: tuple[int, ...]
    stride: int


# State 0 is made of the output of the cell before, state 1 of the one before that.
NORMAL = Genotype(
    pairs=(
        ((conv_1x1, 1), (max_pool_3x3, 1)),
        ((none, 1), (conv_1x7_7x1, 0)),
        ((conv_1x1, 0), (conv_1x7_7x1, 0)),
        ((max_pool_3x3, 2), (none, 2)),
        ((average_pool_3x3, 1), (conv_1x1, 5)),
    ),
    # Real et al. draw 4, 5, 6; these give the parameters that Huang et al. count.
    concat=(0, 3, 4, 6),
    stride=1,
)
REDUCTION = Genotype(
    pairs=(
        ((max_pool_2x2, 0), (max_pool_3x3, 0)),
        ((none, 2), (conv_3x3, 1)),
        ((conv_1x7_7x1, 2), (max_pool_3x3, 2)),
        ((none, 3), (max_pool_2x2, 1)),
        ((average_pool_3x3, 2), (conv_1x1, 3)),
    ),
    concat=(4, 5, 6),
    stride=2,
)


class Cell(nn.Module):
    """From the outputs of the two cells before to that of this one.

    Attributes:
      genotype: what it does.
      channels: those of each state.
      after_reduction: whether the older of the two outputs is twice as high and wide.
      average_for_max: as for `amoebanetd`.
      dtype: of the computation.
    """

    genotype: Genotype
    channels: int
    after_reduction: bool = False
    average_for_max: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Pair | jax.Array, train: bool) -> Pair:
        """Maps outputs of the last cell and the one before to its own and the last."""

        def conv(x, channels, window=(1, 1), strides=(1, 1)):
            return ReluConvNorm(channels, window, strides, self.dtype)(x, train)

        def result(operation: Operation, state: int) -> jax.Array:
            if self.average_for_max and operation is max_pool_3x3:
                operation = average_pool_3x3
            stride = self.genotype.stride if state < 2 else 1
            return operation(states[state], stride, conv)

        last, older = x if isinstance(x, tuple) else (x, x)  # stem1 makes no pair
        states = [conv(last, self.channels)]
        if self.after_reduction:
            states += [FactorizedReduce(self.channels, self.dtype)(older, train)]
        else:
            states += [conv(older, self.channels)]
        for left, right in self.genotype.pairs:
            states += [result(*left) + result(*right)]
        return jnp.concatenate([states[i] for i in self.genotype.concat], -1), last


def mean_of_output(x: Pair) -> jax.Array:
    """The mean of the first of a pair over height and width."""
    return jnp.mean(x[0], axis=(1, 2))
