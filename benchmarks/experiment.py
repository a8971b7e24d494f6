"""What a published table consists of: experiments, and the work that they are about."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


@dataclass(frozen=True)
class Experiment:
    """One row of a published table: the model, how it is cut, what was published.

    Attributes:
      name: as it was published.
      balance: layers per stage; one stage is one device.
      batch: examples in a mini-batch.
      microbatches: the number of micro-batches that really ran.
      remat: what stages keep; ``"none"`` in one stage is training without a pipeline.
      model: the arguments of the model, such as ``(18, 256)``.
      options: further ones.
      group: rows that share a first row, by which speed-ups are divided.
      bandwidth: gigabytes per second between devices, if not that of the run.
      published: figures by name, such as ``"samples/s"``.
      ours: whether it is run here; else it is published only.
      only_measured: whether it is in no published table, and run by ``--measured``.
    """

    name: str
    balance: tuple[int, ...]
    batch: int
    microbatches: int
    remat: str = "except_last"
    model: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    bandwidth: float | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    ours: bool = True
    only_measured: bool = False

    @property
    def num_stages(self) -> int:
        """How many devices it needs."""
        return len(self.balance)


@dataclass(frozen=True)
class Work:
    """A model to train and what it is trained on, at some scale.

    Attributes:
      layers: the model.
      x: specs of one example, without the batch axis.
      targets: specs of its targets.
      loss: the loss function.
      tx: the optimizer.
      classes: labels and tokens are below it.
      by_layer: whether layers are so large that times of single layers add up to the
        time of a stage; else stages are timed as a whole.
    """

    layers: list[Any]
    x: PyTree
    targets: PyTree
    loss: Callable[[PyTree, PyTree], jax.Array]
    tx: optax.GradientTransformation
    classes: int = 1
    by_layer: bool = False

    def specs(self, batch: int) -> tuple[PyTree, PyTree]:
        """Input and targets of a mini-batch as specs."""

        def many(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *leaf.shape), leaf.dtype)

        return jax.tree.map(many, (self.x, self.targets))


@dataclass(frozen=True)
class Setting:
    """An experiment made to fit a scale.

    Attributes:
      work: the model and its data.
      balance: layers per stage.
      microbatches: their number.
      size: the examples in each.
    """

    work: Work
    balance: tuple[int, ...]
    microbatches: int
    size: int

    @property
    def batch(self) -> int:
        """The examples in a mini-batch."""
        return self.microbatches * self.size


# The most micro-batches, and the most examples in each.
_LIMITS = {"small": (32, 4), "tiny": (4, 2)}


def fit(
    experiment: Experiment, work: Work, scale: str, same_batch: bool = False
) -> Setting:
    """Keeps the shape of an experiment at a scale.

    At full scale sizes are those published, but that all micro-batches are equal: a
    batch that does not divide becomes the nearest one that does.

    Args:
      experiment: the row.
      work: its model and data.
      scale: one of `SCALES`.
      same_batch: whether all rows of the table have one mini-batch, however many
        micro-batches it is cut in.
    """
    count = experiment.microbatches
    size = round(experiment.batch / count)
    if scale != "full":
        most_count, most_size = _LIMITS[scale]
        count = min(count, most_count)
        size = min(size, most_size)
        if same_batch:
            size = min(experiment.batch, most_count) // count
    balance = scaled_balance(experiment.balance, len(work.layers))
    return Setting(work, balance, count, size)


def scaled_balance(balance: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The same shares of another number of layers, each stage with one at least.

    Example:
      >>> scaled_balance((30, 66, 84, 61), 8)
      (1, 2, 3, 2)
    """
    total, cuts, done = sum(balance), [0], 0
    for stage, layers in enumerate(balance, start=1):
        done += layers
        least, most = cuts[-1] + 1, num_layers - (len(balance) - stage)
        cuts.append(min(max(round(done * num_layers / total), least), most))
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def random_key(seed: int = 0) -> jax.Array:
    """A key of the generator that compiles fast: initial values are not the subject."""
    return jax.random.key(seed, impl="rbg")


def arrays(setting: Setting, first: Any, last: Any) -> tuple[PyTree, PyTree]:
    """Input and targets of a mini-batch, made where they are used.

    All micro-batches are equal: one of random numbers, and the memory of the others,
    are all that it takes, and none of it is the host's.

    Args:
      setting: whose sizes they have.
      first: the device of the input.
      last: the device of the targets.
    """
    work, count = setting.work, setting.microbatches

    def made(leaf: jax.ShapeDtypeStruct, device: Any) -> jax.Array:
        def make(key: jax.Array) -> jax.Array:
            shape = (setting.size, *leaf.shape)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                one = jax.random.uniform(key, shape, leaf.dtype)
            else:
                one = jax.random.randint(key, shape, 0, work.classes, leaf.dtype)
            return jnp.tile(one, (count, *[1] * len(leaf.shape)))

        return jax.jit(make)(jax.device_put(random_key(), device))

    return (
        jax.tree.map(lambda leaf: made(leaf, first), work.x),
        jax.tree.map(lambda leaf: made(leaf, last), work.targets),
    )


def fill(leaf: Any, random: np.random.Generator, below: int = 1) -> Any:
    """An array of a spec: random numbers, a key for a key."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(random_key(), leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return random.random(leaf.shape, np.float32).astype(leaf.dtype)
    return random.integers(0, below, leaf.shape).astype(leaf.dtype)


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Over examples, and over tokens if there are any."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mean_binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Over examples and pixels, from logits."""
    return optax.sigmoid_binary_cross_entropy(logits, targets).mean()


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Over all numbers."""
    return jnp.mean((outputs - targets) ** 2)
