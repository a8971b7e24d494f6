"""What holds for every order that a builder gives, of any size."""

from jpipe.schedules import BY_NAME, Schedule, forward_only, gpipe

from .orders import IN_A_V, ON_A_LINE, every_name, some_sizes


@every_name
def test_every_schedule_is_valid_is_read_back_and_runs_forward_alone(name):
    # Of `validate` the other files tell: all runs once, after what it reads.
    for p, m in some_sizes(name):
        schedule = BY_NAME[name](p, m)
        assert schedule.validate() is schedule
        assert (schedule.name, schedule.num_microbatches) == (name, m)
        ranks = [*range(p)] if name in ON_A_LINE else [*range(p), *range(p)]
        ranks[p:] = reversed(ranks[p:]) if name in IN_A_V else ranks[p:]
        assert (schedule.num_ranks, list(schedule.placement)) == (p, ranks)
        assert Schedule.from_text(schedule.to_text(), name) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule
        forwards = schedule.forwards().validate()
        assert forwards.forward_only
        assert forwards.rows == tuple(
            tuple(action for action in row if action.op == "F") for row in schedule.rows
        )


def test_the_name_of_a_forward_pass_tells_where_it_comes_from():
    assert gpipe(2, 2).forwards().name == "gpipe (forward)"
    schedule = forward_only(2, 2)
    assert schedule.forwards() is schedule


def test_text_without_a_backward_is_for_inference():
    assert Schedule.from_text("0F0 0F1\n1F0 1F1").forward_only
    assert not Schedule.from_text("0F0 0F1 0B0 0B1").forward_only
