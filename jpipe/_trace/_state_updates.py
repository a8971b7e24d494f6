"""State leaves that a call writes, as running sums over micro-batches.

    add:    sums, new values from one micro-batch, its share of the examples -> sums
    merge:  sums of some micro-batches, sums of others -> sums of all
    commit: old values, sums -> new values

There are three kinds of leaves. Statistics of Flax's batch norms become those of all
micro-batches, and move once. Other floating leaves become the mean over the examples.
Integers become what the last micro-batch makes of them.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _dataflow, _jaxpr
from .._jaxprs._jaxpr import is_inexact
from .._layers import _batch_norm
from .._messages import raise_all
from ._accumulation import extend_mean, sum_spec
from ._traced_function import TracedFunction

Path = tuple[Any, ...]
Leaves = Sequence[Any]
_SINGLE = jnp.dtype(jnp.float32).itemsize


class StateLeaf(NamedTuple):
    """A leaf that a call may write.

    Attributes:
      param_index: its index among the parameters of the program.
      path: its path among the variables; the last two names of a statistic are those of
        its norm and of the statistic.
      text: the words for it in errors: ``"layer 1 (BatchNorm) writes
        batch_stats/mean"``.
    """

    param_index: int
    path: Path
    text: str

    @property
    def collection(self) -> str:
        """Its collection, such as ``"batch_stats"``: the first name in its path."""
        return next(key.key for key in self.path if hasattr(key, "key"))


class NormIndices(NamedTuple):
    """The leaves of one batch norm in a `StateUpdate`.

    Attributes:
      mean: the index of its mean among the leaves.
      var: the index of its variance.
      momentum: its momentum.
    """

    mean: int
    var: int
    momentum: float


@dataclass(frozen=True)
class StateUpdate:
    """The state leaves that one stage, or a whole program, writes.

    Attributes:
      aux_indices: the index of each leaf's new value among the results besides the
        loss.
      param_indices: the index of each leaf among the parameters.
      specs: the spec of each leaf.
      new_specs: the spec of each leaf's new value from one micro-batch.
      norms: the batch norms whose statistics are among the leaves.
    """

    aux_indices: tuple[int, ...] = ()
    param_indices: tuple[int, ...] = ()
    specs: tuple[jax.ShapeDtypeStruct, ...] = ()
    new_specs: tuple[jax.ShapeDtypeStruct, ...] = ()
    norms: tuple[NormIndices, ...] = ()

    @property
    def has_integers(self) -> bool:
        """True if a leaf has integers: the last micro-batch decides their values."""
        return not all(map(is_inexact, self.specs))

    @property
    def has_means(self) -> bool:
        """True if a leaf is a mean over the examples."""
        return any(map(is_inexact, self.specs))

    @property
    def sum_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the running sums: one per leaf, and the share so far for means."""
        specs = list[jax.ShapeDtypeStruct]()
        for old, new in zip(self.specs, self.new_specs, strict=True):
            specs.append(
                sum_spec(new if is_inexact(old) and _is_wider(new, old) else old)
            )
        if self.has_means:
            specs.append(jax.ShapeDtypeStruct((), jnp.result_type(float)))
        return specs

    def of_stages(self, stages: Sequence[int], num_stages: int) -> list["StateUpdate"]:
        """The part of each stage.

        Args:
          stages: the stage that writes each leaf.
          num_stages: the number of stages.
        """
        stage_of_leaf = list(stages)
        for norm in self.norms:  # its mean and variance may be written by two stages
            stage = max(stage_of_leaf[norm.mean], stage_of_leaf[norm.var])
            stage_of_leaf[norm.mean] = stage
            stage_of_leaf[norm.var] = stage

        parts = list[StateUpdate]()
        for s in range(num_stages):
            indices = [i for i, stage in enumerate(stage_of_leaf) if stage == s]
            # index of a leaf -> its index in the part
            index_in_part = {i: k for k, i in enumerate(indices)}
            norms = list[NormIndices]()
            for mean, var, momentum in self.norms:
                if mean in index_in_part:
                    norms.append(
                        NormIndices(index_in_part[mean], index_in_part[var], momentum)
                    )
            parts.append(
                StateUpdate(
                    aux_indices=tuple(self.aux_indices[i] for i in indices),
                    param_indices=tuple(self.param_indices[i] for i in indices),
                    specs=tuple(self.specs[i] for i in indices),
                    new_specs=tuple(self.new_specs[i] for i in indices),
                    norms=tuple(norms),
                )
            )
        return parts

    def add(self, sums: Leaves, new: Leaves, share: Any = None) -> list[Any]:
        """Adds the new values from one micro-batch to the running sums.

        Args:
          sums: the running sums.
          new: the new values.
          share: the micro-batch's share of the examples, if there are means.
        """
        if not self.has_means:
            return list(new)
        *before, share_so_far = sums
        after = self._extend_means(before, new, share_so_far, share)
        for mean, var, _ in self.norms:
            so_far = _batch_norm.MergedStatistics(before[mean], before[var])
            merged = _batch_norm.merge(so_far, new[mean], new[var], share_so_far, share)
            # The share may be of a wider dtype than the statistics.
            after[mean] = merged.mean.astype(so_far.mean.dtype)
            after[var] = merged.m2.astype(so_far.m2.dtype)
        return [*after, share_so_far + share]

    def merge(self, sums: Leaves, later_sums: Leaves) -> list[Any]:
        """Merges the running sums of some micro-batches with those of later ones."""
        if not self.has_means:
            return list(later_sums)
        *new, share = later_sums
        for norm in self.norms:  # a sum of squared differences as a variance
            new[norm.var] = new[norm.var] / share
        return self.add(sums, new, share)

    def _extend_means(
        self, means: Leaves, new: Leaves, share_so_far: Any, share: Any
    ) -> list[Any]:
        """Extends means by new values; integers become the new values."""
        weight = share / (share_so_far + share)
        extended = list[Any]()
        for mean, value in zip(means, new, strict=True):
            if is_inexact(mean):
                value = value.astype(mean.dtype)
                value = extend_mean(mean, value, weight.astype(mean.dtype))
            extended.append(value)
        return extended

    def commit(self, old: Leaves, sums: Leaves) -> list[Any]:
        """Returns the new values of the leaves, from the old ones and running sums."""
        new = list(sums[: len(old)])
        for mean, var, momentum in self.norms:
            for i in (mean, var):
                new[i] = _batch_norm.move_running_statistics(old[i], new[i], momentum)
        return [x.astype(leaf.dtype) for x, leaf in zip(new, old, strict=True)]


def _is_wider(new: Any, old: Any) -> bool:
    return jnp.promote_types(old.dtype, new.dtype) != old.dtype


def find_updates(
    traced: TracedFunction, first_index: int, written: Sequence[StateLeaf]
) -> StateUpdate:
    """Finds the state leaves that a program writes, among its results.

    Args:
      traced: the function, in training.
      first_index: the index, among its results besides the loss, of the first leaf that
        may be written.
      written: the leaves that may be written.

    Returns:
      The leaves that are not returned unchanged.

    Raises:
      ValueError: if a call writes what the step does not take from it, or batch norms
        cannot be merged.
    """
    results = traced.aux_vars[first_index:]
    closed = _with_outvars(traced, results)
    origins = _dataflow.result_origins(closed, _batch_norm.STATISTIC_NAME_PREFIX)
    # A transformation such as nn.remat returns its inputs as if it had changed them.
    indices = [i for i, leaf in enumerate(written) if origins[i] != leaf.param_index]
    changed = [written[i] for i in indices]
    specs = [_jaxpr.spec(traced.params[leaf.param_index].aval) for leaf in changed]
    _check_lasting(changed, specs)

    norms = list[NormIndices]()
    statistic_names = set[str]()
    for mean, var, name in _batch_norm.find_norms(
        [leaf.path for leaf in changed], [origins[i] for i in indices]
    ):
        norms.append(NormIndices(mean, var, _batch_norm.momentum_of(name)))
        statistic_names.add(name)
    _check_norms(closed, statistic_names)

    state = StateUpdate(
        aux_indices=tuple(first_index + i for i in indices),
        param_indices=tuple(leaf.param_index for leaf in changed),
        specs=tuple(specs),
        new_specs=tuple(_jaxpr.spec(results[i].aval) for i in indices),
        norms=tuple(norms),
    )
    _check_dtypes(state, changed)
    return state


def drop_unwritten_aux(
    traced: TracedFunction,
    first_index: int,
    written: Sequence[StateLeaf],
    *,
    kept: Container[int],
) -> TracedFunction:
    """Makes a program return leaves unchanged that it may write, but does not.

    Args:
      traced: the program.
      first_index: the index, among its results besides the loss, of the first leaf.
      written: the leaves that it may write.
      kept: the indices, among these results, of the leaves that it writes.
    """
    outvars = list(traced.closed.jaxpr.outvars)
    begin = len(outvars) - len(traced.once_results) - len(written)
    for i, leaf in enumerate(written):
        if first_index + i not in kept:
            outvars[begin + i] = traced.params[leaf.param_index]
    return replace(traced, closed=_with_outvars(traced, outvars))


def find_changes(
    traced: TracedFunction, first_index: int, written: Sequence[StateLeaf]
) -> list[StateLeaf]:
    """Finds the leaves that a program changes in evaluation: see `find_updates`."""
    closed = _with_outvars(traced, traced.aux_vars[first_index:])
    pairs = zip(written, _dataflow.result_origins(closed), strict=True)
    return [leaf for leaf, origin in pairs if origin != leaf.param_index]


def _with_outvars(traced: TracedFunction, outvars: Sequence[Any]) -> core.ClosedJaxpr:
    jaxpr = traced.closed.jaxpr.replace(outvars=list(outvars))
    return core.ClosedJaxpr(jaxpr, traced.closed.consts)


def _check_lasting(written: Sequence[StateLeaf], specs: Sequence[Any]) -> None:
    """Refuses a call whose writes would be lost: a step takes none of these leaves."""
    params = list[str]()
    keys = list[str]()
    metrics = list[str]()
    caches = list[str]()
    for leaf, spec in zip(written, specs, strict=True):
        if leaf.collection == "params":
            params.append(leaf.text)
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            keys.append(leaf.text)
        if leaf.collection == "metric_state":
            metrics.append(leaf.text)
        if leaf.collection == "cache":
            caches.append(leaf.text)

    raise_all(
        "parameters are changed by the optimizer alone; what a call writes to them "
        "would be lost when it ends. Keep what it changes in an nnx.BatchStat, or in a "
        "subclass of nnx.Variable of your own; where a weight is normalized, compute "
        "it in the call and do not write it back",
        params,
    )
    raise_all(
        "a call changes a random key that is no random stream, from which all "
        "micro-batches would draw the same; draw from streams: rngs() of an "
        "nnx.Rngs(0) that the module holds in its place; self.make_rng in flax.linen",
        keys,
    )
    if _batch_norm.are_merged():
        raise_all(
            "a call updates a metric, of which a pipeline would keep the mean over "
            "micro-batches; return what it counts with has_aux=True, and update the "
            "metric after the step",
            metrics,
        )
        raise_all(
            "a cache has rows for each example, of which training would keep the mean "
            "over micro-batches; decode by y, state = pipe.apply(variables, x, "
            "mutable=['cache']), or type num_microbatches=1",
            caches,
        )


def _check_norms(closed: core.ClosedJaxpr, written_names: set[str]) -> None:
    """Refuses batch norms whose statistics are none of the written leaves."""
    all_names = _dataflow.names(closed, _batch_norm.STATISTIC_NAME_PREFIX)
    if lost_names := all_names - written_names:
        listed = ", ".join(name.split()[-1] for name in sorted(lost_names))
        raise ValueError(
            f"what batch norm {listed} leaves as its running statistics is copied or "
            f"changed in the same step by code that is not Flax's, or is no variable "
            f"of its layer; here it is that of one micro-batch. For a rule of your own "
            f"write a norm of your own, or take num_microbatches=1"
        )


def _check_dtypes(state: StateUpdate, written: Sequence[StateLeaf]) -> None:
    """Checks that the dtype of each leaf, which it keeps, can hold its new value.

    Integers cannot hold a mean over micro-batches. Running statistics of batch norms
    may stay in single precision, in which Flax makes them.
    """
    norm_indices = set[int]()
    for norm in state.norms:
        norm_indices |= {norm.mean, norm.var}
    columns = zip(written, state.specs, state.new_specs, strict=True)
    for i, (leaf, spec, new) in enumerate(columns):
        is_real = not jnp.issubdtype(new.dtype, jnp.complexfloating)
        fits = i in norm_indices and is_real and spec.dtype.itemsize >= _SINGLE
        if not is_inexact(new) or fits:
            continue
        if jnp.result_type(new, spec.dtype) != spec.dtype:
            raise ValueError(
                f"{leaf.text} of {new.dtype}, which is {spec.dtype}, and a pipeline "
                f"keeps dtypes: where you cast variables, cast the parameters alone; "
                f"else let the layer make it of {new.dtype}, or write what is cast to "
                f"{spec.dtype}"
            )
