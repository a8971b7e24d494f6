"""Random chains of layers, and the best of all cuts of them, one by one.

Private names are imported because profiles by hand have no public one.
"""

import itertools
import random

from jpipe.planning._profile import LayerProfile, Profile, SkipProfile

__all__ = ["LayerProfile", "Profile", "SkipProfile", "every_cut", "profile"]

MODES = ("none", "min_cut", "full")


def profile(rng: random.Random, num_layers: int, skips: int = 0, ties: int = 0):
    """A chain; half of them have small whole numbers, so that cuts are as good."""
    whole = rng.random() < 0.5

    def time():
        return float(rng.randrange(5)) if whole else rng.random()

    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            forward=time(),
            backward=time(),
            param_bytes=rng.randrange(100),
            state_bytes=rng.randrange(10),
            output_bytes=rng.randrange(20),
            cotangent_bytes=rng.randrange(20),
            residual_bytes={
                "none": rng.randrange(20, 60),
                "min_cut": rng.randrange(20),
            },
        )
        for i in range(num_layers)
    )
    found = []
    for k in range(skips):
        source, target = sorted(rng.sample(range(num_layers), 2))
        is_output, size = rng.random() < 0.3, rng.randrange(60)
        sizes, name = (size, size), f"skip{k}"
        if is_output:
            own = layers[source]
            sizes, name = (own.output_bytes, own.cotangent_bytes), own.name
        found.append(SkipProfile(name, source, target, *sizes, is_output))
    groups = tuple(tuple(rng.sample(range(num_layers), 2)) for _ in range(ties))
    return Profile(layers, input_bytes=7, skips=tuple(found), ties=groups)


def every_cut(num_layers: int, num_stages: int):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *inner, num_layers)
        yield [b - a for a, b in itertools.pairwise(ends)]


def stages(balance):
    ends = [0, *itertools.accumulate(balance)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def times(profile, balance, modes):
    """Of each stage; the last computes nothing again."""
    modes = [*modes[:-1], "none"]
    return [
        sum(
            profile.layers[i].forward * (2 if mode == "full" else 1)
            + profile.layers[i].backward
            for i in stage
        )
        for stage, mode in zip(stages(balance), modes, strict=True)
    ]


def transfers(profile, balance, bandwidth, latency):
    """Of each cut, there and back."""
    last = [profile.layers[stage[-1]] for stage in stages(balance)[:-1]]
    return [
        2 * latency + (layer.output_bytes + layer.cotangent_bytes) / bandwidth
        for layer in last
    ]
