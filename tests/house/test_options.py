"""An option that users type reaches the program: no function on its way drops it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest

import jpipe
from jpipe._api._function_gradient import FunctionGradient
from jpipe._api._options import DECIDED_BY_PLAN, Options
from jpipe._arguments._batch import Axes
from jpipe._partition._config import PipelineConfig

OPTIONS = {field.name for field in fields(Options)}


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def test_the_records_of_a_pipeline_have_all_of_its_options():
    names = {*parameters(jpipe.pipeline)} - {"layers"}
    assert names == OPTIONS | {*Axes._fields}


def test_the_records_of_a_gradient_function_have_all_of_its_options():
    names = {*parameters(jpipe.value_and_grad)} - {"fun"}
    made_of = {*parameters(FunctionGradient)} - {"function", "partition"}
    assert names == OPTIONS - {"balance"} | made_of


def test_both_have_the_same_defaults():
    of_pipeline = parameters(jpipe.pipeline)
    of_gradient = parameters(jpipe.value_and_grad)
    for name in OPTIONS - {"balance"}:
        assert of_gradient[name].default == of_pipeline[name].default, name


def test_an_option_that_a_plan_decides_has_the_default_of_the_signature():
    of_pipeline = parameters(jpipe.pipeline)
    defaults = {name: of_pipeline[name].default for name in DECIDED_BY_PLAN}
    assert defaults == DECIDED_BY_PLAN


@pytest.mark.parametrize("record", [Options, PipelineConfig])
def test_a_record_of_options_has_no_defaults(record: type):
    for field in fields(record):
        assert field.default is MISSING, field.name
        assert field.default_factory is MISSING, field.name


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_that_is_not_passed_on_is_an_error(name: str):
    values = dict.fromkeys(OPTIONS - {name})
    with pytest.raises(TypeError, match=name):
        Options(**values)


def test_an_option_of_a_gradient_function_that_is_not_passed_on_is_an_error():
    for name, parameter in parameters(FunctionGradient).items():
        assert parameter.default is parameter.empty, name
    assert not Axes._field_defaults
