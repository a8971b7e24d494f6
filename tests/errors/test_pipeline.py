"""Errors of `pipeline`: layers, micro-batches, balances, devices, schedules, remat."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe import schedules
from jpipe.schedules import Schedule, ScheduleError, gpipe, one_f_one_b

from .model import KEY, X, says, two_stages


def test_no_layers():
    for make in (jpipe.pipeline, jpipe.sequential):
        with pytest.raises(ValueError, match=says("stages=[]", "at least one layer")):
            make([], 2)


def test_layers_that_are_no_layers_are_all_listed():
    listed = [
        3,
        nn.Dense,
        nn.relu,
        nnx.Module(),
        nn.Dense(2),
        "relu",
        [nn.Dense(2)],
        np.ones((100, 100)),
    ]
    with pytest.raises(TypeError, match=r"module, a jpipe\.Stage or a func") as refusal:
        jpipe.pipeline(listed, 2)
    faults = [
        r"layer 0: 3 is an? int",
        r"layer 1: Dense is a class; write Dense\(\.\.\.\)",
        r"layer 3: Module is an nnx module without __call__",
        r"layer 5: 'relu' is a str",
        r"layer 6: a list; list its layers themselves, and type balance= for stages",
        r"layer 7: array\(.{1,40} is a ndarray",
    ]
    lines = str(refusal.value).splitlines()[1:]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert re.fullmatch(rf"  \* {fault}", line)


BOUND = nn.Dense(3).bind(nn.Dense(3).init(KEY, X))
EMBED = nn.Embed(3, 4)
LINEAR = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        (BOUND.__call__, "a function that calls a Dense"),
        (functools.partial(BOUND), "a function that calls a Dense"),
        (functools.partial(BOUND.__call__), "list the module itself"),
        (jax.jit(BOUND.__call__), "list the module itself"),
        (jax.jit(functools.partial(BOUND.__call__)), "list the module itself"),
        (EMBED.attend, "list the module as jpipe.layer(module, 'attend')"),
        (LINEAR.__call__, "a function that calls a Linear"),
        (functools.partial(LINEAR), "list the module itself"),
        (jax.checkpoint(LINEAR.__call__), "list the module itself"),
    ],
)
def test_functions_that_hide_a_module(listed, fault):
    with pytest.raises(TypeError, match=says("layer 1", "become constants")) as no:
        jpipe.pipeline([nn.relu, listed], 2)
    assert fault in str(no.value)


@pytest.mark.parametrize("make", [jpipe.pipeline, jpipe.sequential])
def test_one_layer_in_place_of_a_sequence(make):
    with pytest.raises(
        TypeError, match=says("needs a sequence of layers", "[nn.Dense")
    ):
        make(lambda x: x, 2)


@pytest.mark.parametrize("model", [nn.Dense(2), nnx.Linear(3, 3, rngs=nnx.Rngs(0))])
@pytest.mark.parametrize("make", [jpipe.pipeline, jpipe.sequential, jpipe.profile])
def test_a_model_in_place_of_its_layers(make, model):
    match = says(f"stages is a {type(model).__name__}; needs", "List a model by the bl")
    with pytest.raises(TypeError, match=match) as refusal:
        make(model, 2 if make is not jpipe.profile else X)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("number", [0, -3])
def test_fewer_than_one_microbatch(number):
    match = says(f"num_microbatches={number}", "at least 1")
    with pytest.raises(ValueError, match=match):
        jpipe.pipeline(two_stages(), number)


def test_a_number_of_microbatches_that_is_left_out():
    with pytest.raises(TypeError, match=says("give num_microbatches=", "or plan=")):
        jpipe.pipeline(two_stages())


@pytest.mark.parametrize("number", [True, 2.0, "2"])
def test_number_of_microbatches_that_is_no_int(number):
    match = says(f"num_microbatches={number!r} is a {type(number).__name__}", "an int")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline(two_stages(), number)


def test_numpy_numbers_are_numbers():
    number = np.int64(2)
    pipe = jpipe.pipeline(two_stages(), number, balance=np.array([2, 1]))
    assert (pipe.num_microbatches, pipe.num_stages) == (2, 2)


@pytest.mark.parametrize(
    ("balance", "parts"),
    [
        ([1, 1], ["balance=[1, 1]", "its sum is 2", "3 layers"]),
        ([3, 0], ["balance=[3, 0]", "every stage needs at least one layer"]),
        ([4, -1], ["balance=[4, -1]", "every stage needs at least one layer"]),
        ([0, 4], ["at least one layer", "its sum is 4, the model has 3 layers"]),
        ([], ["balance=[]", "its sum is 0"]),
        (
            "time",
            ["balance='time'", "needs sample=", "a profile of a micro-batch"],
        ),
    ],
    ids=str,
)
def test_balance_that_does_not_fit(balance, parts):
    with pytest.raises(ValueError, match=says(*parts)):
        jpipe.pipeline(two_stages(), 2, balance=balance)


@pytest.mark.parametrize("balance", [3, [1.0, 2], [True, 2], [[1], [2]]], ids=str)
def test_balance_that_is_no_sequence_of_ints(balance):
    match = says(f"balance={balance!r}", "a sequence of ints")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline(two_stages(), 2, balance=balance)


SEVERAL = {
    name: build(2, 4).num_stages // 2
    for name, build in schedules.BY_NAME.items()
    if build(2, 4).num_stages > 2
}


@pytest.mark.parametrize("name", SEVERAL)
def test_devices_that_are_idle_as_a_rank_runs_several_stages(name):
    match = says(
        f"{name} runs 2 stages per rank: 2 stages make 1 rank, 3 of 4 devices are idle",
        "give balance= 8 entries",
        "devices=jax.devices()[:1]",
    )
    with pytest.warns(UserWarning, match=match) as caught:
        jpipe.pipeline(
            two_stages(), 4, balance=[1, 2], schedule=name, devices=jax.devices()[:4]
        )
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "options",
    [
        {"devices": jax.devices()[:1]},
        {"schedule": schedules.zb_v(1, 4)},
        {"schedule": "1f1b"},
        {"mesh": jax.make_mesh((1, 2), ("stage", "data"))},
    ],
    ids=["devices", "schedule", "one stage per rank", "mesh"],
)
def test_nothing_is_said_where_that_is_meant(options, recwarn):
    options = {"schedule": "zb_v", **options}
    jpipe.pipeline(two_stages(), 4, balance=[1, 2], **options)
    assert not recwarn.list


def test_more_stages_than_devices():
    devices = jax.devices()[:2]
    match = says(
        "3 stages need 3 devices, there are 2",
        "devices=[",
        "balance=",
        "jax.config.update('jax_num_cpu_devices', 3)",
    )
    with pytest.raises(ValueError, match=match) as refusal:
        jpipe.pipeline(two_stages(), 2, devices=devices)
    # What it says to type works when it is typed.
    typed = re.search(r"devices=(\[.*?range\(\d+\)\])", str(refusal.value))[1]
    repeated = eval(typed, {"jax": jax})
    assert jpipe.pipeline(two_stages(), 2, devices=repeated).num_stages == 3


def test_more_stages_than_the_machine_has_devices():
    needed = jax.device_count() + 1
    with pytest.raises(
        ValueError,
        match=f"{needed} stages need {needed} devices, there are {needed - 1}",
    ):
        jpipe.pipeline([nn.relu] * needed, 2)


def test_devices_that_are_no_devices():
    with pytest.raises(TypeError, match=says("devices", "'cpu:0'", "jax.Device")):
        jpipe.pipeline([nn.relu], 2, devices=["cpu:0"])


def test_one_device_in_place_of_a_sequence():
    with pytest.raises(TypeError, match=says("devices", "a sequence")):
        jpipe.pipeline([nn.relu], 2, devices=jax.devices()[0])


def test_unknown_schedule():
    with pytest.raises(
        ValueError,
        match=says("unknown schedule 'zb'", "'gpipe', 'gpipe_last_1f1b'", "Schedule"),
    ):
        jpipe.pipeline(two_stages(), 2, schedule="zb")


def test_schedule_that_is_no_schedule():
    with pytest.raises(
        TypeError, match=says("schedule=3", "int", "'gpipe', 'gpipe_last_1f1b'")
    ):
        jpipe.pipeline(two_stages(), 2, schedule=3)


def test_builder_that_builds_no_schedule():
    with pytest.raises(TypeError, match=says("schedule", "NoneType", "Schedule")):
        jpipe.pipeline(two_stages(), 2, schedule=lambda num_ranks, number: None)


def test_schedule_for_other_numbers():
    match = says(
        "schedule 'gpipe' is for 2 stages, the pipeline has 3",
        "5 micro-batches, the pipeline has num_microbatches=4",
    )
    with pytest.raises(ValueError, match=match):
        jpipe.pipeline(two_stages(), 4, schedule=gpipe(2, 5))


def test_schedule_that_cannot_run():
    backwards_first = dataclasses.replace(
        gpipe(1, 1), rows=tuple(row[::-1] for row in gpipe(1, 1).rows)
    )
    assert isinstance(backwards_first, Schedule)
    with pytest.raises(ScheduleError, match="0B0 runs before 0F0"):
        jpipe.pipeline([nn.relu], 1, schedule=backwards_first)


def test_unknown_remat():
    known = "'none', 'dots', 'min_cut', 'except_last' or a policy of jax.checkpoint_p"
    with pytest.raises(ValueError, match=says("unknown remat 'half'", known)):
        jpipe.pipeline(two_stages(), 2, remat="half")


def test_unknown_remats_are_all_named_as_they_were_given():
    with pytest.raises(ValueError, match=says("unknown remat 'half', 3: choose")):
        jpipe.pipeline(two_stages(), 2, remat=["half", "full", 3])


def test_remat_of_the_wrong_length():
    with pytest.raises(ValueError, match=says("remat has 2 entries for 3 stages")):
        jpipe.pipeline(two_stages(), 2, remat=["full", "none"])


def test_a_builder_may_refuse_a_number_of_ranks():
    def picky(num_ranks, num_microbatches):
        if num_ranks > 1:
            raise ScheduleError("one rank only")
        return one_f_one_b(num_ranks, num_microbatches)

    assert jpipe.pipeline([jnp.sin], 2, schedule=picky).num_stages == 1
    with pytest.raises(ScheduleError, match="2 ranks: one rank only"):
        jpipe.pipeline([jnp.sin, jnp.cos], 2, schedule=picky)
