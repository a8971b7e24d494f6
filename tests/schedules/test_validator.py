"""Schedules that cannot run: each rule, by hand."""

import pytest

from jpipe.schedules import Schedule

from .orders import by_hand, refusal_of

ASCENDING = (
    "losses are summed in ascending order of micro-batches, gradients of all stages in "
    "one order, ascending or descending; here ascending"
)

REFUSED = {
    "E0 of sizes and cells that are none": (
        Schedule("mine", 0, 1.5, (), (("0F0", ("B", 0, 0)),)),
        """\
  * E0 num_stages=0, num_microbatches=1.5: must be ints of at least 1
  * E0 rows[0][0] is a str, needs a jpipe.schedules.Action, such as Action.parse('2F0')
  * E0 rows[0][1] is a tuple, needs a jpipe.schedules.Action, such as \
Action.parse('2F0')""",
    ),
    "E4 of a placement on ranks that do not exist": (
        by_hand("0F0 0B0", 1, placement=(3,)),
        """\
  * E4 stage 0 is on ranks (3,), there are 1""",
    ),
    "E5 of one half of a backward": (
        by_hand("0F0 0I0\n1F0 1W0", 1),
        "  * E5 stage 0 runs F I on micro-batch 0, needs F B or F I W\n"
        "  * E5 stage 1 runs F W on micro-batch 0, needs F B or F I W",
    ),
    "E5 of a whole backward beside its halves": (
        by_hand("0F0 0B0 0I0 0W0\n1F0 1B0 1W0", 1),
        "  * E5 stage 0 runs F B I W on micro-batch 0, needs F B or F I W\n"
        "  * E5 stage 1 runs F B W on micro-batch 0, needs F B or F I W",
    ),
    "E6 of a backward before its forward": (
        by_hand("0B0 0F0\n1I0 1F0 1W0", 1),
        """\
  * E6 0B0 runs before 0F0 (rank 0, position 0)
      rank 0: 0B0 0F0
              ^^^
  * E6 1I0 runs before 1F0 (rank 1, position 0)
      rank 1: 1I0 1F0 1W0
              ^^^""",
    ),
    "E6 of sums that descend, whole and split, far from both ends": (
        by_hand("0F0 0F1 0F2 0F3 0F4 0I0 0I1 0B2 0W0 0W1 0B3 0B4", 5),
        f"""\
  * E6 0W0 runs after 0B2: {ASCENDING} (rank 0, position 8)
      rank 0: ... 0F4 0I0 0I1 0B2 0W0 0W1 0B3 0B4
                                  ^^^""",
    ),
    "E6 of gradients in two orders": (
        by_hand("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", 2),
        """\
  * E6 1B1 runs after 1B0: losses are summed in ascending order of micro-batches, \
gradients of all stages in one order, ascending or descending; here descending \
(rank 1, position 3)
      rank 1: 1F0 1F1 1B0 1B1
                          ^^^""",
    ),
    "E7 without the rank that only waits for the cycle": (
        by_hand(
            "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1", 2, placement=(0, 1, 2)
        ),
        "  * E7 the schedule deadlocks: "
        "rank 1: 1B0 waits for 2B0, which rank 2 runs after 2F1; "
        "rank 2: 2F1 waits for 1F1, which rank 1 runs after 1B0",
    ),
    # A stage that is nowhere, two on the wrong rank, one missing, two twice.
    "all faults in one message": (
        by_hand("0F0 0B0 7F0\n0F0 0B0 1F0", 1),
        """\
  * E2 7F0: the stages are 0 to 1 (rank 0, position 2)
      rank 0: 0F0 0B0 7F0
                      ^^^
  * E4 0F0: stage 0 is placed on rank 0 (rank 1, position 0)
      rank 1: 0F0 0B0 1F0
              ^^^
  * E4 0B0: stage 0 is placed on rank 0 (rank 1, position 1)
      rank 1: 0F0 0B0 1F0
                  ^^^
  * E5 stage 0 runs F F B B on micro-batch 0, needs F B or F I W
  * E5 stage 1 runs F on micro-batch 0, needs F B or F I W""",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_an_invalid_schedule_is_refused_with_its_message(rule):
    schedule, says = REFUSED[rule]
    assert refusal_of(schedule) == says


def test_e9_warns_of_a_rank_with_nothing_to_do():
    schedule = by_hand("0F0 0B0\n", 1, placement=(0,))
    with pytest.warns(UserWarning, match="^E9 rank 1 runs nothing$"):
        assert schedule.validate() is schedule
