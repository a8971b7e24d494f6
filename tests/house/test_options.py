"""An option that users type reaches the program: no function on its way drops it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jpipe
from jpipe._api._function_gradient import FunctionGradient
from jpipe._arguments._batch import Axes
from jpipe._partition._options import Options

MESH = jax.make_mesh((2, 2), ("stage", "data"))
# option -> a value that is not its default
VALUES = {
    "num_microbatches": 3,
    "num_stages": 2,
    "balance": (2, 1),
    "devices": tuple(jax.devices()[2:5]),
    "mesh": MESH,
    "sharding": lambda path, spec: None,
    "gather": "microbatch",
    "replicas": [2, 1],
    "schedule": "gpipe",
    "remat": "full",
}
DEFAULTS = {field.name: field.default for field in fields(Options)}
DECIDED_WITH_A_PLAN = {"cuts", "planned_shapes"}


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def test_the_options_of_a_pipeline_are_those_of_the_record():
    names = {*parameters(jpipe.pipeline)} - {"layers", "plan", *Axes._fields}
    assert names == {*VALUES} == {*DEFAULTS} - DECIDED_WITH_A_PLAN


def test_the_options_of_a_gradient_function_are_those_of_the_record():
    names = {*parameters(jpipe.value_and_grad)} - {"fun", "plan"}
    made_of = {*parameters(FunctionGradient)} - {"function", "partition"}
    assert names == {*VALUES} - {"balance"} | made_of


@pytest.mark.parametrize("function", [jpipe.pipeline, jpipe.value_and_grad])
def test_the_defaults_of_all_signatures_and_of_the_record_are_the_same(function: Any):
    of_pipeline = parameters(jpipe.pipeline)
    for name in {*VALUES} & {*parameters(function)}:
        default = parameters(function)[name].default
        assert default == of_pipeline[name].default, name
        if DEFAULTS[name] is not MISSING:
            assert default == DEFAULTS[name], name


@pytest.mark.parametrize("name", sorted(VALUES))
def test_an_option_that_is_typed_reaches_the_record(name: str):
    options = {"num_microbatches": 4, name: VALUES[name]}
    if name in ("sharding", "gather"):
        options["mesh"] = MESH

    built = []
    if name == "num_stages":
        built.append(jpipe.pipeline(jnp.sin, **options)._pipelined_model.partition)
    else:
        layers = [jnp.sin] * (3 if name == "balance" else 2)
        built.append(jpipe.pipeline(layers, **options)._pipelined_model.partition)
    if name != "balance":
        built.append(jpipe.value_and_grad(jnp.sum, **options)._partition)
    for partition in built:
        recorded = getattr(partition.options, name)
        assert (tuple(recorded) if name == "devices" else recorded) == VALUES[name]


def test_an_option_of_a_gradient_function_that_is_not_passed_on_is_an_error():
    for name, parameter in parameters(FunctionGradient).items():
        assert parameter.default is parameter.empty, name
    assert not Axes._field_defaults
