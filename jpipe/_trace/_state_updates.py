"""What a call writes besides its output, as running sums over micro-batches.

Statistics of Flax's batch norms become those of all micro-batches, and move once; other
floating leaves the mean over the examples; those of integers are what the last
micro-batch makes of them.
"""

from collections.abc import Callable, Sequence
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
      at: which of the parameters of the program it is.
      path: where it stands among the variables; the last two names of a statistic are
        those of its norm and its own.
      text: how errors call it: ``"layer 1 (BatchNorm) writes batch_stats/mean"``.
    """

    at: int
    path: Path
    text: str

    @property
    def collection(self) -> str:
        """What it is in, such as ``"batch_stats"``; in a list behind the layer."""
        return next(key.key for key in self.path if hasattr(key, "key"))


@dataclass(frozen=True)
class StateUpdate:
    """What one stage, or a whole program, writes.

    Attributes:
      leaves: which of what is returned besides the loss.
      at: of each which of the parameters it is.
      specs: of these.
      made: of what a micro-batch makes of them.
      norms: of each batch norm where its mean and its variance stand among the leaves,
        and its momentum.
    """

    leaves: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    specs: tuple[jax.ShapeDtypeStruct, ...] = ()
    made: tuple[jax.ShapeDtypeStruct, ...] = ()
    norms: tuple[tuple[int, int, float], ...] = ()

    @property
    def has_integers(self) -> bool:
        """Whether a leaf of integers is written: what the last micro-batch makes."""
        return not all(map(is_inexact, self.specs))

    @property
    def has_means(self) -> bool:
        """Whether a leaf is a mean over the examples."""
        return any(map(is_inexact, self.specs))

    @property
    def sum_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the running sums: of each leaf, and the share that was seen."""
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))
        sums = [
            sum_spec(new if is_inexact(old) and _is_wider(new, old) else old)
            for old, new in zip(self.specs, self.made, strict=True)
        ]
        return [*sums, *[share] * self.has_means]

    def of_stages(self, stages: Sequence[int], count: int) -> list["StateUpdate"]:
        """What each of so many stages writes, given the stage of each leaf."""
        stage = list(stages)
        for mean, var, _ in self.norms:  # those of one norm may be made in two
            stage[mean] = stage[var] = max(stage[mean], stage[var])
        found = []
        for s in range(count):
            chosen = [i for i, of in enumerate(stage) if of == s]
            place = {i: k for k, i in enumerate(chosen)}
            norms = [
                (place[mean], place[var], momentum)
                for mean, var, momentum in self.norms
                if mean in place
            ]
            leaves = tuple(self.leaves[i] for i in chosen)
            at = tuple(self.at[i] for i in chosen)
            kinds = self.specs, self.made
            specs, made = (tuple(column[i] for i in chosen) for column in kinds)
            found.append(StateUpdate(leaves, at, specs, made, tuple(norms)))
        return found

    def add(self, sums: Leaves, new: Leaves, share: Any = None) -> list[Any]:
        """Adds what one micro-batch wrote, with its share of the examples for means."""
        if not self.has_means:
            return list(new)
        seen = sums[-1]
        after = self._means(sums, new, seen, share)
        for mean, var, _ in self.norms:
            so_far = _batch_norm.MergedStatistics(sums[mean], sums[var])
            merged = _batch_norm.merge(so_far, new[mean], new[var], seen, share)
            # The share may be of a wider dtype than the statistics.
            after[mean] = merged.mean.astype(so_far.mean.dtype)
            after[var] = merged.m2.astype(so_far.m2.dtype)
        return [*after, seen + share]

    def merge(self, sums: Leaves, others: Leaves) -> list[Any]:
        """The running sums of some micro-batches and of others as those of all."""
        if not self.has_means:
            return list(others)
        (*before, seen), (*new, share) = sums, others
        after = self._means(before, new, seen, share)
        for mean, var, _ in self.norms:
            so_far = _batch_norm.MergedStatistics(before[mean], before[var])
            merged = _batch_norm.merge(so_far, new[mean], new[var] / share, seen, share)
            after[mean] = merged.mean.astype(so_far.mean.dtype)
            after[var] = merged.m2.astype(so_far.m2.dtype)
        return [*after, seen + share]

    def _means(self, so_far: Leaves, new: Leaves, seen: Any, share: Any) -> list[Any]:
        weight = share / (seen + share)
        return [
            extend_mean(old, x.astype(old.dtype), weight.astype(old.dtype))
            if is_inexact(old)
            else x
            for old, x in zip(so_far, new, strict=False)
        ]

    def commit(self, old: Leaves, sums: Leaves) -> list[Any]:
        """The new values of the leaves, given the old ones and the running sums."""
        new = list(sums[: len(old)])
        for mean, var, momentum in self.norms:
            for at in (mean, var):
                new[at] = _batch_norm.move_running_statistics(
                    old[at], new[at], momentum
                )
        return [x.astype(leaf.dtype) for x, leaf in zip(new, old, strict=True)]


def _is_wider(new: Any, old: Any) -> bool:
    return jnp.promote_types(old.dtype, new.dtype) != old.dtype


def find_updates(
    program: TracedFunction, first: int, written: Sequence[StateLeaf]
) -> StateUpdate:
    """What a program writes of what it returns besides the loss.

    Args:
      program: the program, in training.
      first: the number of the first such leaf in what it returns.
      written: of each what it is.

    Returns:
      The leaves that are not given back as they were.

    Raises:
      ValueError: if a call writes what the step does not take from it, or batch norms
        cannot be merged.
    """
    leaves = program.aux_vars[first:]
    closed = _returning(program, leaves)
    origins = _dataflow.origins(closed, _batch_norm.MARK)
    # A transformation such as nn.remat returns all it was given as if it had made it.
    new = [i for i, leaf in enumerate(written) if origins[i] != leaf.at]
    own = [written[i] for i in new]
    specs = [_jaxpr.spec(program.params[leaf.at].aval) for leaf in own]
    _check_lasting(own, specs)
    paths = [leaf.path for leaf in own]
    norms = _batch_norm.find_norms(paths, [origins[i] for i in new])
    _check_norms(closed, {mark for *_, mark in norms})
    found = StateUpdate(
        tuple(first + i for i in new),
        tuple(leaf.at for leaf in own),
        tuple(specs),
        tuple(_jaxpr.spec(leaves[i].aval) for i in new),
        tuple((mean, var, _batch_norm.momentum_of(mark)) for mean, var, mark in norms),
    )
    _check_dtypes(found, own)
    return found


def drop_unwritten_aux(
    program: TracedFunction,
    first: int,
    written: Sequence[StateLeaf],
    state: StateUpdate,
) -> TracedFunction:
    """A program that gives back as it came what of such leaves is not written."""
    outvars = list(program.closed.jaxpr.outvars)
    begin = len(outvars) - len(program.rest) - len(written)
    for i, leaf in enumerate(written):
        if first + i not in state.leaves:
            outvars[begin + i] = program.params[leaf.at]
    jaxpr = program.closed.jaxpr.replace(outvars=outvars)
    return replace(program, closed=core.ClosedJaxpr(jaxpr, program.closed.consts))


def find_changes(
    program: TracedFunction, first: int, written: Sequence[StateLeaf]
) -> list[StateLeaf]:
    """Those of the leaves that a program, in evaluation, changes all the same."""
    origins = _dataflow.origins(_returning(program, program.aux_vars[first:]))
    pairs = zip(written, origins, strict=True)
    return [leaf for leaf, origin in pairs if origin != leaf.at]


def _returning(program: TracedFunction, leaves: Sequence[Any]) -> core.ClosedJaxpr:
    jaxpr = program.closed.jaxpr.replace(outvars=list(leaves))
    return core.ClosedJaxpr(jaxpr, program.closed.consts)


def _check_lasting(written: Sequence[StateLeaf], specs: Sequence[Any]) -> None:
    """Refuses a call that writes what the step does not take from it."""

    def where(chosen: Callable[[StateLeaf, Any], bool]) -> list[str]:
        return [x.text for x, s in zip(written, specs, strict=True) if chosen(x, s)]

    raise_all(
        "parameters are changed by the optimizer alone; what a call writes to them "
        "would be lost when it ends. Keep what it changes in an nnx.BatchStat, or in a "
        "subclass of nnx.Variable of your own; where a weight is normalized, compute "
        "it in the call and do not write it back",
        where(lambda leaf, spec: leaf.collection == "params"),
    )
    raise_all(
        "a call changes a random key that is no random stream, from which all "
        "micro-batches would draw the same; draw from streams: rngs() of an "
        "nnx.Rngs(0) that the module holds in its place; self.make_rng in flax.linen",
        where(lambda leaf, spec: jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)),
    )
    if _batch_norm.are_merged():
        raise_all(
            "a call updates a metric, of which a pipeline would keep the mean over "
            "micro-batches; return what it counts with has_aux=True, and update the "
            "metric after the step",
            where(lambda leaf, spec: leaf.collection == "metric_state"),
        )


def _check_norms(closed: core.ClosedJaxpr, found: set[str]) -> None:
    """Refuses batch norms whose statistics are none of the written leaves."""
    if lost := _dataflow.names(closed, _batch_norm.MARK) - found:
        listed = ", ".join(mark.split()[-1] for mark in sorted(lost))
        raise ValueError(
            f"what batch norm {listed} leaves as its running statistics is copied or "
            f"changed in the same step by code that is not Flax's, or is no variable "
            f"of its layer; here it is that of one micro-batch. For a rule of your own "
            f"write a norm of your own, or take num_microbatches=1"
        )


def _check_dtypes(state: StateUpdate, written: Sequence[StateLeaf]) -> None:
    """A leaf keeps its dtype, in which all that is written to it must have a place.

    A mean over micro-batches has none in integers. Running statistics of batch norms
    may stay in single precision, in which Flax makes them.
    """
    norms = {place for mean, var, _ in state.norms for place in (mean, var)}
    triples = zip(written, state.specs, state.made, strict=True)
    for place, (leaf, spec, made) in enumerate(triples):
        is_real = not jnp.issubdtype(made.dtype, jnp.complexfloating)
        fits = place in norms and is_real and spec.dtype.itemsize >= _SINGLE
        if not is_inexact(made) or fits:
            continue
        if jnp.result_type(made, spec.dtype) != spec.dtype:
            raise ValueError(
                f"{leaf.text} of {made.dtype}, which is {spec.dtype}, and a pipeline "
                f"keeps dtypes: where you cast variables, cast the parameters alone; "
                f"else let the layer make it of {made.dtype}, or write what is cast to "
                f"{spec.dtype}"
            )
