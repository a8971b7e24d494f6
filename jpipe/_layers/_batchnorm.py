"""Batch norm: running statistics of the whole mini-batch, committed once.

A `flax` batch norm normalizes each micro-batch by itself, as it would normalize the
shard of a data-parallel worker. Its running statistics should not show that: they
are those of the mini-batch. So it is run with a momentum of zero, which leaves the
statistics of the micro-batch where the running ones would be; these are merged as
Chan et al. do, which loses nothing to cancellation; and at the end of the mini-batch
the running statistics move once, with the momentum that the user chose. All of this
holds for what the call of `flax` computes: a class of the user's own may call it, and
nothing but it may write what it leaves.

References:
  Chan, Golub, LeVeque, `Algorithms for Computing the Sample Variance
  <https://doi.org/10.1080/00031305.1983.10483115>`_ (1983).
"""

import inspect
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.extend import core

from .._jaxprs import _marks

# How the marks on the statistics that batch norms leave begin.
_MARK = "jpipe batch norm "
STATISTICS = ("mean", "var")


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm that was met.

    Attributes:
      layer: the number of its layer in the stage.
      name: what to call it.
      momentum: how much of the running statistics a mini-batch leaves.
    """

    layer: int
    name: str
    momentum: float


class Left(NamedTuple):
    """What a result of a stage is.

    Attributes:
      input: the number of the input of the jaxpr that it is, if it is one.
      by: the norms of which it is a running mean or variance, as they left it.
      after: those on whose statistics it depends in another way.
    """

    input: int | None
    by: set[Norm]
    after: set[Norm]


@dataclass
class Record:
    """The batch norms of a stage, as its layers are traced.

    What one leaves is marked, and followed in the jaxpr: Python does not see all
    calls, as `flax.linen.jit` runs what it has traced, and knows no array again behind
    a transformation such as `flax.linen.remat`.

    Attributes:
      layer: the number of the layer that is being applied.
      norms: what was met so far; a mark is the number of one.
    """

    layer: int = 0
    norms: list[Norm] = field(default_factory=list)

    def left(self, closed: core.ClosedJaxpr) -> tuple[list[Left], set[Norm]]:
        """Where in the jaxpr of the stage the statistics are that its norms left.

        Args:
          closed: the jaxpr.

        Returns:
          What each of its results is; and the norms that left something to a norm,
          which is not what was running before.
        """
        results, again = _marks.follow(closed, _MARK)
        found = [
            Left(marks.input, self._known(marks.here), self._known(marks.behind))
            for marks in results
        ]
        return found, self._known(again)

    def _known(self, marks: Container[str]) -> set[Norm]:
        numbered = enumerate(self.norms)
        return {norm for number, norm in numbered if f"{_MARK}{number}" in marks}


_current: ContextVar[Record | None] = ContextVar("jpipe_batchnorm", default=None)
_are_merged: ContextVar[bool] = ContextVar("jpipe_batchnorm_merged", default=True)
_is_apart: ContextVar[bool] = ContextVar("jpipe_batchnorm_apart", default=False)
# Its value is a part of the key by which JAX finds what it has traced.
_met = jax.make_user_context()
_layers = itertools.count(1)


@contextmanager
def merging(several: bool) -> Iterator[None]:
    """The scope in which it is said whether there are several micro-batches.

    Of one alone nothing is merged: its batch norms do what they do in Flax.
    """
    token = _are_merged.set(several)
    try:
        yield
    finally:
        _are_merged.reset(token)


def is_recording() -> bool:
    """Whether batch norms give statistics of the micro-batch: see `recording`."""
    return _current.get() is not None


@contextmanager
def recording() -> Iterator[Record]:
    """The scope in which batch norms give statistics of the micro-batch."""
    record = Record()
    token = _current.set(record if _are_merged.get() else None)
    try:
        yield record
    finally:
        _current.reset(token)


@contextmanager
def apart() -> Iterator[None]:
    """The scope in which batch norms of Flax return what is of each example by itself.

    So that layers can be asked what else they do: that norms normalize each micro-batch
    by itself is known, and meant.
    """
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def returned(y: jax.Array, x: jax.Array) -> jax.Array:
    """What a batch norm of Flax returns: see `apart`.

    Args:
      y: what it computes.
      x: what it is given, of the same shape.
    """
    return jnp.asarray(x, y.dtype) if _is_apart.get() else y


def enter_layer(number: int) -> None:
    """Says whose batch norms come now."""
    record = _current.get()
    if record is not None:
        record.layer = number


@contextmanager
def meeting(mutable: Container[str]) -> Iterator[None]:
    """The scope in which a layer is applied, so that its batch norms are met.

    What `flax.linen.jit` has traced for an equal layer, JAX would not run again.

    Args:
      mutable: the collections that the layer may change.
    """
    if "batch_stats" not in mutable:
        yield
        return
    with _met(next(_layers)), linen.intercept_methods(_intercept):
        yield


def meet(name: str, momentum: float) -> Callable[[jax.Array], jax.Array] | None:
    """Says that a batch norm is about to run.

    Args:
      name: what to call it.
      momentum: what the user chose.

    Returns:
      What marks the statistics that it leaves, if it is to run with a momentum of zero.
    """
    record = _current.get()
    if record is None:
        return None
    if isinstance(momentum, jax.Array):
        raise ValueError(
            f"the momentum of batch norm {name} is an array, or computed in the call; "
            f"give a number of Python, or freeze the norm and write a rule of your own"
        )
    record.norms.append(Norm(record.layer, name, momentum))
    text = f"{_MARK}{len(record.norms) - 1}"
    return lambda x: _marks.mark(x, text)


def called_twice(name: str) -> ValueError:
    """The refusal of a batch norm that would start from what another call left."""
    return ValueError(
        f"batch norm {name} is called twice in one layer: the second time it would "
        f"start from the statistics of the micro-batch; make two, or take "
        f"num_microbatches=1"
    )


def not_left_alone(name: str) -> ValueError:
    """The refusal of what follows from the statistics that a batch norm leaves."""
    return ValueError(
        f"what batch norm {name} leaves as its running statistics is read, copied or "
        f"changed in the same step, by another call of it or by code that is not "
        f"Flax's: there it is that of one micro-batch, and the running ones move once "
        f"in a mini-batch; make two norms, or read it before the norm is called; for a "
        f"rule of your own make a norm that derives from Module, with its own "
        f'nnx.BatchStat or self.variable("batch_stats", ...), or take '
        f"num_microbatches=1"
    )


def in_evaluation(name: str) -> ValueError:
    """The refusal of a batch norm that is trained where nothing is."""
    return ValueError(
        f"batch norm {name} is trained in evaluation, and would normalize by the "
        f"micro-batch, as something in the module says use_running_average=False; "
        f"leave it out, as evaluation sets the norm itself, or let __call__ take train "
        f"and pass use_running_average=not train"
    )


def not_real(name: str) -> ValueError:
    """The refusal of a batch norm of complex numbers whose running mean is real."""
    return ValueError(
        f"batch norm {name} is given complex numbers, and its running mean is real: "
        f"normalize real and imaginary parts, or make its mean complex"
    )


def masked(name: str) -> ValueError:
    """The refusal of a batch norm that is trained with a mask."""
    return ValueError(
        f"batch norm {name} is given a mask: statistics of micro-batches are merged by "
        f"their examples, of which a mask leaves some out; normalize all, or freeze it "
        f"(use_running_average=True), or take num_microbatches=1"
    )


# What Flax's own method runs; that of a class derived from it is another.
_CALL = inspect.unwrap(linen.BatchNorm.__call__).__code__


def _intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: runs batch norms with a momentum of zero."""
    module: Any = context.module
    if not _is_flaxs(context.orig_method):
        return call(*args, **keywords)
    before = _statistics(module)
    if not is_recording():
        y, after = call(*args, **keywords), _statistics(module)
        if after[0] is not before[0]:
            _leave(module, jax.tree.map(_of_its_dtype, after, before))
        return returned(y, *args[:1] or [keywords["x"]])
    momentum = module.momentum
    mark = meet("/".join(module.path) or type(module).__name__, momentum)
    # A bound module cannot be cloned in place, and refuses to be changed.
    object.__setattr__(module, "momentum", 0.0)
    try:
        y = call(*args, **keywords)
    finally:
        object.__setattr__(module, "momentum", momentum)
    after = _statistics(module)
    if mark is None or after[0] is before[0]:  # a frozen one writes nothing
        return y
    if keywords.get("mask") is not None:
        raise masked("/".join(module.path) or type(module).__name__)
    _leave(module, jax.tree.map(mark, after))
    return y


def _leave(module: linen.BatchNorm, statistics: Sequence[Any]) -> None:
    for name, value in zip(STATISTICS, statistics, strict=True):
        module.put_variable("batch_stats", name, value)


def _of_its_dtype(new: jax.Array, old: jax.Array) -> jax.Array:
    return new.astype(old.dtype)


def _is_flaxs(method: Callable[..., Any]) -> bool:
    """Whether a method is that of `flax.linen.BatchNorm`, of whatever class it is."""
    # Flax gives it with the module bound by functools.partial.
    function = inspect.unwrap(getattr(method, "func", method))
    return getattr(function, "__code__", None) is _CALL


def _statistics(module: linen.BatchNorm) -> list[Any]:
    return [module.get_variable("batch_stats", name) for name in STATISTICS]


class Merged(NamedTuple):
    """Statistics of the micro-batches so far.

    Attributes:
      mean: their mean.
      m2: the sum of the squares of what differs from it, each times its share.
    """

    mean: jax.Array
    m2: jax.Array


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
    squared = jnp.real(delta * delta.conj())
    return Merged(
        so_far.mean + delta * (share / total),
        so_far.m2 + var * share + squared * (seen * share / total),
    )


def commit(old: jax.Array, new: jax.Array, momentum: float) -> jax.Array:
    """Running statistics after a mini-batch."""
    return momentum * old + (1 - momentum) * new
