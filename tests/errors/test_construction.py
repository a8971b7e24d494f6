"""Errors of `pipeline`: layers, micro-batches, balances, devices, schedules, remat."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.schedules import ScheduleError, gpipe, one_f_one_b

from .model import KEY, X, rows, says, two_stages

LINEAR = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
BOUND = nn.Dense(3).bind(nn.Dense(3).init(KEY, X))
REVERSED = tuple(row[::-1] for row in gpipe(3, 2).rows)
KNOWN = "'gpipe', 'gpipe_last_1f1b'"
REMATS = "'min_cut', 'dots', 'none', 'except_last' or a policy of jax.checkpoint_p"


def picky(num_ranks, num_microbatches):
    if num_ranks > 1:
        raise ScheduleError("one rank only")
    return one_f_one_b(num_ranks, num_microbatches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    w: Any

    def __call__(self, x):
        return self.w * x


# What is given beside, or in place of, three layers and two micro-batches.
OPTIONS = {
    ValueError: {
        "num_microbatches=0 ... at least 1": {"num_microbatches": 0},
        "balance=[1, 1] ... its sum is 2 ... 3 layers": {"balance": [1, 1]},
        "balance=[3, 0] ... needs at least one layer": {"balance": [3, 0]},
        f"unknown schedule 'zb' ... {KNOWN} ... Schedule": {"schedule": "zb"},
        "for 2 stages, the pipeline has 3 ... 5 micro-batches": {
            "schedule": gpipe(2, 5)
        },
        f"unknown remat 'half' ... {REMATS}": {"remat": "half"},
        f"unknown schedule '1F1B' ... {KNOWN} ... Schedule": {
            "layers": nn.Dense(2),
            "schedule": "1F1B",
        },
        f"unknown remat True ... {REMATS}": {"layers": nn.Dense(2), "remat": True},
        "remat has 2 entries for 3 stages": {"remat": ["full", "none"]},
        "layers=[] ... at least one layer": {"layers": []},
        "balance=[1] is for a list ... give num_stages=": {
            "layers": nn.Dense(2),
            "balance": [1],
        },
        "num_stages=2 is for one model ... type balance=": {"num_stages": 2},
        "num_stages=2 ... give the model as it is, not in a list": {
            "layers": [nn.Dense(2)],
            "num_stages": 2,
        },
        f"unknown remat <function checkpoint ... {REMATS}": {"remat": jax.checkpoint},
        "with schedule='gpipe': choose '1f1b' or": {
            "schedule": "gpipe",
            "replicas": [2, 1, 1],
        },
        "replicas=[2, 1] is for 2 stages, the pipeline has 3": {"replicas": [2, 1]},
        "10 ranks need 10 devices, there are 8": {
            "num_microbatches": 16,
            "replicas": [8, 1, 1],
        },
    },
    TypeError: {
        "num_microbatches is True; needs an int": {"num_microbatches": True},
        "num_microbatches is float32[4,3]; needs an int ... num_microbatches=4": {
            "num_microbatches": X
        },
        "num_microbatches is a dict; needs an int": {
            "num_microbatches": {"kernel": X, "bias": X, "other": X, "last": X}
        },
        "num_microbatches is 2.0; needs an int ... such as num_microbatches=4": {
            "num_microbatches": 2.0
        },
        "num_microbatches= is missing ... such as num_microbatches=4, or plan=": {
            "num_microbatches": None
        },
        "num_stages is '2'; needs an int": {
            "layers": nn.Dense(2),
            "num_stages": "2",
        },
        "balance=3 ... a sequence of ints": {"balance": 3},
        "balance='time' ... jpipe.partition(jpipe.profile(": {"balance": "time"},
        "balance=[True, 2] ... a sequence of ints": {"balance": [True, 2]},
        "devices ... 'cpu:0' ... such as devices=jax.devices()[:1]": {
            "devices": ["cpu:0"]
        },
        "devices=1 is a ... devices=jax.devices()[:2]": {"devices": 1},
        f"schedule=3 ... int ... {KNOWN}": {"schedule": 3},
        "schedule ... NoneType ... Schedule": {"schedule": lambda *_: None},
        "layers is a int; needs a Flax module ... [nn.Dense": {"layers": 3},
        "layers is a str; needs a Flax module": {"layers": "Dense"},
        "layers is a dict; needs a Flax module": {"layers": {"first": nn.Dense(3)}},
        "layers is a ndarray; needs a Flax module": {"layers": X},
        "replicas=2 is a int; needs a number for each stage": {"replicas": 2},
        "Dense is a class; write Dense(...)": {"layers": nn.Dense},
        "layer 1 ... a function that calls a Dense ... become constants": {
            "layers": [nn.relu, BOUND.__call__]
        },
        "layer 1 ... list the module itself": {
            "layers": [nn.relu, functools.partial(LINEAR)]
        },
        "layer 0 ... list the module as jpipe.layer(module, 'attend')": {
            "layers": [nn.Embed(3, 4).attend]
        },
        "Tree is a pytree with arrays ... 'params': module": {
            "layers": [Tree(jnp.ones(3))]
        },
        "Tree is a pytree ... take params, static = eqx.partition": {
            "layers": [Tree({"w": jnp.ones(3), "act": jnp.sin})]
        },
    },
    ScheduleError: {
        "runs before": {"schedule": dataclasses.replace(gpipe(3, 2), rows=REVERSED)},
        "3 ranks: one rank only": {"schedule": picky},
    },
}


@pytest.mark.parametrize(("options", "error", "match"), rows(OPTIONS))
def test_unusable_arguments_are_refused(options, error, match):
    given = {"layers": two_stages(), "num_microbatches": 2, **options}
    with pytest.raises(error, match=match):
        jpipe.pipeline(**given)


def test_arrays_of_numpy_are_options_as_lists_are():
    devices = jax.make_mesh((2, 2), ("stage", "data")).devices[:, 0]
    balance = np.array([2, 1])
    pipe = jpipe.pipeline(two_stages(), 2, balance=balance, devices=devices)
    assert pipe.devices == tuple(devices)
    model = jpipe.pipeline(nn.Dense(2), 2, num_stages=1, devices=devices)
    assert model.devices == (devices[0],)
    grad_fn = jpipe.value_and_grad(lambda w, x: jnp.mean(x @ w), 2, devices=devices)
    assert grad_fn.place(jnp.ones((3, 2)), X).devices() <= set(devices)

    profile = jpipe.profile(two_stages(), X, num_microbatches=2, measure=False)
    options = {"num_devices": 2, "num_microbatches": 2, "data": 1}
    plan = jpipe.plan(two_stages(), X, optax.sgd(0.1), profile=profile, **options)
    planned = jpipe.pipeline(two_stages(), plan=plan, devices=devices)
    assert {*planned.devices} <= {*devices}
    with pytest.raises(ValueError, match="it decides balance, which was given too"):
        jpipe.pipeline(two_stages(), plan=plan, balance=balance)


def test_profile_refuses_what_is_no_model():
    with pytest.raises(TypeError, match=r"layers is .* int; needs a Flax module"):
        jpipe.profile(3, X)


def test_layers_that_are_no_layers_are_all_listed():
    listed = [
        3,
        nn.Dense,
        nn.relu,
        nnx.Module(),
        "relu",
        [nn.Dense(2)],
        np.ones((100, 100)),
    ]
    with pytest.raises(TypeError, match=r"module, a jpipe\.Layer or a func") as refusal:
        jpipe.pipeline(listed, 2)
    faults = [
        r"layer 0: 3 is an? int",
        r"layer 1: Dense is a class; write Dense\(\.\.\.\)",
        r"layer 3: Module is an nnx module without __call__",
        r"layer 4: 'relu' is a str",
        r"layer 5: a list; list its layers themselves, and type balance= for stages",
        r"layer 6: array\(.{1,40} is a ndarray",
    ]
    lines = str(refusal.value).splitlines()[1:]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert re.fullmatch(rf"  \* {fault}", line)


def test_a_module_in_place_of_a_function_is_answered():
    match = says("fun is a module, Dense", "(params, *args) -> loss", "jpipe.pipeline")
    with pytest.raises(TypeError, match=match):
        jpipe.value_and_grad(nn.Dense(3), 2)


FORMER = {
    "type jpipe.pipeline(layers, ... type layers= for stages=": (
        lambda: jpipe.pipeline(stages=two_stages(), num_microbatches=2)
    ),
    "type jpipe.sequential(layers) ... type layers= for stages=": (
        lambda: jpipe.sequential(stages=two_stages())
    ),
    "type jpipe.profile(layers, x) ... type x= for sample=": (
        lambda: jpipe.profile(two_stages(), sample=X)
    ),
    "type jpipe.plan(layers, x, tx) ... x= for sample= ... type loss_fn= for loss=": (
        lambda: jpipe.plan(two_stages(), sample=X, tx=optax.sgd(0.1), loss=len)
    ),
    "type jpipe.value_and_grad(fun, ... type fun= for loss_fn=": (
        lambda: jpipe.value_and_grad(loss_fn=len, num_microbatches=2)
    ),
    "type jpipe.pipeline(layers, ... it was given ([], 2, device=1)": (
        lambda: jpipe.pipeline([], 2, device=1)
    ),
}


@pytest.mark.parametrize("message", FORMER)
def test_another_name_of_an_argument_is_answered_with_the_line_to_type(message):
    with pytest.raises(TypeError, match=says(*message.split(" ... "))):
        FORMER[message]()


def test_inputs_beside_the_first_are_packed_also_for_a_plan():
    match = says("too many positional arguments", "x = jpipe.inputs(x, mask)")
    with pytest.raises(TypeError, match=match):
        jpipe.plan(nn.Dense(3), X, X, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"argument 'num_device'$"):
        jpipe.plan(nn.Dense(3), X, optax.sgd(0.1), num_device=2)


def test_idle_devices_warn():
    """A pipeline of torchgpipe's form, given another schedule by its name alone."""
    match = says(
        "zb_v runs 2 stages per rank: 2 stages make 1 rank, 3 of 4 devices are idle",
        "give balance= 8 entries",
        "devices=jax.devices()[:1]",
    )
    options = {"schedule": "zb_v", "devices": jax.devices()[:4]}
    with pytest.warns(UserWarning, match=match) as caught:
        jpipe.pipeline(two_stages(), 4, balance=[1, 2], **options)
    assert [warning.filename for warning in caught] == [__file__]


def test_too_few_devices_are_answered_with_what_to_type():
    match = says(
        "3 stages need 3 devices, there are 2",
        "devices=[",
        "balance=",
        "jax.config.update('jax_num_cpu_devices', 3)",
    )
    with pytest.raises(ValueError, match=match) as refusal:
        jpipe.pipeline(two_stages(), 2, devices=jax.devices()[:2])
    # What it says to type works when it is typed.
    typed = re.search(r"devices=(\[.*?range\(\d+\)\])", str(refusal.value))[1]
    repeated = eval(typed, {"jax": jax})
    assert jpipe.pipeline(two_stages(), 2, devices=repeated).num_stages == 3
