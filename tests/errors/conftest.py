"""A pipeline of two stages and its variables, hardly optimized by XLA."""

import pytest

import jpipe

from .. import reference as ref
from .model import KEY, X, two_stages


@pytest.fixture(autouse=True, scope="module")
def unoptimized():
    """Compiles in half the time; for the pipeline that tests share as for others."""
    with ref.unoptimized():
        yield


@pytest.fixture(scope="module")
def pipe():
    return jpipe.pipeline(two_stages(), num_microbatches=2, balance=[2, 1])


@pytest.fixture(scope="module")
def variables(pipe):
    return pipe.init(KEY, X)
