"""What becomes of calls and values: copies, constants, what nobody needs.

Private names are imported because a pipeline shows what it runs, not what it left out.
"""

import jax
import numpy as np

from jpipe._instructions._graph import NOWHERE, OUTSIDE, Graph

from .graphs import ADD, BOTH, DOUBLE, SPEC, arguments, calls, function, moves
from .graphs import program as program_of


def names(instructions):
    return [each.function and each.function.name for each in instructions]


def test_unread_results_are_not_computed():
    graph, (x,) = arguments(1)
    graph.call(DOUBLE, 0, [x])
    (unread,) = graph.call(DOUBLE, 1, [x])
    graph.call(DOUBLE, 1, [unread])
    (y,) = graph.call(ADD, 0, [x, x])
    assert names(graph.instructions([y])) == ["add"]


def test_effects_are_kept_and_what_they_need():
    def run(x):
        jax.debug.print("{}", x)
        return [x]

    printing = function(run, SPEC, name="printing")
    graph, (x,) = arguments(1)
    (y,) = graph.call(DOUBLE, 0, [x])
    graph.call(printing, 1, [y])
    assert names(graph.instructions([x])) == ["double", None, "printing"]


def test_a_copy_is_made_once_right_after_its_source():
    graph, (x,) = arguments(1)
    sine, cosine = graph.call(BOTH, 0, [x])
    (double,) = graph.call(DOUBLE, 0, [sine])
    outputs = [*graph.call(ADD, 1, [sine, cosine]), *graph.call(ADD, 1, [sine, double])]
    done = graph.instructions(outputs)
    assert names(done) == ["both", None, "double", None, "add", "add"]
    # All that goes one way leaves at once.
    assert done[1].reads == [sine, cosine]
    assert (done[1].place, done[1].label) == (1, "both")
    assert done[3].reads == [double]


def test_arguments_without_a_place_are_read_where_they_are():
    graph, (x,) = arguments(1, NOWHERE)
    assert graph.bring(x, 1) == x
    graph, (x,) = arguments(1, OUTSIDE)
    assert graph.bring(x, 1) != x


def test_batches_arrive_first_each_place_at_one_stroke():
    graph, (x, y) = arguments(2, OUTSIDE)
    outputs = [*graph.call(ADD, 0, [x, y]), *graph.call(DOUBLE, 1, [y])]
    first, second, *rest = graph.instructions(outputs)
    assert (first.place, first.reads, first.label) == (0, [x, y], "arguments")
    assert (second.place, second.reads, second.label) == (1, [y], "arguments")
    assert names(rest) == ["add", "double"]


def test_arrays_sent_to_another_process_are_neither_arguments_nor_outputs():
    """The next program may overwrite these before they have left."""
    graph = Graph(jax.devices()[:2])
    graph.processes = [0, 1]
    x = graph.argument(SPEC, 0, donated=True)
    (y,) = graph.call(DOUBLE, 0, [x])
    (there,) = graph.call(ADD, 1, [x, y])
    made = program_of(graph, [x, y, there])
    assert len(moves(made)) == 2
    sent = {slot for move in moves(made) for slot in move.reads}
    assert sent.isdisjoint({0, *made.outputs})
    copies = [call for call in calls(made) if call.function.name == "copy"]
    assert len(copies) == 2
    assert not any(call.donates for call in copies)


def test_equal_constants_are_one_in_a_place():
    graph = Graph(jax.devices()[:2])
    one = graph.constant(np.float32(1), 0)
    assert graph.constant(np.float32(1), 0) == one
    others = [np.float32(2), np.int32(1), np.ones(1, np.float32)]
    found = [graph.constant(np.asarray(other), 0) for other in others]
    assert len({one, graph.constant(np.float32(1), 1), *found}) == 5
    add = function(lambda x, y: [x + y], *[graph.specs[one]] * 2)
    made = program_of(graph, graph.call(add, 0, [one, one]))
    assert float(made([])[0]) == float(made([])[0]) == 2
