"""The list of instructions: what is donated, freed, made, and said of an error.

Private names are imported because a list by hand has as few instructions as a fact
needs.
"""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe._instructions._graph import NOWHERE, OUTSIDE, Graph
from jpipe._instructions._memory import live_bytes, peak_bytes
from jpipe.schedules import Action

from .graphs import ADD, BOTH, DOUBLE, SPEC, arguments, calls, function, leaf
from .graphs import program as program_of


def donated(graph, outputs):
    """How many arguments each call donates."""
    return [len(call.donates) for call in calls(program_of(graph, outputs))]


class TestDonation:
    def test_values_read_for_the_last_time_may_be_overwritten(self):
        graph, (x,) = arguments(1)
        (a,) = graph.call(DOUBLE, 0, [x], label="first")
        (b,) = graph.call(function(lambda x: [x + 1], SPEC), 0, [a], label="second")
        made = program_of(graph, [b])
        assert [len(call.donates) for call in calls(made)] == [0, 1]
        given, seen = leaf(1), {}

        def observe(instruction, slots):
            seen[instruction.label] = slots[instruction.writes.start]

        np.testing.assert_array_equal(made([given], observe=observe)[0], [3] * 3)
        assert not given.is_deleted()
        assert seen["first"].is_deleted()

    @pytest.mark.parametrize("place", [0, OUTSIDE, NOWHERE])
    def test_arguments_are_overwritten_only_if_donated(self, place):
        graph, (x,) = arguments(1, place)
        assert donated(graph, graph.call(DOUBLE, 0, [x])) == [0]

    def test_an_argument_is_deleted_after_its_one_call(self):
        graph, (x,) = arguments(1, donated=True)
        made = program_of(graph, graph.call(DOUBLE, 0, [x]))
        given = leaf(1)
        np.testing.assert_array_equal(made([given])[0], [2] * 3)
        assert given.is_deleted()

    @pytest.mark.parametrize("number", [0, 1])
    def test_leaves_the_arguments_in_their_order(self, number):
        graph, values = arguments(2)
        graph.donated = {values[number]}
        minus = function(lambda x, y: [x - y], SPEC, SPEC, name="minus")
        made = program_of(graph, graph.call(minus, 0, values))
        (call,) = calls(made)
        assert (list(call.reads), list(call.donates)) == ([0, 1], [number])
        given = [leaf(5), leaf(3)]
        np.testing.assert_array_equal(made(given)[0], [2] * 3)
        assert [x.is_deleted() for x in given] == [number == 0, number == 1]

    def test_never_of_what_is_returned(self):
        graph, (x,) = arguments(1, donated=True)
        (a,) = graph.call(DOUBLE, 0, [x])
        (b,) = graph.call(function(lambda x: [x + 1], SPEC), 0, [a])
        assert donated(graph, [a, b]) == [1, 0]

    def test_not_of_what_is_read_again(self):
        graph, (x,) = arguments(1, donated=True)
        (a,) = graph.call(DOUBLE, 0, [x])
        (b,) = graph.call(ADD, 0, [a, x])
        # The first read of the argument is not its last; one result is one memory.
        assert donated(graph, [b]) == [0, 1]

    def test_copies_that_were_sent_and_that_arrived_may_be_overwritten(self):
        graph, (x,) = arguments(1)
        (a,) = graph.call(DOUBLE, 0, [x])
        (b,) = graph.call(function(lambda x: [x + 1], SPEC), 0, [a])
        (c,) = graph.call(ADD, 1, [a, b])
        made = program_of(graph, [c])
        assert [i.source for i in made.instructions] == [None, 0, None, 0, None]
        assert [len(call.donates) for call in calls(made)] == [0, 1, 1]
        np.testing.assert_array_equal(made([leaf(1)])[0], [5] * 3)

    def test_only_if_all_calls_of_the_function_can(self):
        graph, (x, kept) = arguments(2)
        graph.donated = {x}
        (a,) = graph.call(DOUBLE, 0, [x])
        (b,) = graph.call(DOUBLE, 0, [kept])
        assert donated(graph, [a, b]) == [0, 0]
        graph, (x, kept) = arguments(2)
        graph.donated = {x, kept}
        (a,) = graph.call(DOUBLE, 0, [x])
        (b,) = graph.call(DOUBLE, 0, [kept])
        assert donated(graph, [a, b]) == [1, 1]

    def test_only_where_a_result_fits(self):
        graph, (x, y) = arguments(2, donated=True)
        assert donated(graph, graph.call(ADD, 0, [x, y])) == [1]
        graph, (x,) = arguments(1, donated=True)
        whole = function(lambda x: [x.astype(jnp.int32), x.sum()], SPEC)
        assert donated(graph, graph.call(whole, 0, [x])) == [0]

    def test_not_for_a_result_that_nobody_reads(self):
        graph, (x, y) = arguments(2, donated=True)
        both = function(lambda x, y: [x + y, x.sum()], SPEC, SPEC)
        assert donated(graph, graph.call(both, 0, [x, y])[1:]) == [0]

    def test_not_of_keys(self):
        key = jax.eval_shape(lambda: jax.random.key(0))
        graph = Graph(jax.devices()[:2])
        x = graph.argument(key, 0, donated=True)
        split = function(lambda key: [jax.random.split(key)[0]], key)
        assert donated(graph, graph.call(split, 0, [x])) == [0]

    def test_an_argument_handed_on_is_the_same_value(self):
        """An argument of the user's stays the user's, whatever it is called."""
        hand = function(lambda x, y: [x, x + y], SPEC, SPEC)
        graph, (x, y) = arguments(2)
        same, total = graph.call(hand, 0, [x, y])
        (out,) = graph.call(function(lambda x: [x - 1], SPEC), 0, [same])
        made = program_of(graph, [out, total])
        assert [len(call.donates) for call in calls(made)] == [0, 0]
        assert [len(call.writes) for call in calls(made)] == [1, 1]


class TestTheList:
    def made(self):
        graph, (x,) = arguments(1)
        sine, cosine = graph.call(BOTH, 0, [x], label=Action("F", 0, 0), layers="Both")
        (there,) = graph.call(
            DOUBLE, 1, [sine], label=Action("F", 1, 0), layers="Double"
        )
        (out,) = graph.call(
            ADD, 0, [there, cosine], label=Action("B", 0, 0), layers="Both"
        )
        return program_of(graph, [out])

    def test_frees_at_the_last_use(self):
        made = self.made()
        last = {}
        for number, instruction in enumerate(made.instructions):
            for slot in instruction.reads:
                last[slot] = number
        freed = {
            slot: number
            for number, instruction in enumerate(made.instructions)
            for slot in instruction.frees
        }
        for slot in made.outputs:
            last.pop(slot, None)
        assert freed == last
        assert len(freed) + len(made.outputs) == len(made.specs)

        observed = []

        def observe(instruction, slots):
            assert all(slots[slot] is None for slot in instruction.frees)
            assert all(slots[s] is not None for s in instruction.writes)
            observed.append(instruction)

        made([leaf(1)], observe=observe)
        assert len(observed) == len(made.instructions)

    def test_bytes_are_those_of_what_is_written_and_freed(self):
        made = self.made()
        (given, *after) = live_bytes(made)
        assert given == [12, 0]
        # The argument stays its owner's. Of both results one is sent, doubled, sent
        # back, and added to the other.
        assert [i.source for i in made.instructions] == [None, 0, None, 1, None]
        assert after == [[36, 0], [24, 12], [24, 12], [36, 0], [24, 0]]

    def test_the_most_bytes_take_no_row_for_each_instruction(self):
        graph, (x,) = arguments(1)
        for _ in range(2000):
            (x,) = graph.call(DOUBLE, 0, [x])
        made = program_of(graph, [x])
        gc.collect()
        tracemalloc.start()
        try:
            assert peak_bytes(made) == [24, 0]
            assert tracemalloc.get_traced_memory()[1] < 20_000
        finally:
            tracemalloc.stop()

    def test_a_second_run_is_given_nothing_of_the_first(self):
        made = self.made()
        first, second = made([leaf(1)])[0], made([leaf(2)])[0]
        np.testing.assert_array_equal(first, 2 * jnp.sin(leaf(1)) + jnp.cos(leaf(1)))
        np.testing.assert_array_equal(second, 2 * jnp.sin(leaf(2)) + jnp.cos(leaf(2)))


class TestErrors:
    def broken(self, label, layers):
        class Broken(Exception):
            pass

        def observe(instruction, slots):
            if instruction.label == label:
                raise Broken

        graph, (x,) = arguments(1)
        (a,) = graph.call(DOUBLE, 0, [x])
        made = program_of(graph, graph.call(DOUBLE, 1, [a], label=label, layers=layers))
        with pytest.raises(Broken) as caught:
            made([leaf(1)], observe=observe)
        return caught.value.__notes__

    def test_name_the_action_its_device_and_its_layers(self):
        notes = self.broken(Action("F", 1, 2), "layers 3 to 4")
        assert notes == ["raised in action 1F2 on cpu:1: layers 3 to 4"]
