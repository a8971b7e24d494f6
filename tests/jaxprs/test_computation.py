"""What is known of a function before it is compiled.

`compose` is imported because a pipeline shows nothing of its functions but programs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._jaxprs._computation import (
    Argument,
    Computation,
    Result,
    compose,
)
from jpipe._jaxprs._host_memory import is_on_host

from ..instructions.graphs import ADD, BOTH, SPEC, function


def composed(first, second, sources):
    return Computation.from_jaxpr("both", compose(first.closed, second.closed, sources))


def test_a_computation_reads_only_arguments_that_its_results_need():
    made = function(lambda x, y, z: [z + 1, z - x], *[SPEC] * 3)
    assert list(made.used_args) == [0, 2]
    first, second = made.run(jnp.ones(3), jnp.full(3, 4.0))
    np.testing.assert_array_equal(first, [5] * 3)
    np.testing.assert_array_equal(second, [3] * 3)
    assert [leaf.shape for leaf in made.results] == [(3,), (3,)]


def test_aliases_are_the_results_that_are_no_new_arrays():
    def run(x, y):
        double = 2 * x
        return [y, double, double, 1 + y, y]

    made = function(run, SPEC, SPEC)
    # The second argument; the result before; the second argument again.
    assert made.aliases == {
        0: Argument(1),
        2: Result(1),
        4: Argument(1),
    }


def test_host_memory_and_effects_are_read_off_the_jaxpr():
    def offloading(x):
        return [x + 1, jax.device_put(2 * x, jax.memory.Space.Host)]

    def printing(x):
        jax.debug.print("{}", x)
        return [x + 1]

    assert [*map(is_on_host, function(offloading, SPEC).results)] == [False, True]
    assert not function(offloading, SPEC).has_effects
    assert function(printing, SPEC).has_effects


def test_composed_jaxprs_give_the_results_of_both():
    # (x) -> (sin x, cos x), and (cos x) + x of the results and arguments of the first.
    both = composed(BOTH, ADD, [Result(1), Argument(0)])
    x = jnp.arange(3.0)
    sine, cosine, added = both.run(x)
    np.testing.assert_array_equal(sine, jnp.sin(x))
    np.testing.assert_array_equal(cosine, jnp.cos(x))
    np.testing.assert_array_equal(added, jnp.cos(x) + x)
    assert len(both.results) == 3
    assert both.aliases == {}


def test_other_inputs_of_the_second_jaxpr_follow_those_of_the_first():
    both = composed(BOTH, ADD, [None, Result(0)])
    x, y = jnp.arange(3.0), jnp.ones(3)
    np.testing.assert_array_equal(both.run(x, y)[2], y + jnp.sin(x))


def test_aliases_of_the_second_jaxpr_are_found_through_the_first():
    first = function(lambda x, y: [x, x + y, y], SPEC, SPEC)
    second = function(lambda a, b, c: [a, b, c, b + c, c + 1], *[SPEC] * 3)
    assert first.aliases == {0: Argument(0), 2: Argument(1)}
    assert second.aliases == {i: Argument(i) for i in range(3)}
    # Given are what the first makes, what it hands on, and an argument of its own.
    both = composed(first, second, [Result(1), Result(0), None])
    handed_on = {3: Result(1), 4: Argument(0), 5: Argument(2)}
    assert both.aliases == first.aliases | handed_on
    twice = function(lambda a: [2 * a, 2 * a + 1], SPEC)
    again = function(lambda a: (lambda b: [b, b])(3 * a), SPEC)
    assert again.aliases == {1: Result(0)}
    assert composed(twice, again, [Result(0)]).aliases == {3: Result(2)}


def test_constants_and_effects_of_both_are_those_of_the_whole():
    table = np.arange(3, dtype=np.float32)

    def printing(x):
        jax.debug.print("{}", x)
        return [x + jnp.asarray(table)]

    first = function(lambda x: [x * jnp.asarray(table)], SPEC)
    both = composed(first, function(printing, SPEC), [Result(0)])
    assert both.has_effects
    np.testing.assert_array_equal(both.run(jnp.ones(3))[1], 2 * table)
