"""Batch norm: running statistics of the whole mini-batch, committed once.

A `flax` batch norm normalizes each micro-batch by itself, as it would normalize the
shard of a data-parallel worker. Its running statistics should not show that: they
are those of the mini-batch. So it is run with a momentum of zero, which leaves the
statistics of the micro-batch where the running ones would be; these are merged as
Chan et al. do, which loses nothing to cancellation; and at the end of the mini-batch
the running statistics move once, with the momentum that the user chose.

References:
  Chan, Golub, LeVeque, `Algorithms for Computing the Sample Variance
  <https://doi.org/10.1080/00031305.1983.10483115>`_ (1983).
"""

import itertools
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import linen


class Norm(NamedTuple):
    """A batch norm that was met.

    Attributes:
      path: the number of its layer in the stage, then the names that lead to it.
      momentum: how much of the running statistics a mini-batch leaves.
    """

    path: tuple[Any, ...]
    momentum: float


@dataclass
class Record:
    """The batch norms of a stage, as its layers are traced.

    Attributes:
      layer: the number of the layer that is being applied.
      norms: what was met so far.
      written: the running means that they left, with the numbers of their layers.
    """

    layer: int = 0
    norms: list[Norm] = field(default_factory=list)
    written: list[tuple[int, Any]] = field(default_factory=list)


_current: ContextVar[Record | None] = ContextVar("jpipe_batchnorm", default=None)
# Its value is a part of the key by which JAX finds what it has traced.
_met = jax.make_user_context()
_layers = itertools.count(1)


@contextmanager
def recording() -> Iterator[Record]:
    """The scope in which batch norms give statistics of the micro-batch."""
    record = Record()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def enter_layer(number: int) -> None:
    """Says whose batch norms come now."""
    record = _current.get()
    if record is not None:
        record.layer = number


def meeting(mutable: Container[str]) -> AbstractContextManager[None]:
    """The scope in which a layer is applied, so that all its batch norms are met.

    What `flax.linen.jit` has traced for an equal layer, JAX would not run again.

    Args:
      mutable: the collections that the layer may change.
    """
    return _met(next(_layers)) if "batch_stats" in mutable else nullcontext()


def note(names: tuple[Any, ...], momentum: float) -> bool:
    """Says that a batch norm is about to run.

    Args:
      names: where its statistics are among those of the layer.
      momentum: what the user chose.

    Returns:
      Whether it is to run with a momentum of zero.
    """
    record = _current.get()
    if record is None:
        return False
    record.norms.append(Norm((record.layer, *names), momentum))
    return True


@contextmanager
def once(running_mean: Callable[[], Any], name: str) -> Iterator[None]:
    """The scope of a call of a batch norm: the first in its layer that writes.

    A second one would start from what the first left, which is not a running mean.

    Args:
      running_mean: reads the mean that the batch norm holds.
      name: what to call it.

    Raises:
      ValueError: if a call before has written the mean that it holds.
    """
    record, before = _current.get(), running_mean()
    assert record is not None
    if any(at == record.layer and mean is before for at, mean in record.written):
        raise ValueError(
            f"batch norm {name} is called twice in one layer: only one of its "
            f"statistics would count; make two"
        )
    yield
    after = running_mean()
    if after is not before:  # a frozen one writes nothing
        record.written.append((record.layer, after))


def intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: runs batch norms with a momentum of zero."""
    module: Any = context.module
    if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__":
        return call(*args, **keywords)
    momentum = module.momentum
    if not note(tuple(module.path), momentum):
        return call(*args, **keywords)
    name = "/".join(module.path) or type(module).__name__
    # A bound module cannot be cloned in place, and refuses to be changed.
    object.__setattr__(module, "momentum", 0.0)
    try:
        with once(lambda: module.get_variable("batch_stats", "mean"), name):
            return call(*args, **keywords)
    finally:
        object.__setattr__(module, "momentum", momentum)


class Merged(NamedTuple):
    """Statistics of the micro-batches so far.

    Attributes:
      mean: their mean.
      spread: the mean of the squares of what differs from it, times ``share``.
    """

    mean: jax.Array
    spread: jax.Array


def merge(
    so_far: Merged, mean: jax.Array, var: jax.Array, seen: jax.Array, share: jax.Array
) -> Merged:
    """Adds the statistics of a micro-batch.

    Args:
      so_far: those of the micro-batches before.
      mean: the mean over the micro-batch.
      var: its variance.
      seen: the share of the mini-batch that the micro-batches before hold.
      share: that of this one.

    Returns:
      The statistics of all of them.
    """
    total = seen + share
    delta = mean - so_far.mean
    return Merged(
        so_far.mean + delta * (share / total),
        so_far.spread + var * share + delta**2 * (seen * share / total),
    )


def commit(old: jax.Array, new: jax.Array, momentum: float) -> jax.Array:
    """Running statistics after a mini-batch."""
    return momentum * old + (1 - momentum) * new
