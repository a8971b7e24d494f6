"""Every order of a builder, of any size, is valid and is read back."""

from jpipe.schedules import BY_NAME, Schedule

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
