"""Commands about models: what they print, what they write."""

from pathlib import Path

import optax
import pytest

import jpipe

from .model import make, with_loss
from .outcome import works

ESTIMATE = "--devices 2 --estimate"


pytestmark = pytest.mark.usefixtures("folder")


def test_a_plan_and_its_picture_are_those_of_the_library(command):
    options = "--memory 1MiB --bandwidth 2GB --latency 3us --microbatches 4,8"
    files = "--json plan.json --svg plan.svg"
    out = works(command(f"plan model:make {ESTIMATE} {options} {files}"))
    plan = jpipe.plan(
        *make(),
        optax.adam(1e-3),
        num_devices=2,
        memory_limit=1 << 20,
        bandwidth=2e9,
        latency=3e-6,
        num_microbatches=(4, 8),
        measure=False,
    )
    assert out == (
        f"{plan}\n"
        "optimizer: none was given; planned for the state of optax.adam\n"
        "wrote plan.json\nwrote plan.svg\n"
    )
    assert jpipe.Plan.from_json(Path("plan.json").read_text()) == plan
    assert Path("plan.svg").read_text() == jpipe.draw.svg(plan)


def test_choices_are_those_of_the_library(command):
    options = "--flops 1e14 --memory-bandwidth 1TB --action 5us --microbatches 4"
    choices = "--schedule one_f_one_b,gpipe --remat full,none --data 1,2"
    out = works(command(f"plan model:with_loss {ESTIMATE} {options} {choices}"))
    given = with_loss()
    plan = jpipe.plan(
        *[given.pop(name) for name in ("layers", "sample", "optimizer")],
        **given,
        num_devices=2,
        measure=False,
        num_microbatches=4,
        data=(1, 2),
        schedules=("1f1b", "gpipe"),
        remat=("none", "full"),  # what keeps most first, in whatever order it is typed
        peak_flops=1e14,
        memory_bandwidth=1e12,
        action_seconds=5e-6,
    )
    assert out == f"{plan}\n"
    says = "1e+14 flops and 1e+12 bytes of memory per second, and 5 µs more for each"
    assert f"layers: estimated for a device of {says} action" in out


def test_a_plan_takes_a_saved_profile(command):
    made = works(command("profile model:with_loss --microbatches 4 --json costs.json"))
    profile = jpipe.Profile.from_json(Path("costs.json").read_text())
    assert made == f"{profile}\nwrote costs.json\n"
    assert profile.microbatch_size == 4
    assert profile.layers[-1].output_bytes == 0  # it has the loss in it
    given = "plan model:with_loss --devices 2 --data 1 --profile costs.json"
    out = works(command(given))
    how, *_ = made.splitlines()
    assert how.startswith("measured on cpu")
    assert out.endswith(f"\nlayers: as in costs.json, {how}\n")
