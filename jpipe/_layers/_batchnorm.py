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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from ._patched import patched
from ._slots import inner

# How the names of the statistics that batch norms leave begin.
MARK = "jpipe batch norm "
STATISTICS = ("mean", "var")
_COLLECTION = "batch_stats"
Path = tuple[Any, ...]


@dataclass
class Record:
    """The batch norms of a stage, as its layers are traced.

    The statistics that one leaves bear a name in the jaxpr: `flax.linen.jit` runs what
    it has traced for an equal block, where Python sees no call.

    Attributes:
      seen: the paths of the norms that left statistics.
    """

    seen: set[Path] = field(default_factory=set)

    def mark(
        self, path: Path, momentum: Any, masked: bool
    ) -> Callable[[jax.Array], jax.Array]:
        """What names the statistics that a norm leaves.

        Raises:
          ValueError: if they cannot be merged.
        """
        name = "/".join(map(str, inner(path))) or "BatchNorm"
        if masked:
            raise ValueError(
                f"batch norm {name} is given a mask: statistics of micro-batches are "
                f"merged by their numbers of examples, of which a mask leaves some "
                f"out; normalize all, or freeze it (use_running_average=True), or take "
                f"num_microbatches=1"
            )
        if path in self.seen:
            raise ValueError(
                f"batch norm {name} is called twice, or in a loop such as "
                f"nn.scan: a second call would start from the statistics of the "
                f"micro-batch, and those of a loop cannot be merged; make a norm for "
                f"each call, or take num_microbatches=1"
            )
        self.seen.add(path)
        text = f"{MARK}{float(momentum)!r} {'/'.join(map(str, path)) or name}"
        return lambda x: checkpoint_name(x, text)


def momentum_of(mark: str) -> float:
    """The momentum of the norm that left what bears a mark."""
    return float(mark.removeprefix(MARK).split()[0])


_current: ContextVar[Record | None] = ContextVar("jpipe_batchnorm", default=None)
_are_merged: ContextVar[bool] = ContextVar("jpipe_batchnorm_merged", default=True)
_is_apart: ContextVar[bool] = ContextVar("jpipe_batchnorm_apart", default=False)
# Its value is a part of the key by which JAX finds what it has traced.
_traced = jax.make_user_context()
_layers = itertools.count(1)


@contextmanager
def merging(several: bool) -> Iterator[None]:
    """The scope in which it is known whether there are several micro-batches.

    With one alone nothing is merged: its batch norms do what they do in Flax.
    """
    token = _are_merged.set(several)
    try:
        yield
    finally:
        _are_merged.reset(token)


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
    """The scope in which batch norms of Flax return their input.

    So layers can be compared on whole and split batches: that norms normalize each
    micro-batch by itself is known, and meant.
    """
    token = _is_apart.set(True)
    try:
        yield
    finally:
        _is_apart.reset(token)


def are_merged() -> bool:
    """Whether there are several micro-batches."""
    return _are_merged.get()


@contextmanager
def meeting(may_change: bool) -> Iterator[None]:
    """The scope in which a layer is applied, so that its batch norms are seen.

    `flax.linen.jit` would not run again what it has traced for an equal layer.

    Args:
      may_change: whether it may change statistics; else nothing is seen.
    """
    if not may_change:
        yield
        return
    with (
        _traced(next(_layers)),
        linen.intercept_methods(_intercept),
        patched([nnx.BatchNorm], _nnx_call),
    ):
        yield


# What Flax's own method runs; that of a class derived from it is another.
_CALL = inspect.unwrap(linen.BatchNorm.__call__).__code__


def _intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: runs batch norms with a momentum of zero."""
    module: Any = context.module
    if not _is_flaxs(context.orig_method):
        return call(*args, **keywords)
    before, record = _statistics(module), _current.get()
    momentum = module.momentum
    if record:
        # A bound module cannot be cloned in place, and refuses to be changed.
        object.__setattr__(module, "momentum", 0.0)
    try:
        y = call(*args, **keywords)
    finally:
        object.__setattr__(module, "momentum", momentum)
    after = _statistics(module)
    if after[0] is before[0]:  # a frozen one writes nothing
        return y
    if record:
        masked = keywords.get("mask") is not None
        made = map(record.mark(tuple(module.path), momentum, masked), after)
    else:
        made = [new.astype(old.dtype) for old, new in zip(before, after, strict=True)]
    for name, value in zip(STATISTICS, made, strict=True):
        module.put_variable(_COLLECTION, name, value)
    return _returned(y, *args[:1] or [keywords["x"]])


def _is_flaxs(method: Callable[..., Any]) -> bool:
    """Whether a method is that of `flax.linen.BatchNorm`, of whatever class it is."""
    # Flax gives it with the module bound by functools.partial.
    function = inspect.unwrap(getattr(method, "func", method))
    return getattr(function, "__code__", None) is _CALL


def _statistics(module: linen.BatchNorm) -> list[Any]:
    return [module.get_variable(_COLLECTION, name) for name in STATISTICS]


def _returned(y: jax.Array, x: jax.Array) -> jax.Array:
    """What a batch norm returns: see `apart`."""
    return jnp.asarray(x, y.dtype) if _is_apart.get() else y


def set_paths(module: nnx.Module) -> None:
    """Lets the batch norms of a module know their paths, inside of nnx.remat too."""
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.BatchNorm):
            setattr(node, "_jpipe_path", tuple(path))  # noqa: B010


def _nnx_call(_: Any, call: Any, norm: Any, args: Any, keywords: Any) -> Any:
    """Runs a batch norm of nnx with a momentum of zero: see `patched`."""
    record, statistics, momentum = _current.get(), (norm.mean, norm.var), norm.momentum
    before = [variable.get_raw_value() for variable in statistics]
    # As itself nnx would refuse to be changed inside of its transformations.
    object.__setattr__(norm, "momentum", 0.0 if record else momentum)
    try:
        y = call(norm, *args, **keywords)
    finally:
        object.__setattr__(norm, "momentum", momentum)
    if norm.mean.get_raw_value() is before[0]:
        return y
    path = getattr(norm, "_jpipe_path", (type(norm).__name__, id(norm)))
    masked = keywords.get("mask") is not None
    mark = record.mark(path, momentum, masked) if record else jnp.asarray
    for variable, old in zip(statistics, before, strict=True):
        variable.set_raw_value(mark(variable.get_raw_value().astype(old.dtype)))
    return _returned(y, *args[:1] or [keywords["x"]])


def norms(paths: Sequence[Path], marks: Sequence[Any]) -> list[tuple[int, int, str]]:
    """Where the statistics of batch norms stand among leaves.

    Args:
      paths: of the leaves.
      marks: what each is: see `_flow.origins`.

    Returns:
      Of each norm the numbers of its mean and its variance, and its mark: equal blocks
      that `flax.linen.jit` traces once have one.
    """
    place = {path: i for i, path in enumerate(paths)}
    found = []
    for i, (*path, _) in enumerate(paths):
        mean, var = (
            place.get((*path, jax.tree_util.DictKey(name))) for name in STATISTICS
        )
        if i != mean or var is None or not isinstance(mark := marks[i], str):
            continue
        if mark == marks[var]:
            found.append((mean, var, mark))
    return found


class Merged(NamedTuple):
    """Statistics of the micro-batches so far.

    Attributes:
      mean: their mean.
      m2: the sum of the squares of what differs from it, each times its share.
    """

    mean: jax.Array
    m2: jax.Array


def merge(
    so_far: Merged, mean: jax.Array, var: jax.Array, seen: Any, share: Any
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
