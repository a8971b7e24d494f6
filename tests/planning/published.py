"""Profiles in the text of PipeDream, its planner, and the plans that were published."""

import re
from pathlib import Path

import numpy as np

from .chains import LayerProfile, Profile, SkipProfile

PROFILES = Path(__file__).with_name("profiles") / "pipedream"

# Profile, devices, is_unreplicated, transfers; then the bottleneck and the speed-up,
# as published.
PUBLISHED = [
    ("vgg16", 4, False, True, 0.205520896, 3.272),
    ("vgg16", 4, False, False, 0.175732624, 3.827),
    ("vgg16", 8, False, True, 0.103833170, 6.477),
    ("vgg16", 8, False, False, 0.09351323, 7.192),
    ("vgg16", 4, True, True, 0.411041792, 1.636),
    ("vgg16", 8, True, True, 0.411041792, 1.636),
    ("resnet101", 4, False, True, 0.116555, 3.527),
    ("resnet101", 8, False, True, 0.096591656, 4.256),
    ("resnet101", 8, False, False, 0.052125, 7.887),
    ("alexnet", 4, False, True, 0.034217141, 2.493),
    ("alexnet", 8, False, True, 0.018874368, 4.520),
]


def read(name):
    """A chain of the nodes of a graph; edges that pass others by are skips."""
    nodes, readers = {}, {}
    for line in (PROFILES / f"{name}.txt").read_text().splitlines():
        parts = [part.strip() for part in line.split(" -- ")]
        if line[0].isspace():
            readers[parts[0]].append(parts[1])
        else:
            readers[parts[0]] = []
            numbers = re.findall(r"(\w+_\w+)=([\d.]+)", parts[2])
            nodes[parts[0]] = parts[1], {key: float(n) for key, n in numbers}
    # The number of a node is larger than those of all that it reads.
    in_order = sorted(readers, key=lambda name: int(name.removeprefix("node")))
    names = [name for name in in_order if not nodes[name][0].startswith("Input")]
    place = {name: i for i, name in enumerate(names)}
    layers, skips = [], []
    for i, name in enumerate(names):
        description, numbers = nodes[name]
        size, targets = round(numbers["activation_size"]), map(place.get, readers[name])
        later = sorted(targets)
        output = size if i + 1 in later else 0
        skips += [
            SkipProfile(name, i, target, size, size, output > 0)
            for target in later
            if target > i + 1
        ]
        layers.append(
            LayerProfile(
                f"{name} {description}",
                numbers["forward_compute_time"] / 1e3,
                numbers["backward_compute_time"] / 1e3,
                param_bytes=round(numbers["parameter_size"]),
                output_bytes=output,
                cotangent_bytes=output,
            )
        )
    return Profile(tuple(layers), skips=tuple(skips))


def crossing(profile, cut):
    """The bytes that cross a cut before a layer, there and back."""
    layer = profile.layers[cut - 1]
    arrays = {(cut - 1, None): layer.output_bytes + layer.cotangent_bytes}
    for skip in profile.skips:
        if skip.source < cut <= skip.target:
            name = None if skip.is_output and skip.source == cut - 1 else skip.name
            arrays[skip.source, name] = skip.bytes + skip.cotangent_bytes
    return sum(arrays.values())


def minimize_bottleneck(profile, bandwidth, num_devices, max_replicas):
    """The stages with the least time from one micro-batch to the next, as PipeDream's.

    Its time is that of the slowest stage or transfer, each divided by its devices; a
    stage exchanges its gradients twice for each micro-batch.

    Returns:
      The seconds; for each stage the numbers of its layers and of its devices.
    """
    layers = profile.layers
    ends = len(layers) + 1
    work = np.cumsum([0, *(layer.forward + layer.backward for layer in layers)])
    params = np.cumsum([0, *(layer.param_bytes for layer in layers)])
    moved = np.array([0, *(crossing(profile, cut) for cut in range(1, ends - 1)), 0])
    empty = np.tril(np.full((ends, ends), np.inf))
    # (devices, end) -> the least time, and the last stage: its begin and devices
    least = {0: np.where(np.arange(ends), np.inf, 0.0)}
    last = {}
    for devices in range(1, num_devices + 1):
        least[devices] = np.full(ends, np.inf)
        for r in range(1, min(max_replicas, devices) + 1):
            ring = 4 * (r - 1) * (params - params[:, None]) / (bandwidth * r)
            stage = (work - work[:, None] + ring + empty) / r
            link = np.maximum(moved, moved[:, None]) / bandwidth / r
            seconds = np.maximum(least[devices - r][:, None], np.maximum(stage, link))
            for end in np.flatnonzero(seconds.min(0) < least[devices]):
                least[devices][end] = seconds[:, end].min()
                last[devices, int(end)] = int(seconds[:, end].argmin()), r
    stages, devices, end = [], num_devices, ends - 1
    while end:
        begin, r = last[devices, end]
        stages.append((end - begin, r))
        devices, end = devices - r, begin
    return float(least[num_devices][-1]), stages[::-1]
