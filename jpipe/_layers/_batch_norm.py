"""Batch norm: running statistics of the whole mini-batch, committed once.

A batch norm of `flax` normalizes each micro-batch by itself, as a data-parallel worker
normalizes its shard. Its running statistics should be those of the mini-batch:

    F(s, m):   runs the norm with momentum 0: it leaves (mean[m], var[m])
    merge:     mean, m2 += mean[m], var[m]          (Chan et al.: no cancellation)
    commit:    running = momentum * running + (1 - momentum) * (mean, m2)    once

m2 is the variance over the mini-batch, since the shares of its micro-batches sum to 1.
This works for flax's own BatchNorm and for subclasses that call it; nothing else may
write its statistics.

References:
  Chan, Golub, LeVeque, `Algorithms for Computing the Sample Variance
  <https://doi.org/10.1080/00031305.1983.10483115>`_ (1983).
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from ._linen_parent import path_in_layer
from ._patches import patched

# The prefix of the names that statistics of batch norms bear in the jaxpr.
STATISTIC_NAME_PREFIX = "jpipe batch norm "
STATISTICS = ("mean", "var")
_COLLECTION = "batch_stats"
Path = tuple[Any, ...]
# Names the statistics that a norm leaves.
Namer = Callable[[jax.Array], jax.Array]


@dataclass
class NormRecord:
    """The batch norms of a stage, as its layers are traced.

    The statistics bear a name in the jaxpr: `flax.linen.jit` runs what it has traced
    for an equal block, where Python sees no call.

    Attributes:
      seen: the paths of the norms that left statistics.
    """

    seen: set[Path] = field(default_factory=set)

    def namer(self, path: Path, *, momentum: Any, has_mask: bool) -> Namer:
        """Returns the function that names the statistics of the norm at a path.

        Raises:
          ValueError: if they cannot be merged.
        """
        name = "/".join(map(str, path_in_layer(path))) or "BatchNorm"
        if has_mask:
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
        words = f"{float(momentum)!r} {'/'.join(map(str, path)) or name}"
        statistic_name = STATISTIC_NAME_PREFIX + words
        return lambda x: checkpoint_name(x, statistic_name)


def momentum_of(statistic_name: str) -> float:
    """The momentum of the norm whose statistics have a name."""
    return float(statistic_name.removeprefix(STATISTIC_NAME_PREFIX).split()[0])


_current: ContextVar[NormRecord | None] = ContextVar("jpipe_batchnorm", default=None)
_are_merged: ContextVar[bool] = ContextVar("jpipe_batchnorm_merged", default=True)
_is_bypassed: ContextVar[bool] = ContextVar("jpipe_batchnorm_bypassed", default=False)
# Its value is a part of the key by which JAX finds what it has traced.
_layer_context = jax.make_user_context()
_layer_ids = itertools.count(1)


@contextmanager
def merge_statistics(*, are_merged: bool) -> Iterator[None]:
    """The scope that tells if statistics of several micro-batches are merged.

    Batch norms of a mini-batch in one piece do what they do in Flax.
    """
    token = _are_merged.set(are_merged)
    try:
        yield
    finally:
        _are_merged.reset(token)


@contextmanager
def record_batch_norms() -> Iterator[NormRecord]:
    """The scope in which batch norms leave statistics of the micro-batch."""
    record = NormRecord()
    token = _current.set(record if _are_merged.get() else None)
    try:
        yield record
    finally:
        _current.reset(token)


@contextmanager
def bypass_batch_norms() -> Iterator[None]:
    """The scope in which batch norms of Flax return their input.

    For comparisons of layers on whole and split batches: that norms normalize each
    micro-batch by itself is intended.
    """
    token = _is_bypassed.set(True)
    try:
        yield
    finally:
        _is_bypassed.reset(token)


def are_merged() -> bool:
    """True if statistics of several micro-batches are merged."""
    return _are_merged.get()


@contextmanager
def intercept_batch_norms(*, may_change: bool) -> Iterator[None]:
    """The scope of one layer, in which the calls of its batch norms are intercepted.

    The layer is traced anew: `flax.linen.jit` would not run again what it has traced
    for an equal layer.

    Args:
      may_change: True if the layer may change statistics; else nothing happens.
    """
    if not may_change:
        yield
        return
    with (
        _layer_context(next(_layer_ids)),
        linen.intercept_methods(_call_linen),
        patched([nnx.BatchNorm], _call_nnx),
    ):
        yield


# The code of Flax's own method; a class that is derived from it has another.
_FLAX_CALL = inspect.unwrap(linen.BatchNorm.__call__).__code__


def _call_linen(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: Any,
) -> Any:
    """For `flax.linen.intercept_methods`: runs batch norms with a momentum of zero."""
    module: Any = context.module
    if not _is_flax_method(context.orig_method):
        return call(*args, **kwargs)

    record = _current.get()
    momentum = module.momentum
    before = _statistics(module)
    if record:
        # A bound module cannot be cloned in place, and refuses to be changed.
        object.__setattr__(module, "momentum", 0.0)
    try:
        y = call(*args, **kwargs)
    finally:
        object.__setattr__(module, "momentum", momentum)

    after = _statistics(module)
    if after[0] is before[0]:  # a frozen one writes nothing
        return y
    if record:
        has_mask = kwargs.get("mask") is not None
        name_statistic = record.namer(
            tuple(module.path), momentum=momentum, has_mask=has_mask
        )
        statistics = [name_statistic(new) for new in after]
    else:
        statistics = [
            new.astype(old.dtype) for old, new in zip(before, after, strict=True)
        ]
    for name, value in zip(STATISTICS, statistics, strict=True):
        module.put_variable(_COLLECTION, name, value)
    return _output_of(y, args, kwargs)


def _is_flax_method(method: Callable[..., Any]) -> bool:
    """True if a method is that of `flax.linen.BatchNorm`, of whatever class it is."""
    # Flax passes it with the module bound by functools.partial.
    function = inspect.unwrap(getattr(method, "func", method))
    return getattr(function, "__code__", None) is _FLAX_CALL


def _statistics(module: linen.BatchNorm) -> list[Any]:
    return [module.get_variable(_COLLECTION, name) for name in STATISTICS]


def _output_of(y: jax.Array, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output of a batch norm, or in the scope of `bypass_batch_norms` its input."""
    if not _is_bypassed.get():
        return y
    x = args[0] if args else kwargs["x"]
    return jnp.asarray(x, y.dtype)


def set_norm_paths(module: nnx.Module) -> None:
    """Tells the batch norms of a module their paths, also for inside of nnx.remat."""
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.BatchNorm):
            setattr(node, "_jpipe_path", tuple(path))  # noqa: B010


def _call_nnx(
    _: Any,
    call: Callable[..., Any],
    norm: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """For `patched`: runs batch norms of nnx with a momentum of zero."""
    record = _current.get()
    momentum = norm.momentum
    statistics = (norm.mean, norm.var)
    before = [variable.get_raw_value() for variable in statistics]
    # Setting it normally is refused inside of transformations of nnx.
    object.__setattr__(norm, "momentum", 0.0 if record else momentum)
    try:
        y = call(norm, *args, **kwargs)
    finally:
        object.__setattr__(norm, "momentum", momentum)

    if norm.mean.get_raw_value() is before[0]:  # a frozen one writes nothing
        return y
    name_statistic: Callable[[Any], Any] = jnp.asarray
    if record:
        path = getattr(norm, "_jpipe_path", (type(norm).__name__, id(norm)))
        has_mask = kwargs.get("mask") is not None
        name_statistic = record.namer(path, momentum=momentum, has_mask=has_mask)
    for variable, old in zip(statistics, before, strict=True):
        new = variable.get_raw_value().astype(old.dtype)
        variable.set_raw_value(name_statistic(new))
    return _output_of(y, args, kwargs)


class NormLeaves(NamedTuple):
    """The leaves of one batch norm.

    Attributes:
      mean: the index of its mean among the leaves.
      var: the index of its variance.
      statistic_name: the name of both in the jaxpr; equal blocks that `flax.linen.jit`
        traces once share one.
    """

    mean: int
    var: int
    statistic_name: str


def find_norms(paths: Sequence[Path], origins: Sequence[Any]) -> list[NormLeaves]:
    """Finds the statistics of batch norms among leaves.

    Args:
      paths: the path of each leaf.
      origins: the origin of each leaf, a string if it is a statistic with a name: see
        `_dataflow.result_origins`.
    """
    leaf_index = {path: index for index, path in enumerate(paths)}
    leaves_of_norms = []
    for mean, (*module_path, _) in enumerate(paths):
        mean_path, var_path = (
            (*module_path, jax.tree_util.DictKey(name)) for name in STATISTICS
        )
        var = leaf_index.get(var_path)
        is_mean = leaf_index.get(mean_path) == mean
        if not is_mean or var is None:
            continue
        name = origins[mean]
        if isinstance(name, str) and name == origins[var]:
            leaves_of_norms.append(NormLeaves(mean, var, name))
    return leaves_of_norms


class MergedStatistics(NamedTuple):
    """Statistics of the micro-batches so far.

    Attributes:
      mean: their mean.
      m2: the sum of squared differences from the mean, each times its share of the
        mini-batch.
    """

    mean: jax.Array
    m2: jax.Array


def merge(
    so_far: MergedStatistics,
    mean: jax.Array,
    var: jax.Array,
    share_so_far: Any,
    share: Any,
) -> MergedStatistics:
    """Adds the statistics of a micro-batch.

    Args:
      so_far: the statistics of the micro-batches before.
      mean: the mean over the micro-batch.
      var: its variance.
      share_so_far: the share of the mini-batch that the micro-batches before hold.
      share: the share that this micro-batch holds.

    Returns:
      The statistics of all of them.
    """
    total = share_so_far + share
    delta = mean - so_far.mean
    squared = jnp.real(delta * delta.conj())
    return MergedStatistics(
        mean=so_far.mean + delta * (share / total),
        m2=so_far.m2 + var * share + squared * (share_so_far * share / total),
    )


def move_running_statistics(
    old: jax.Array, new: jax.Array, momentum: float
) -> jax.Array:
    """Running statistics after a mini-batch."""
    return momentum * old + (1 - momentum) * new
