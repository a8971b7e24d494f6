"""The collector of cycles rests while a list is written, and no longer.

`pause_collector` is imported because after a call of a pipeline nothing shows that it
was used.
"""

import gc

import pytest

from jpipe._instructions._garbage_collector import pause_collector


@pause_collector()
def enabled():
    return gc.isenabled()


@pause_collector()
def fails():
    raise KeyError


def test_the_garbage_collector_is_paused_and_resumed():
    assert not enabled()
    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()
