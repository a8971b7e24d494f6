"""Stages with replicas: published plans, and the best of all by trying."""

import itertools
import random

import pytest

from jpipe import Replicated, replicate
from jpipe.planning._profile import LayerProfile, Profile

from .chains import every_cut, profile
from .published import PUBLISHED, read

STAGES = {
    ("vgg16", 4, True): ((0, 17, 3), (17, 40, 1)),
    ("vgg16", 4, False): ((0, 15, 3), (15, 40, 1)),
    ("vgg16", 8, True): ((0, 24, 7), (24, 40, 1)),
}


@pytest.mark.parametrize(
    ("name", "devices", "straight", "transfers", "seconds", "faster"), PUBLISHED
)
def test_plans_are_those_of_pipedream(
    name, devices, straight, transfers, seconds, faster
):
    given = read(f"pipedream/{name}")
    plan = replicate(
        given, devices, bandwidth=1e9, straight=straight, transfers=transfers
    )
    assert plan.seconds == pytest.approx(seconds, abs=6e-10, rel=0)
    assert plan.alone / plan.seconds == pytest.approx(faster, abs=6e-4, rel=0)
    assert sum(stage.replicas for stage in plan.stages) == devices
    if not straight and (name, devices, transfers) in STAGES:
        assert plan.stages == STAGES[name, devices, transfers]


def replicas(num_stages, num_devices, all_of_them=False):
    for each in itertools.product(range(1, num_devices + 1), repeat=num_stages):
        if sum(each) == num_devices or (sum(each) < num_devices and not all_of_them):
            yield each


def step(profile, balance, each, bandwidth, count):
    """The time of a step, term by term."""
    ends = [0, *itertools.accumulate(balance)]
    layers = [profile.layers[a:b] for a, b in itertools.pairwise(ends)]
    times = [
        sum(x.forward + x.backward for x in own) / r
        for own, r in zip(layers, each, strict=True)
    ]
    rings = [
        2 * (r - 1) / r * sum(x.param_bytes for x in own) / bandwidth
        for own, r in zip(layers, each, strict=True)
    ]
    moved = 0.0
    for cut, (one, other) in zip(ends[1:-1], itertools.pairwise(each), strict=True):
        moved += crossing(profile, cut) / bandwidth / min(one, other)
    block = max(times)
    late = max(ring - i * block for i, ring in enumerate(rings))
    return (count - 1) * block + sum(times) + moved + max(late, 0.0)


def crossing(profile, cut):
    layer = profile.layers[cut - 1]
    arrays = {(cut - 1, None): layer.output_bytes + layer.cotangent_bytes}
    for skip in profile.skips:
        if skip.source < cut <= skip.target:
            name = None if skip.is_output and skip.source == cut - 1 else skip.name
            arrays[skip.source, name] = skip.bytes + skip.cotangent_bytes
    return sum(arrays.values())


def shortest(profile, num_devices, bandwidth, count, most_stages):
    return min(
        step(profile, balance, each, bandwidth, count)
        for stages in range(1, most_stages + 1)
        for balance in every_cut(len(profile.layers), stages)
        for each in replicas(stages, num_devices)
    )


@pytest.mark.parametrize("seed", range(100))
def test_no_plan_of_a_random_chain_is_faster(seed):
    """On up to eight devices, all plans tried; few micro-batches too."""
    rng = random.Random(seed)
    num_layers = rng.randint(1, 5)
    given = profile(rng, num_layers, skips=rng.randrange(3) if num_layers > 1 else 0)
    devices, bandwidth = rng.randint(1, 8), rng.choice([5.0, 50.0, 500.0])
    count = rng.choice([1, 2, 4, 16])
    plan = replicate(
        given,
        devices,
        bandwidth=bandwidth,
        objective="step",
        num_microbatches=count,
    )
    best = shortest(given, devices, bandwidth, count, min(num_layers, devices))
    assert plan.seconds == pytest.approx(best, rel=1e-9)
    balance = [stage.end - stage.start for stage in plan.stages]
    each = [stage.replicas for stage in plan.stages]
    own = step(given, balance, each, bandwidth, count)
    assert plan.seconds == pytest.approx(own, rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_no_bottleneck_of_a_random_chain_is_smaller(seed):
    """All plans that use all devices, in the steady state."""
    rng = random.Random(seed)
    num_layers, devices = rng.randint(1, 5), rng.randint(1, 6)
    given = profile(rng, num_layers, skips=rng.randrange(3) if num_layers > 1 else 0)
    bandwidth, straight = rng.choice([5.0, 50.0, 500.0]), rng.random() < 0.3
    devices = min(devices, num_layers) if straight else devices

    def bottleneck(balance, each):
        found, end = [], 0
        for size, r in zip(balance, each, strict=True):
            own, start, end = given.layers[end : end + size], end, end + size
            ring = 4 * (r - 1) * sum(x.param_bytes for x in own) / (bandwidth * r)
            found.append((sum(x.forward + x.backward for x in own) + ring) / r)
            for cut in {start, end} - {0, num_layers}:
                found.append(crossing(given, cut) / bandwidth / r)
        return max(found)

    plan = replicate(given, devices, bandwidth=bandwidth, straight=straight)
    best = min(
        bottleneck(balance, each)
        for count in range(1, min(num_layers, devices) + 1)
        for balance in every_cut(num_layers, count)
        for each in replicas(count, devices, all_of_them=True)
        if not straight or max(each) == 1
    )
    assert plan.seconds == pytest.approx(best, rel=1e-9)


# The shortest step of all plans on eight devices, with 16 micro-batches, by a program
# that tried them all: up to ten million.
EXHAUSTIVE = [
    ("vgg-19-pbs-32", 1e09, 0.40527496457142853),
    ("vgg-19-pbs-32", 1e10, 0.32137571074285703),
    ("amoeba-18-pbs-8", 1e09, 2.508378512),
    ("amoeba-18-pbs-8", 1e10, 1.6431670408533334),
    ("bert-24-pbs-6", 1e09, 1.546839024),
    ("bert-24-pbs-6", 1e10, 1.1650160192000003),
    ("xlnet-24-pbs-1", 1e09, 0.7282100000000002),
    ("xlnet-24-pbs-1", 1e10, 0.4922700000000002),
]


@pytest.mark.parametrize(("name", "bandwidth", "seconds"), EXHAUSTIVE)
def test_no_plan_of_a_real_profile_is_faster(name, bandwidth, seconds):
    given = read(f"dapple/{name}")
    question = {"bandwidth": bandwidth, "objective": "step", "num_microbatches": 16}
    plan = replicate(given, 8, **question)
    assert plan.seconds == pytest.approx(seconds, rel=1e-9)
    # The same with fewer devices, tried here.
    plan = replicate(given, 3, **question)
    best = shortest(given, 3, bandwidth, 16, most_stages=3)
    assert plan.seconds == pytest.approx(best, rel=1e-9)


def test_a_plan_says_what_it_leaves_idle():
    layers = (
        LayerProfile("a", 1.0, 1.0, param_bytes=100, output_bytes=100),
        LayerProfile("b", 1.0, 1.0, param_bytes=100),
    )
    plan = replicate(
        Profile(layers), 3, bandwidth=1.0, objective="step", num_microbatches=4
    )
    assert str(plan) == (
        "16 s a step on 1 device, 1.000 times as fast as one\n"
        "2 of 3 devices are left idle: with them a step would take no less\n"
        "4 s through all stages and back, 3 times 4 s in stage 0, the slowest; and "
        "0 s exchange of gradients that nothing hides\n"
        "a step of 4 micro-batches, simulated: 16 s, 0 s of it exchange\n"
        "stage  layers  devices  computes  exchange  transfers\n"
        "    0  0 to 1        1       4 s       0 s"
    )

    step = {"objective": "step", "num_microbatches": 4, "straight": True}
    for speed, says in (
        (None, "3 of 5 devices are left idle: there are 2 layers, and one device for"),
        (1.0, "4 of 5 devices are left idle: with more stages a step would take no l"),
    ):
        plan = replicate(Profile(layers), 5, bandwidth=speed, **step)
        assert says in str(plan)
        assert Replicated.from_json(plan.to_json()) == plan


def test_times_that_no_float_can_say():
    small = LayerProfile("a", 1.0, 1.0, param_bytes=4, output_bytes=4)
    huge = LayerProfile("a", 1e308, 1e308)
    for layer, bandwidth in ((small, 5e-324), (huge, 1e9)):
        with pytest.raises(ValueError, match="longer than a float can say"):
            replicate(Profile((layer,) * 3), 2, bandwidth=bandwidth)


def test_all_faults_are_told_at_once():
    with pytest.raises(ValueError, match="replicate cannot plan this") as refusal:
        replicate(
            Profile((LayerProfile("a", -1.0, 1.0),)),
            0,
            bandwidth=-1.0,
            objective="step",
        )
    for says in (
        "layer 0 (a): forward=-1.0; needs a number, finite and not negative",
        "num_devices=0; needs an int of at least 1",
        "bandwidth=-1.0; needs bytes per second, more than 0",
        "objective='step' needs num_microbatches=",
    ):
        assert says in str(refusal.value)
    with pytest.raises(ValueError, match="profile is a list; needs what") as refusal:
        replicate([1.0, 2.0], 0, bandwidth=[1])
    assert "num_devices=0;" in str(refusal.value)
    assert "bandwidth=[1]; needs bytes per second" in str(refusal.value)
    one = Profile((LayerProfile("a", 1.0, 1.0),))
    with pytest.raises(ValueError, match="bandwidth=True; needs bytes per second"):
        replicate(one, 1, bandwidth=True)
    with pytest.raises(ValueError, match="num_devices=2 is more than the 1 layers"):
        replicate(one, 2, bandwidth=1.0, straight=True)
    with pytest.raises(ValueError, match="objective='fast'; needs 'steady' or 'step'"):
        replicate(one, 2, bandwidth=1.0, objective="fast")
