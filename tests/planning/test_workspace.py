"""What programs need while they run, on paper: by hand, and beside what XLA says."""

import jax
import jax.numpy as jnp

import jpipe
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._profile import LayerProfile, Profile, SkipProfile
from jpipe.schedules import gpipe, one_f_one_b


def test_it_is_no_less_than_what_xla_takes():
    def attend(x):
        scores = jax.nn.softmax(x @ jnp.swapaxes(x, -1, -2))
        return x + jax.nn.gelu(scores @ x)

    x = jnp.ones((4, 32, 64))
    paper, measured = (
        jpipe.profile([jnp.sin, attend], x, rounds=1, measure=False),
        jpipe.profile([jnp.sin, attend], x, rounds=1),
    )
    least, most = (p.layers[1].workspace_bytes for p in (measured, paper))
    assert 0 < least <= most


def test_what_a_program_computes_both_ways_is_in_its_workspace():
    layers = tuple(
        LayerProfile(name, 1.0, 2.0, workspace_bytes=7, kept_bytes={"min_cut": 100})
        for name in "abc"
    )

    def workspaces(remat, schedule):
        made = evaluate(Profile(layers), [0] * 3, [2, 1], remat, schedule, Hardware(2))
        return [memory.workspace for memory in made.memory]

    apart, together = gpipe(2, 4), one_f_one_b(2, 4)
    assert workspaces(["min_cut"] * 2, apart) == [7, 7]
    assert workspaces(["min_cut"] * 2, together) == [7, 7 + 100]
    assert workspaces(["full"] * 2, together) == [7 + 200, 7 + 100]


def test_what_passes_and_lies_open_within_a_stage_is_in_its_workspace():
    layers = tuple(
        LayerProfile(
            str(i),
            1.0,
            2.0,
            output_bytes=10**i,
            workspace_bytes=own,
            kept_bytes={"min_cut": 0},
        )
        for i, own in enumerate([3, 0, 40, 0])
    )
    skips = (
        SkipProfile("far", 0, 3, 50_000, 50_000),
        SkipProfile("near", 1, 2, 700_000, 700_000),
    )
    made = Profile(layers, input_bytes=9_000_000, skips=skips)

    def workspaces(*balance):
        number = len(balance)
        how = ["min_cut"] * number, gpipe(number, 2), Hardware(number)
        return [
            memory.workspace for memory in evaluate(made, [0] * 4, balance, *how).memory
        ]

    # Layer 2 is given 10 bytes and gives 100; both skip connections lie open there.
    assert workspaces(4) == [40 + 10 + 100 + 50_000 + 700_000]
    # What enters a stage or leaves it is an argument or a result of its programs.
    assert workspaces(3, 1) == [40 + 10 + 700_000, 0]
    assert workspaces(2, 2) == [3 + 1, 40 + 100]
