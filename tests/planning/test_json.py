"""Schedules, plans and profiles as JSON: any change of a text is read or refused."""

import dataclasses
import json
import pathlib
import random
import time
import warnings

import jax
import jax.numpy as jnp
import pytest

import jpipe
from jpipe.schedules import Schedule, ScheduleError, dualpipe_v, replicated

from .chains import Profile, random_chain
from .models import planned


def plan_of_a_function():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=2)
    grad_fn.place([jnp.ones((3, 3))] * 4, jnp.ones((4, 3)))
    return grad_fn.plan


def plan_of_scans():
    """A plan with pieces of a parameter, and of a scan along what is stacked."""

    def loss(params, x):
        stacked, *layers = params
        for rows in (stacked, jnp.stack(layers)):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, rows)
        return jnp.mean(x)

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=4)
    layers = [jnp.ones((3, 3))] * 4
    grad_fn.place([jnp.ones((4, 3, 3)), *layers], jnp.ones((4, 3)))
    return grad_fn.plan


SAVED = {
    "schedule": (Schedule, ScheduleError, lambda: dualpipe_v(2, 4)),
    "replicas": (Schedule, ScheduleError, lambda: replicated([2, 1], 4)),
    "plan": (jpipe.Plan, ValueError, lambda: planned(2, schedules="zb_h1")),
    "plan with cuts": (jpipe.Plan, ValueError, plan_of_a_function),
    "plan with scans": (jpipe.Plan, ValueError, plan_of_scans),
    "profile": (
        Profile,
        ValueError,
        lambda: random_chain(random.Random(0), 6, num_skips=3, num_ties=1),
    ),
    "estimate": (
        Profile,
        ValueError,
        lambda: jpipe.profile([jnp.tanh], jnp.ones((4, 2)), measure=False),
    ),
}
VALUES = (
    *(None, True, False, "", "a", "0F0", "x\ny", [], {}, [[]], {"a": 1}),
    *(0, 1, -1, 2.5, 10**7, 10**12, 10**400, 1e308, -0.0, float("nan"), float("inf")),
)


def parts(value, path=()):
    """The paths of all parts of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from parts(value[key], (*path, key))


def scaled(value, rng):
    """A larger value of the same type."""
    if isinstance(value, dict) or value is None:
        return value
    if isinstance(value, str | list):
        return value * rng.choice([0, 2, 30])
    return value * rng.choice([-1, 0.5, 3, 10**6, 10**30])


def mutated(saved, rng):
    """A text with one or two parts replaced, deleted, nested or scaled; or cut."""
    tree = json.loads(saved)
    for _ in range(rng.choice([1, 1, 2])):
        *path, last = rng.choice([p for p in parts(tree) if p] or [("",)])
        holder = tree
        for key in path:
            holder = holder[key]
        change = rng.choice(["replace", "delete", "nest", "scale", "cut"])
        if change == "delete":
            del holder[last]
        elif change == "replace":
            holder[last] = rng.choice(VALUES)
        elif change == "nest":
            value = holder[last]
            holder[last] = rng.choice([[value], {"a": value}, [value] * 50])
        elif change == "scale" and holder[last] is not None:
            holder[last] = scaled(holder[last], rng)
        elif change == "cut":
            return saved[: rng.randrange(len(saved))]
    return json.dumps(tree)


def refusal_of(cls, text, error_type):
    """The message with which a text is refused; empty if it is read and printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # E9: a rank that runs nothing
        try:
            str(cls.from_json(text))
        except error_type as error:
            return str(error)
    return ""


@pytest.mark.parametrize("count", [80, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SAVED)
def test_a_changed_text_is_read_or_refused_at_once(name, count):
    cls, refusal, make = SAVED[name]
    saved, rng = make().to_json(), random.Random(count)
    refused = 0
    for _ in range(count):
        text = mutated(saved, rng)
        start = time.process_time()
        error = refusal_of(cls, text, refusal)
        assert time.process_time() - start < 1, text
        assert len(error) < 20_000
        assert "\\n  *" not in error
        refused += bool(error)
    assert refused > count / 2


def test_a_number_in_place_of_a_flag_is_refused_before_it_is_computed_with():
    saved = json.loads(SAVED["schedule"][2]().to_json())
    with pytest.raises(ScheduleError, match=r"forward_only is 1000.*, needs true or f"):
        Schedule.from_json(json.dumps(saved | {"forward_only": 10**12}))
    schedule = dataclasses.replace(dualpipe_v(2, 4), forward_only=10**12)
    with pytest.raises(ScheduleError, match=r"E0 forward_only=1000.*: must be True"):
        schedule.validate()


@pytest.mark.parametrize("read", [Schedule, jpipe.Plan, Profile])
def test_only_what_looks_like_a_path_is_called_one(read):
    for text in ("plan.json", "runs/plan", pathlib.Path("plan")):
        with pytest.raises(ValueError, match=r"; give its text, not its path"):
            read.from_json(text)
    for text in ("{}", '{"name": "runs/plan.json"}', "[1]", "nothing", ""):
        with pytest.raises(ValueError, match=r"as .*to_json writes it.*: ") as refusal:
            read.from_json(text)
        assert "path" not in str(refusal.value)


def test_faults_are_named_with_their_places_a_line_for_each_of_a_schedule():
    fields = json.loads(plan_of_a_function().to_json())
    fields["stages"][1]["num_params"] = "9"
    fields["cuts"]["read_distances"][0] = [1]
    with pytest.raises(ValueError, match=r"as Plan.to_json writes it.*: ") as refusal:
        jpipe.Plan.from_json(json.dumps(fields))
    assert str(refusal.value).endswith(
        ": stages[1].num_params is '9', needs an int; cuts.read_distances[0] is [1], "
        "needs 2 entries"
    )
    fields = json.loads(plan_of_a_function().to_json())
    fields["cuts"]["positions"] = [0]
    with pytest.raises(ValueError, match=r"cuts.positions=\(0,\): need to ascend"):
        jpipe.Plan.from_json(json.dumps(fields))
    fields["schedule"]["rows"][0].pop()
    with pytest.raises(ValueError, match=r"\n  . E5 stage 0 runs F on micro-batch"):
        jpipe.Plan.from_json(json.dumps(fields))


def test_the_division_of_scans_is_saved_and_its_faults_are_named():
    plan = plan_of_scans()
    assert plan.cuts is not None
    division = plan.cuts.division
    assert division.params
    assert division.scans
    assert jpipe.Plan.from_json(plan.to_json()) == plan

    def refuse(division, says):
        fields = json.loads(plan.to_json())
        fields["cuts"]["division"] |= division
        with pytest.raises(ValueError, match=says):
            jpipe.Plan.from_json(json.dumps(fields))

    refuse({"params": {"x": [0, [4]]}}, r"a key of cuts.division.params is 'x', needs")
    refuse({"params": {"9": [0, [4]]}}, r"cuts.division: params has indices \[9\], of")
    refuse({"scans": {"1": [4, 0]}}, r"cuts.division: pieces of sizes \(4, 0\): need")


def test_a_plan_of_another_version_is_to_be_made_again():
    fields = json.loads(plan_of_scans().to_json())
    del fields["cuts"]["division"]
    fields["cuts"] |= {"pieces": [[0, 0, [2, 2]]], "scan_sizes": []}
    says = (
        r"if another version of jpipe did, make the plan again, by jpipe.plan\): "
        r"cuts.division is missing; cuts.pieces is unknown; cuts.scan_sizes is unknown"
    )
    with pytest.raises(ValueError, match=says):
        jpipe.Plan.from_json(json.dumps(fields))
