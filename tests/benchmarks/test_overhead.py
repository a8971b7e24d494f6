"""Benchmarks of what jpipe costs: all sides do the same work; the tables are whole."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from benchmarks.experiment import mean_cross_entropy
from benchmarks.overhead import by_hand, first_step, one_stage, wide
from benchmarks.overhead import command as overhead

# Floats of one size summed in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def small():
    layers = [nn.Dense(16), nn.relu, nn.Dense(10)]
    x = jax.random.normal(jax.random.key(1), (16, 8))
    return layers, x, jnp.arange(16) % 10


@pytest.mark.parametrize("name", by_hand.STEPS)
def test_steps_by_hand_do_what_jpipe_does(name):
    layers, x, targets = small()
    tx = optax.sgd(0.1, momentum=0.9)
    pipe = jpipe.sequential(layers, 8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(mean_cross_entropy, tx)
    params = jax.tree.map(jnp.array, state.params)
    opt_state = tx.init(params)
    run = by_hand.STEPS[name](layers, tx, 8)
    for _ in range(2):
        state, metrics = step(state, x, targets)
        params, opt_state, loss = run(params, opt_state, x, targets)
        np.testing.assert_allclose(loss, metrics["loss"], **TOLERANCE)
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    for by, ours in zip(
        jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(by, ours, **TOLERANCE)


def cells(line):
    return line.count("|")


def test_a_table_of_throughput_has_a_cell_under_every_heading():
    row = one_stage.throughput(small, 2)
    row |= {"by_scan_least": row["by_scan"], "by_scan_most": row["by_scan"]}
    row |= {"model": "small", "one_core": False, "keeps": False}
    assert row["scan_ms"] > 0 < row["by_unrolled"]
    assert row["jpipe_busy"] > 0
    lines = overhead.tables(
        {"provenance": overhead.provenance(), "throughput": [row]}
    ).splitlines()[2:]
    assert len(lines) == 3
    assert len({cells(line) for line in lines}) == 1


def test_a_table_of_calls_has_a_row_for_every_step():
    row = one_stage.throughput(small, 2, list(by_hand.STEPS))
    lines = overhead.tables(
        {"provenance": overhead.provenance(), "calls": row}
    ).splitlines()[2:]
    assert len(lines) == 2 + 1 + len(by_hand.STEPS)
    assert len({cells(line) for line in lines}) == 1


def test_the_sides_of_a_first_step_train_the_same_model(monkeypatch):
    monkeypatch.setattr(first_step, "WIDTH", 8)
    model = first_step._gpt([0.1] * 4)
    sizes = []
    for make in first_step.SIDES.values():
        step, state = make(model)
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
        shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
        before = [np.array(leaf) for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
        after = jax.tree.leaves(step(state))
        assert [leaf.shape for leaf in after] == shapes
        new = (leaf for leaf in after if leaf.ndim > 1)
        assert all((a != b).any() for a, b in zip(before, new, strict=True))
    # One count of steps and one key, or one of each stage.
    assert max(sizes) - min(sizes) <= 2


def test_a_table_of_first_steps_has_a_cell_under_every_heading(monkeypatch):
    def run(module, words):
        return {"cpu_s": 2.0 + (words[1] == "2"), "wall_s": 1.0}

    monkeypatch.setattr(overhead, "one_process", run)
    result = {"provenance": overhead.provenance()}
    lines = overhead.tables(result | {"first-step": overhead.first_step_costs(3)})
    lines = lines.splitlines()[2:]
    assert len(lines) == 2 + len(first_step.MODELS)
    assert len({cells(line) for line in lines}) == 1
    assert "| mlp | 2.0 (1.0) | 1.00 (1.00) | 1.00 (1.00) | 1.50 (1.00) |" in lines[2]


def test_what_grows_with_stages_is_counted():
    timed = wide.on_paper(4, 8)
    assert list(timed) == ["built", "validated", "simulated", "written", "read"]
    command = [sys.executable, "-m", "benchmarks.overhead.wide", "--size", "2,2,4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["instructions"] > row["programs"] > 0
