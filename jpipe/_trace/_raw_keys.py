"""Folds the number of the micro-batch into raw keys, such as of `jax.random.PRNGKey`.

A typed key is folded before it is given to the user's function. Of a raw key, an array
of words as others are, only the trace tells that it is one:

    words = key * 1                 computed from words
    k = random_wrap words           a key: so `key` is a raw key
    next_key = add key 1            words that are returned

Such an input is folded wherever it is read. What the function returns of its words by
arithmetic alone, as the state of a generator, is what one device returns. All else,
such as keys that are split from it, is folded, as it is of a typed key.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._primitives import DRAWS
from .._layers import _rng
from ._boundaries import without_marks


def fold_raw_keys(
    closed: core.ClosedJaxpr, may_be_key: Sequence[bool]
) -> core.ClosedJaxpr:
    """Folds the micro-batch's index into inputs that are raw keys.

    Args:
      closed: the jaxpr; its last input is the index.
      may_be_key: one bool per input; False for what is split by examples.
    """
    # index of an input that is a raw key -> the function that makes a key of its words
    wraps: dict[int, Callable[[Any], Any]] = {}
    is_words = [False] * len(closed.jaxpr.outvars)  # for each result
    for i, var in enumerate(closed.jaxpr.invars):
        aval: Any = var.aval
        if not (may_be_key[i] and aval.dtype == jnp.uint32):
            continue
        words = _follow_words(closed.jaxpr, {var})
        wrap = words.wraps.get(aval.shape)
        if wrap is None:
            continue
        wraps[i] = wrap
        for k, atom in enumerate(closed.jaxpr.outvars):
            is_words[k] |= not isinstance(atom, core.Literal) and atom in words.vars
    if not wraps:
        return closed
    words_outvars = itertools.compress(closed.jaxpr.outvars, is_words)
    words_jaxpr = _jaxpr.recomputation(closed, [*words_outvars], stored=[])

    def run(*args: Any) -> list[Any]:
        folded_args = list(args)
        for i, wrap in wraps.items():
            key = _rng.microbatch_key(wrap(args[i]), args[-1])
            folded_args[i] = jax.random.key_data(key)
        unfolded = _jaxpr.evaluate(words_jaxpr, args, without_marks)
        results = _jaxpr.as_traced(closed)(*folded_args)
        return _jaxpr.replace_leaves(results, unfolded, is_words)

    return _jaxpr.retrace(closed, run)


class _Words(NamedTuple):
    """The variables and keys that are computed from the words of an input.

    Attributes:
      vars: the variables that follow by arithmetic alone, and the input.
      wraps: shape of words of which a single key is made -> the function that makes it.
    """

    vars: set[core.Var]
    wraps: dict[tuple[int, ...], Callable[[Any], Any]]


def _follow_words(jaxpr: core.Jaxpr, words: set[core.Var]) -> _Words:
    """Follows the words of a key through a jaxpr, and the jaxprs inside of it."""
    by_arithmetic = set(words)
    words = set(words)
    wraps: dict[tuple[int, ...], Callable[[Any], Any]] = {}
    for eqn in jaxpr.eqns:
        operands = [
            not isinstance(atom, core.Literal) and atom in words for atom in eqn.invars
        ]
        if not any(operands):
            continue
        if eqn.primitive.name == "random_wrap":
            if _rng.is_single_key(eqn.outvars[0].aval):
                words_aval: Any = eqn.invars[0].aval
                wraps[words_aval.shape] = _binding(jaxpr, eqn)
            continue

        bodies = _jaxpr.bodies(eqn)
        for body in bodies:
            pairs = zip(
                body.jaxpr.invars,
                operands[len(operands) - len(body.jaxpr.invars) :],
                strict=True,
            )
            inner = _follow_words(
                body.jaxpr, {var for var, is_word in pairs if is_word}
            )
            wraps = inner.wraps | wraps
        if eqn.primitive.name not in DRAWS:
            results = {var for var in eqn.outvars if _may_be_words(var)}
            words |= results
            if not bodies and not by_arithmetic.isdisjoint(
                _jaxpr.variables(eqn.invars)
            ):
                by_arithmetic |= results
    return _Words(by_arithmetic, wraps)


def _binding(jaxpr: core.Jaxpr, eqn: core.JaxprEqn) -> Callable[[Any], Any]:
    """The function ``words -> key`` of an equation that makes a key."""

    def wrap(words: Any) -> Any:
        (key,) = _jaxpr.bind(jaxpr, eqn, [words])
        return key

    return wrap


def _may_be_words(var: Any) -> bool:
    """True if a variable may hold the words of a key, of 32 bits each."""
    dtype = getattr(var.aval, "dtype", jnp.float32)
    return dtype in (jnp.uint32, jnp.int32)
