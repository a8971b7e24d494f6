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
import weakref
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
      written: the running means that those of this layer left. It does not keep them:
        they belong to a trace.
      running: the modules whose calls have not ended.
    """

    layer: int = 0
    norms: list[Norm] = field(default_factory=list)
    written: list[weakref.ref[Any]] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)


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
        record.written.clear()


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


def check_running(name: str, mean: Any) -> None:
    """Checks that the mean that a batch norm holds is the running one.

    After it has normalized by the micro-batch, it is not. That is told by the array:
    through a transformation inside the layer, such as `jax.checkpoint`, the array is
    another one, and nothing is noticed.

    Args:
      name: what to call it.
      mean: what it holds.

    Raises:
      ValueError: if a call before in the same layer has left it.
    """
    record = _current.get()
    if record and any(written() is mean for written in record.written):
        raise ValueError(
            f"batch norm {name} is called twice in one layer: the second time it would "
            f"start from the statistics of the micro-batch; make two"
        )


def note_written(mean: Any) -> None:
    """Says that a batch norm has left the mean of the micro-batch."""
    if record := _current.get():
        record.written.append(weakref.ref(mean))


def intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: runs batch norms with a momentum of zero."""
    module: Any = context.module
    if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__":
        return call(*args, **keywords)
    momentum, record = module.momentum, _current.get()
    # A class of the user's own may call that of Flax, which is met again then.
    if record is None or module in record.running:
        return call(*args, **keywords)
    note(tuple(module.path), momentum)
    name = "/".join(module.path) or type(module).__name__
    before = module.get_variable("batch_stats", "mean")
    check_running(name, before)
    # A bound module cannot be cloned in place, and refuses to be changed.
    object.__setattr__(module, "momentum", 0.0)
    record.running.append(module)
    try:
        y = call(*args, **keywords)
    finally:
        record.running.pop()
        object.__setattr__(module, "momentum", momentum)
    after = module.get_variable("batch_stats", "mean")
    if after is not before:  # a frozen one writes nothing
        note_written(after)
        if keywords.get("mask") is not None:
            raise ValueError(
                f"batch norm {name} is given a mask: statistics of micro-batches are "
                f"merged by their examples, of which a mask leaves some out; normalize "
                f"all, or freeze it (use_running_average=True)"
            )
    return y


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
