"""What holds for every order that a builder gives, of any size."""

from collections import Counter

from jpipe.schedules import BY_NAME, Action, Schedule, forward_only, gpipe

from .orders import BOTH, ON_A_LINE, SPLIT, every_name, halves, reads, sizes, sums


@every_name
def test_runs_everything_once_for_any_number_of_microbatches(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        assert schedule.validate() is schedule
        ran = Counter(
            (action, rank) for rank, row in enumerate(schedule.rows) for action in row
        )
        assert set(ran.values()) == {1}
        expected = set()
        for stage, rank in enumerate(schedule.placement):
            for i in range(m):
                f, b, half, rest = (Action(op, stage, i) for op in "FBIW")
                is_whole = name not in SPLIT
                if name in BOTH:
                    is_whole = (b, rank) in ran
                backward = [b] if is_whole else [half, rest]
                todo = [f] if name == "forward_only" else [f, *backward]
                expected |= {(action, rank) for action in todo}
        assert set(ran) == expected


@every_name
def test_losses_and_gradients_are_summed_in_ascending_order(name):
    # So that all schedules give the same bits.
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        for rank, row in enumerate(schedule.rows):
            for order in sums(row, schedule.num_stages):
                assert order == sorted(order)
            stages = schedule.placement.count(rank)
            added = sum(map(len, sums(row, schedule.num_stages)))
            assert added == m * stages * (1 if name == "forward_only" else 2)


@every_name
def test_no_action_comes_before_what_it_reads(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        order = schedule.simulate().order()
        place = {action: i for i, action in enumerate(order)}
        split = halves(schedule)
        assert len(order) == len(place) == sum(map(len, schedule.rows))
        for row in schedule.rows:
            assert sorted(row, key=place.__getitem__) == list(row)
            for action in row:
                for read in reads(action, schedule.num_stages, split):
                    assert place[read] < place[action]


@every_name
def test_text_and_json_are_read_back(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        assert Schedule.from_text(schedule.to_text(), name) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule


@every_name
def test_inference_is_the_forwards_in_the_same_order(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        forwards = schedule.forwards().validate()
        assert forwards.forward_only
        assert forwards.rows == tuple(
            tuple(action for action in row if action.op == "F") for row in schedule.rows
        )
        if name in ON_A_LINE:
            assert forwards.simulate().makespan == m - 1 + p
            assert forwards.rows == forward_only(p, m).rows


def test_the_name_of_a_forward_pass_tells_where_it_comes_from():
    assert gpipe(2, 2).forwards().name == "gpipe (forward)"
    schedule = forward_only(2, 2)
    assert schedule.forwards() is schedule


def test_text_without_a_backward_is_for_inference():
    assert Schedule.from_text("0F0 0F1\n1F0 1F1").forward_only
    assert not Schedule.from_text("0F0 0F1 0B0 0B1").forward_only
