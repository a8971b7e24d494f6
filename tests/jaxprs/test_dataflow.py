"""What follows from what: random programs, of which an input is changed."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from jax.extend import core

from jpipe._jaxprs import _dataflow, _inlining
from jpipe._trace import _refs


def scan(step, *carry):
    return jax.lax.scan(lambda c, _: (step(*c), None), carry, None, length=3)[0]


def fori(step, *carry):
    return jax.lax.fori_loop(0, 3, lambda _, c: step(*c), carry)


def until(step, *carry):
    """The last carry tells when the loop ends, after five iterations at most."""

    def is_running(carry):
        count, *values = carry
        return (count < 5) & (jnp.abs(values[-1]) < 2)

    def body(carry):
        count, *values = carry
        *others, last = step(*values)
        return (count + 1, *others, last + 0.7)

    _, *values = jax.lax.while_loop(is_running, body, (0, *carry))
    return tuple(values)


def branch(step, *carry):
    return jax.lax.cond(carry[-1] > 0, step, lambda *c: c, *carry)


def with_rule(step, *carry):
    function = jax.custom_jvp(lambda *c: step(*c))
    function.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return function(*carry)


def with_ref(step, *carry):
    cells = [jax.new_ref(x) for x in carry]
    for cell, x in zip(cells, step(*[cell[...] for cell in cells]), strict=True):
        cell[...] = 0.5 * cell[...] + x
    return tuple(cell[...] for cell in cells)


CALLS = {
    "plainly": lambda step, *carry: step(*carry),
    "jit": lambda step, *carry: jax.jit(step)(*carry),
    "checkpoint": lambda step, *carry: jax.checkpoint(step)(*carry),
    "scan": scan,
    "fori_loop": fori,
    "while_loop": until,
    "cond": branch,
    "custom_jvp": with_rule,
    "ref": with_ref,
}
NUM_VALUES = 4

# A step computes new values, each from two of the old ones, or from one.
steps = st.lists(
    st.tuples(st.integers(0, NUM_VALUES - 1), st.integers(0, NUM_VALUES - 1)),
    min_size=NUM_VALUES,
    max_size=NUM_VALUES,
)
programs = st.lists(
    st.tuples(st.sampled_from(sorted(CALLS)), steps), min_size=1, max_size=3
)


def build(program):
    def run(*values):
        for name, reads in program:

            def step(*values, reads=reads):
                return tuple(
                    values[i] * 0.5 if i == k else values[i] * 0.5 + values[k]
                    for i, k in reads
                )

            values = CALLS[name](step, *values)
        return values

    return run


# A loop that may end before its first iteration, which overwrites what is changed.
@example([("while_loop", [(0, 0), (0, 0), (0, 0), (0, 2)])], 1, 2)
@given(programs, st.integers(0, NUM_VALUES - 1), st.integers(0, 2**16))
def test_what_follows_from_nothing_that_is_changed_is_the_same_to_the_bit(
    program, changed, seed
):
    rng = np.random.default_rng(seed)
    values = [jnp.asarray(x, jnp.float32) for x in rng.normal(size=NUM_VALUES)]
    closed, _ = _inlining.trace(build(program), *values)
    closed = _refs.replace_refs(closed)
    run = core.jaxpr_as_fun(closed)
    before = run(*values)
    follows = _dataflow.dependent_results(
        closed, [i == changed for i in range(NUM_VALUES)]
    )
    for x in rng.normal(size=5):
        values[changed] = jnp.float32(4 * x)
        for follows_here, old, new in zip(follows, before, run(*values), strict=True):
            assert follows_here or old == new


def two_results(call):
    def run(a, b):
        return CALLS[call](lambda a, b: (a * 2.0, b * 3.0), a, b)

    return run


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"while_loop", "cond"}))
def test_each_result_follows_from_what_it_reads_alone(call):
    closed, _ = _inlining.trace(two_results(call), jnp.float32(1), jnp.float32(2))
    closed = _refs.replace_refs(closed)
    assert _dataflow.dependent_results(closed, [True, False]) == [True, False]
    assert _dataflow.dependent_results(closed, [False, True]) == [False, True]


@pytest.mark.parametrize("call", ["while_loop", "cond"])
def test_all_results_follow_from_what_chooses_a_branch_or_ends_a_loop(call):
    closed, _ = _inlining.trace(two_results(call), jnp.float32(1), jnp.float32(2))
    assert _dataflow.dependent_results(closed, [False, True]) == [True, True]


def test_derivatives_pass_no_integer_and_no_stop_gradient():
    def run(x):
        rounded = jnp.round(x).astype(jnp.int32).astype(jnp.float32)
        return x * 2, rounded, jax.jit(jax.lax.stop_gradient)(x), x > 0

    closed, _ = _inlining.trace(run, jnp.float32(1))
    assert _dataflow.dependent_results(closed, [True]) == [True] * 4
    results = _dataflow.dependent_results(closed, [True], differentiably=True)
    assert results == [True, False, False, False]


def test_a_rule_for_derivatives_may_give_a_tangent_where_no_value_follows():
    @jax.custom_jvp
    def constant(x, y):
        return y * 1

    constant.defjvp(lambda primals, tangents: (primals[1], sum(tangents)))
    closed, _ = _inlining.trace(constant, jnp.float32(1), jnp.float32(2))
    assert _dataflow.dependent_results(closed, [True, False]) == [False]
    assert _dataflow.dependent_results(closed, [True, False], differentiably=True) == [
        True
    ]
