"""Plans that were changed by hand: one error names all that cannot be."""

import json

import jax
import optax
import pytest
from flax import linen as nn

import jpipe


def text(**stage):
    """A plan as JSON, with some fields of its first stage changed."""
    sample = jax.ShapeDtypeStruct((8, 4), float)
    options = {"num_devices": 2, "data": 1, "schedules": "1f1b", "measure": False}
    layers = [nn.Dense(4), nn.tanh, nn.Dense(4)]
    options["action_seconds"] = 0.0
    fields = json.loads(jpipe.plan(layers, sample, optax.sgd(0.1), **options).to_json())
    assert len(fields["stages"]) == 2
    fields["stages"][0] |= stage
    return fields


def test_all_faults_are_told_at_once():
    fields = text(
        index=3, rank=7, layers=[1], held_bytes="x", kept={"full": -1}, remat=None
    )
    fields["forecast"] |= {
        "seconds": "soon",
        "bound": -1,
        "busy": [1.0],
        "memory_limit": "16GiB",
        "reasons": [3],
    }
    fields["forecast"]["memory"][0]["held"] = -5
    with pytest.raises(ValueError, match="no plan as Plan") as raised:
        jpipe.Plan.from_json(json.dumps(fields))
    for fault in (
        "stages[0]: index=3; needs 0",
        "stages[0]: rank=7; its schedule has it on 0",
        "stages[0]: needs texts for device and remat, and a list of layers",
        "stages[0]: held_bytes='x'; needs an int, not negative",
        "stages[0]: kept['full']=-1; needs an int, not negative",
        "forecast: seconds='soon'; needs a number, finite and not negative",
        "forecast: bound=-1; needs a number",
        "forecast: busy is of 1 ranks, there are 2",
        "forecast: memory_limit='16GiB'; needs an int",
        "forecast: reasons: needs a list of texts",
        "forecast: memory[0]: held=-5; needs an int",
    ):
        assert fault in str(raised.value), fault


def test_a_step_that_takes_no_time_is_printed():
    fields = text()
    fields["forecast"] |= {"bound": 0.0, "seconds": 0.0}
    assert "predicted: 0 s a step" in str(jpipe.Plan.from_json(json.dumps(fields)))
