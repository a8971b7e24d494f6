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
from benchmarks.overhead import by_hand, compiling, one_stage, wide
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


def test_the_sides_of_compiling_train_the_same_blocks(monkeypatch):
    monkeypatch.setattr(compiling, "WIDTH", 8)
    blocks = [[compiling.Block(8, heads)] for heads in (1, 2)]
    sizes = []
    for make in compiling.SIDES.values():
        step, state = make(blocks)
        before = [leaf.shape for leaf in jax.tree.leaves(state)]
        after = step(state, compiling._batch())
        assert [leaf.shape for leaf in jax.tree.leaves(after)] == before
        state = after
        params = state.params if hasattr(state, "params") else state[0]
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(params)))
    assert sizes[0] == sizes[1]


def test_a_table_of_compiling_has_a_cell_under_every_heading(monkeypatch):
    def run(module, words):
        return {"first_s": 2.0 + (words[1] == "jpipe"), "again_s": 1.0}

    monkeypatch.setattr(overhead, "one_process", run)
    result = {"provenance": overhead.provenance()}
    lines = overhead.tables(result | {"compiling": overhead.compile_costs(3)})
    lines = lines.splitlines()[2:]
    assert len(lines) == 4
    assert len({cells(line) for line in lines}) == 1
    assert "| **1.50** | 1.50 to 1.50 |" in lines[2]


def test_what_grows_with_stages_is_counted():
    timed = wide.on_paper(4, 8)
    assert list(timed) == ["built", "validated", "simulated", "written", "read"]
    command = [sys.executable, "-m", "benchmarks.overhead.wide", "--size", "2,2,4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["instructions"] > row["programs"] > 0
