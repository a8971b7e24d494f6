"""What is known of a function before it is compiled.

`composed` is imported because a pipeline shows nothing of its functions but programs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._instructions._compile import on_host
from jpipe._jaxprs._function import composed

from .graphs import ADD, BOTH, SPEC, function


def test_reads_what_its_results_need():
    made = function(lambda x, y, z: [z + 1, z - x], *[SPEC] * 3)
    assert list(made.reads) == [0, 2]
    first, second = made.run(jnp.ones(3), jnp.full(3, 4.0))
    np.testing.assert_array_equal(first, [5] * 3)
    np.testing.assert_array_equal(second, [3] * 3)
    assert [leaf.shape for leaf in made.results] == [(3,), (3,)]


def test_tells_results_that_are_no_new_arrays():
    def run(x, y):
        double = 2 * x
        return [y, double, double, 1 + y, y]

    made = function(run, SPEC, SPEC)
    # The second argument; the result before; the second argument again.
    assert made.same == {0: 1, 2: ~1, 4: 1}


def test_knows_what_is_on_the_host_and_what_has_effects():
    def offloading(x):
        return [x + 1, jax.device_put(2 * x, jax.memory.Space.Host)]

    def printing(x):
        jax.debug.print("{}", x)
        return [x + 1]

    assert [*map(on_host, function(offloading, SPEC).results)] == [False, True]
    assert not function(offloading, SPEC).has_effects
    assert function(printing, SPEC).has_effects


def test_composed_functions_give_the_results_of_both():
    both = composed(BOTH, ADD, 1, (~1, 0))
    x = jnp.arange(3.0)
    sine, cosine, added = both.run(x)
    np.testing.assert_array_equal(sine, jnp.sin(x))
    np.testing.assert_array_equal(cosine, jnp.cos(x))
    np.testing.assert_array_equal(added, jnp.cos(x) + x)
    assert both.name == "both_add"
    assert list(both.results) == [*BOTH.results, *ADD.results]
    assert both.same == {}


def test_what_the_second_hands_on_is_found_through_the_first():
    first = function(lambda x, y: [x, x + y, y], SPEC, SPEC)
    second = function(lambda a, b, c: [a, b, c, b + c, c + 1], *[SPEC] * 3)
    assert first.same == {0: 0, 2: 1}
    assert second.same == {0: 0, 1: 1, 2: 2}
    # Given are what the first makes, what it hands on, and an argument of its own.
    both = composed(first, second, 2, (~1, ~0, 2))
    assert both.same == {0: 0, 2: 1, 3: ~1, 4: 0, 5: 2}
    twice = function(lambda a: [2 * a, 2 * a + 1], SPEC)
    again = function(lambda a: (lambda b: [b, b])(3 * a), SPEC)
    assert again.same == {1: ~0}
    assert composed(twice, again, 1, (~0,)).same == {3: ~2}
