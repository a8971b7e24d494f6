"""A pipeline of two stages and its variables."""

import pytest

import jpipe

from .model import KEY, X, two_stages


@pytest.fixture(scope="module")
def pipe():
    return jpipe.pipeline(two_stages(), num_microbatches=2, balance=[2, 1])


@pytest.fixture(scope="module")
def variables(pipe):
    return pipe.init(KEY, X)
