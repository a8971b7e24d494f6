"""Profiles of others, and the plans that were published for them."""

from pathlib import Path

from jpipe.planning._profile import Profile

PROFILES = Path(__file__).with_name("profiles")


def read(name):
    return Profile.from_text((PROFILES / f"{name}.txt").read_text())


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
