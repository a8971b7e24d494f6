"""What `jpipe.plan` says: while it plans, for which device, and where nothing fits."""

import jax
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._instructions import _progress

from .test_plan import KIB, SAMPLE, planned


def test_where_nothing_fits_it_says_what_is_short_and_what_would_do():
    with pytest.raises(ValueError, match="no plan fits") as raised:
        planned(memory_limit=18 * KIB)
    message = str(raised.value)
    assert "memory_limit=18,432 bytes on 2 devices" in message
    assert "more than it has: parameters" in message
    assert "take more devices (num_devices=)" in message


def test_a_layer_that_no_device_holds_is_named_before_anything_is_measured():
    ran = []

    def watched(x):
        jax.debug.callback(lambda: ran.append(0))
        return x

    layers = [nn.Dense(6), watched, nn.Dense(100), nn.Dense(1)]
    given = layers, SAMPLE, optax.adam(1e-3)
    with pytest.raises(ValueError, match="no plan fits") as raised:
        jpipe.plan(*given, num_devices=2, memory_limit=10 * KIB)
    assert not ran
    # 700 parameters, as many gradients, two moments and a counter.
    assert str(raised.value).splitlines() == [
        "memory_limit=10,240 bytes on 2 devices: no plan fits, whatever the partition:",
        "  * layer 2 (Dense) needs 10.9 KiB, 960 B more than a device has: parameters "
        "2.7 KiB, gradients 2.7 KiB, optimizer 5.5 KiB",
        "Take devices with more memory (memory_limit=), list the parts of such a layer "
        "one by one, or take a smaller model",
    ]
    # A frozen layer has neither gradients nor a state.
    jpipe.plan(
        *given, num_devices=2, memory_limit=10 * KIB, measure=False, trainable="3/*"
    )


def test_a_plan_of_an_estimate_says_for_which_device():
    (said,) = (x for x in planned().forecast.reasons if x.startswith("layers: "))
    assert said == (
        "layers: estimated for a device of 1e+12 flops and 1e+11 bytes of memory per "
        "second, and 0 µs more for each action; peak_flops=, memory_bandwidth= and "
        "action_seconds= describe yours"
    )
    own = planned(peak_flops=3e9, memory_bandwidth=2e8, action_seconds=1e-3)
    assert "of 3e+09 flops and 2e+08 bytes of memory per second, and 1000 µs" in (
        str(own)
    )


def test_on_a_terminal_it_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "_LONG", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    jpipe.plan(
        [nn.Dense(4), nn.tanh, nn.Dense(4)],
        SAMPLE,
        optax.sgd(0.1),
        num_devices=2,
        num_microbatches=2,
        rounds=1,
        memory_limit=1 << 20,
    )
    shown = capsys.readouterr().err
    for what in (
        "programs compiled",
        "visits of layers measured",
        "layers traced",
        "stages traced",
        "numbers of devices and micro-batches planned",
        "partitions improved",
        "schedules made to measure",
        "candidates lowered",
    ):
        assert what in shown
    assert shown.endswith("\r\x1b[K")
