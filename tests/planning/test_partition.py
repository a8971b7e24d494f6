"""The best cut, by trying all."""

import math
import random

import pytest

from jpipe import schedules
from jpipe.planning._partition import partition

from .chains import MODES, every_cut, profile, stages, times, transfers


def drawn(seed):
    """A random question."""
    rng = random.Random(seed)
    num_layers = rng.randint(2, 8)
    num_stages = rng.randint(1, min(4, num_layers))
    modes = tuple(rng.choice(MODES) for _ in range(num_stages))
    bandwidth, latency = rng.choice([(None, 0.0), (10.0, 0.0), (100.0, 0.3)])
    return (
        rng,
        profile(rng, num_layers, ties=rng.randrange(2)),
        modes,
        {
            "num_stages": num_stages,
            "num_microbatches": rng.choice([1, 2, 5, 30]),
            "bandwidth": bandwidth,
            "latency": latency,
            "remat": modes,
        },
    )


def worth(profile, balance, modes, question):
    """The slowest stage and the step."""
    each = times(profile, balance, modes)
    bandwidth = question["bandwidth"] or math.inf
    moved = transfers(profile, balance, bandwidth, question["latency"])
    count = question["num_microbatches"] - 1
    return max(each), sum(each) + moved + count * max(each)


def needs(profile, balance, modes, in_flight):
    """The bytes of each rank, from what is given to the simulator."""
    costs = profile.costs(balance, remat=modes)
    return [
        params + sums + most * kept
        for params, sums, kept, most in zip(
            costs.parameter_bytes,
            costs.accumulator_bytes,
            costs.residual_bytes,
            in_flight,
            strict=True,
        )
    ]


@pytest.mark.parametrize("seeds", [range(k, k + 500) for k in range(0, 2000, 500)])
def test_no_cut_is_better(seeds):
    for seed in seeds:
        _, given, modes, question = drawn(seed)
        every = list(every_cut(len(given.layers), question["num_stages"]))
        every = [worth(given, balance, modes, question) for balance in every]
        found = partition(given, objective="max", **question)
        slowest, step = worth(given, found, modes, question)
        assert slowest == pytest.approx(min(every)[0], rel=1e-9), seed
        # Of those whose slowest stage is as fast, that with the shortest step.
        ties = [s for m, s in every if m <= slowest * (1 + 1e-9)]
        assert step == pytest.approx(min(ties), rel=1e-9), seed
        found = partition(given, objective="step", **question)
        _, step = worth(given, found, modes, question)
        assert step == pytest.approx(min(s for _, s in every), rel=1e-9), seed


def kept(balance, pair, cuts):
    """Whether a cut keeps its pins."""
    own = stages(balance)
    together = pair is None or any({*pair} <= {*stage} for stage in own)
    return together and {*cuts} <= {stage[0] for stage in own}


@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
def test_no_cut_under_a_limit_and_pins_is_better(schedule):
    refused = 0
    for seed in range(400):
        rng, given, modes, question = drawn(seed)
        count, most = question["num_stages"], question["num_microbatches"]
        cuts = rng.sample(range(len(given.layers)), rng.randrange(2))
        pair = None
        if rng.random() < 0.5:
            pair = sorted(rng.sample(range(len(given.layers)), 2))
        in_flight = [min(count - s, most) for s in range(count)]
        if schedule == "gpipe":
            in_flight = [most] * count
        if schedule == "zb_h1":
            # Its second halves wait: then micro-batches count twice.
            modes = ("none",) * count
            peaks = schedules.zb_h1(count, most).simulate().peak_bytes
            in_flight = list(map(int, peaks))
        question |= {"remat": modes}
        limit = rng.choice([200, 400, [rng.randrange(100, 600) for _ in range(count)]])
        limits = limit if isinstance(limit, list) else [limit] * count

        every = [b for b in every_cut(len(given.layers), count) if kept(b, pair, cuts)]
        over = {
            tuple(b): max(
                n - most
                for n, most in zip(
                    needs(given, b, modes, in_flight), limits, strict=True
                )
            )
            for b in every
        }
        fitting = [b for b in every if over[tuple(b)] <= 0]
        asked = dict(
            question,
            schedule=schedule,
            max_bytes=limit,
            cuts=cuts,
            together=[pair] if pair else [],
        )
        if not fitting:
            refused += 1
            with pytest.raises(ValueError, match="partition") as refusal:
                partition(given, **asked)
            if every and isinstance(limit, int):
                least = min(over.values()) + limit
                assert f"works is max_bytes={least:,}" in str(refusal.value)
                assert partition(given, **{**asked, "max_bytes": least}) in every
            continue
        found = partition(given, objective="max", **asked)
        assert found in fitting, seed
        values = [worth(given, balance, modes, question)[0] for balance in fitting]
        assert max(times(given, found, modes)) == pytest.approx(min(values)), seed
        if schedule is None:
            found = partition(given, objective="step", **asked)
            assert found in fitting, seed
            values = [worth(given, balance, modes, question)[1] for balance in fitting]
            step = worth(given, found, modes, question)[1]
            assert step == pytest.approx(min(values)), seed
    assert 50 < refused < 350
