"""Profiles in the text of PipeDream, and the plans that were published for them."""

import heapq
import re
from pathlib import Path

from .chains import LayerProfile, Profile, SkipProfile

PROFILES = Path(__file__).with_name("profiles") / "pipedream"

# Profile, devices, straight, transfers; the bottleneck and the speed-up as published.
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
            nodes[parts[0]] = (
                parts[1],
                {
                    key: float(value)
                    for key, value in re.findall(r"(\w+_\w+)=([\d.]+)", parts[2])
                },
            )
    names = [n for n in in_order(readers) if not nodes[n][0].startswith("Input")]
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


def in_order(readers):
    """Nodes after all that they read; of several, that with the smallest number."""
    waits = dict.fromkeys(readers, 0)
    for reader in (reader for each in readers.values() for reader in each):
        waits[reader] += 1

    def key(name):
        return int(name.removeprefix("node")), name

    ready = [key(name) for name, count in waits.items() if not count]
    heapq.heapify(ready)
    while ready:
        _, name = heapq.heappop(ready)
        yield name
        for reader in readers[name]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, key(reader))
