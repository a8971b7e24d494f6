"""The best of all cuts of random chains of layers, one by one.

Private names are imported because profiles by hand have no public one.
"""

import itertools

from benchmarks.planning.chains import random_chain
from jpipe import Profile
from jpipe.planning._layer_profile import LayerProfile, SkipProfile

__all__ = ["LayerProfile", "Profile", "SkipProfile", "every_cut", "random_chain"]

MODES = ("none", "min_cut", "full")


def every_cut(num_layers: int, num_stages: int):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *inner, num_layers)
        yield [b - a for a, b in itertools.pairwise(ends)]


def stages(balance):
    ends = [0, *itertools.accumulate(balance)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def times(profile, balance, modes, *, has_halves=False):
    """Of each stage; the last computes nothing again."""
    modes = [*modes[:-1], "none"]
    seconds = []
    for stage, mode in zip(stages(balance), modes, strict=True):
        layers = [profile.layers[i] for i in stage]
        forward = sum(layer.forward for layer in layers)
        backward = sum(
            layer.input_grad + layer.weight_grad if has_halves else layer.backward
            for layer in layers
        )
        seconds.append(forward * (2 if mode == "full" else 1) + backward)
    return seconds


def transfers(profile, balance, bandwidth, latency):
    """Of each cut, there and back."""
    last = [profile.layers[stage[-1]] for stage in stages(balance)[:-1]]
    return [
        2 * latency + (layer.output_bytes + layer.cotangent_bytes) / bandwidth
        for layer in last
    ]
