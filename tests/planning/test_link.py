"""What a transfer takes is measured where nobody says it and two devices are there.

Private names are imported because what is measured differs from run to run: only by
replacing it is it seen where it goes.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.planning import _decide
from jpipe.planning._link import Link, link

X = jnp.ones((8, 4))
LAYERS = [nn.Dense(4), nn.relu, nn.Dense(4)]


def plan(**options):
    given = {"num_microbatches": 2, "schedules": "1f1b", "num_devices": 2, **options}
    return jpipe.plan(LAYERS, X, optax.sgd(0.1), **given)


@pytest.fixture
def measured(monkeypatch):
    """What is measured, slow enough to be told from nothing."""
    made = []

    def slow(*devices):
        made.append(devices)
        return Link(0.5, 64.0)

    monkeypatch.setattr(_decide, "link", slow)
    return made


def test_what_is_measured_between_two_devices():
    found = link(*jax.devices()[:2])
    # A byte per second, or all of memory in a microsecond, is no link.
    assert 0 <= found.latency < 1
    assert 1e6 < found.bandwidth < 1e14


def test_a_plan_counts_what_was_measured(measured):
    made = plan(balance=[2, 1])
    assert measured == [tuple(jax.devices()[:2])]
    assert made.forecast.costs.latency == 0.5
    assert made.forecast.costs.bandwidth == 64.0
    # There and back: a latency, and 4 examples of 4 floats at 64 bytes per second.
    assert made.forecast.seconds > 2 * (0.5 + 1)
    says = "500 ms for each and 64 B per second, where not given as measured from"
    assert f"{says} {jax.devices()[0]} to {jax.devices()[1]}" in str(made)
    assert jpipe.Plan.from_json(made.to_json()) == made


def test_what_is_said_counts(measured):
    made = plan(latency=0.25, balance=[2, 1])
    assert made.forecast.costs.latency == 0.25
    assert made.forecast.costs.bandwidth == 64.0
    assert (
        "between devices; 250 ms for each and 64 B per second, where not given as"
        in str(made)
    )


def test_what_is_not_measured(measured):
    profile = jpipe.profile(LAYERS, X, num_microbatches=2, rounds=1)
    for options in (
        {"profile": profile, "latency": 0.0, "bandwidth": 1e9},
        {"measure": False},
        {"profile": profile},  # it may be of another machine
    ):
        assert "as measured from" not in str(plan(**options))
    assert not measured
