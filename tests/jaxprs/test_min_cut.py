"""The fewest bytes from which the rest follows cheaply, against all other choices.

Private names are imported because a choice is of equations, which a pipeline does not
show: only how many bytes they are.
"""

import itertools

import jax
import jax.numpy as jnp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jpipe._jaxprs import _inlining, _jaxpr
from jpipe._jaxprs._min_cut import find_residuals, is_cheap, nbytes

# What a step computes of one or two values; those in DEAR are dear.
ONE = [jnp.sin, lambda x: x.astype(jnp.bfloat16), lambda x: x > 0, jnp.sum]
DEAR = [
    lambda x: jnp.outer(x, x) @ x,
    lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x)[1],
]
TWO = [jnp.add, jnp.multiply, lambda x, y: jnp.where(x > 0, x, y)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*ONE, *DEAR, *TWO]), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=1,
    max_size=5,
)
SPEC = jax.ShapeDtypeStruct((4,), jnp.float32)


def build(steps):
    """The jaxpr of a function of a weight and two inputs: each step makes a value."""

    def run(*made):
        made = list(made)
        for function, *numbers in steps:
            given = [jnp.float32(made[n % len(made)]) for n in numbers]
            given = [jnp.broadcast_to(x, 4) for x in given]
            made.append(function(*given[: 1 + (function in TWO)]))
        return made

    return _inlining.trace(run, SPEC, SPEC, SPEC)[0]


def follows(jaxpr, kept, wanted):
    """Whether variables follow cheaply from others, and from the weight in any way."""
    known, constant = {*kept}, {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        operands = _jaxpr.variables(eqn.invars)
        if operands <= constant:
            constant.update(eqn.outvars)
        if is_cheap(eqn) and operands <= known | constant:
            known.update(eqn.outvars)
    return _jaxpr.variables(wanted) <= known | constant


@settings(deadline=None)
@given(STEPS, st.integers(1, 99), st.booleans())
def test_no_other_choice_has_fewer_bytes(steps, number, held):
    closed = build(steps)
    jaxpr = closed.jaxpr
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    assume(len(made) <= 11)
    wanted = [var for i, var in enumerate(made) if number >> i % 7 & 1]
    found = find_residuals(
        closed,
        wanted,
        is_recomputable=[True, False, False],
        is_stored=[False, False, held],
    )
    # Which inputs are kept is not said: those that are read.
    rest = _jaxpr.recomputation(closed, wanted, found)
    live = _jaxpr.used_inputs(rest)
    kept = [var for var, yes in zip(jaxpr.invars, live, strict=False) if yes]

    def size(variables):
        return sum(nbytes(v) for v in variables if not (held and v is jaxpr.invars[2]))

    assert follows(jaxpr, [*found, *kept[live[0] :]], wanted)
    fewest = min(
        size(some)
        for count in range(len(made) + 3)
        for some in itertools.combinations([*jaxpr.invars[1:], *made], count)
        if follows(jaxpr, some, wanted)
    )
    assert size([*found, *kept[live[0] :]]) == fewest


def test_a_long_chain_is_divided_where_it_is_narrow():
    def run(x, *products):
        values = []
        for y in products:
            wide = jnp.concatenate([x, jnp.outer(y, y) @ y])
            x = wide[:4] + wide[4:]
            values += [x, wide]
        return values

    depth = 60
    closed = _inlining.trace(run, *[SPEC] * (1 + depth))[0]
    inputs = [True] * (1 + depth)
    wanted = closed.jaxpr.outvars
    residuals = find_residuals(
        closed, wanted, is_recomputable=[False for _ in inputs], is_stored=inputs
    )
    dear = {eqn.outvars[0] for eqn in closed.jaxpr.eqns if not is_cheap(eqn)}
    links = [var for var in residuals if var not in dear]
    assert 2 <= len(links) <= depth / 5
    assert {var.aval.shape for var in links} == {(4,)}
