"""The collector of cycles rests while a list is written, and no longer."""

import gc

import pytest

from jpipe._instructions._collector import paused


@paused
def enabled():
    return gc.isenabled()


@paused
def fails():
    raise KeyError


def test_it_rests_and_goes_on():
    assert not enabled()
    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()
