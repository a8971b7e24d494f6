"""A step with a NaN or Inf in loss or gradients changes nothing, in any stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..processes import jobs
from ..processes.skipping import layers, spoil

KEY = jax.random.key(0)
X, TARGETS = ref.regression(16)
SPOILED = X.at[3].set(1e4)


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return jnp.tanh(nn.Dense(8)(h)), None


class Scanned(nn.Module):
    """Six layers in one parameter, which four stages do not share evenly."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=6
        )
        h, _ = scan()(spoil(nn.Dense(8)(x)), None)
        return nn.Dense(4)(h)


def on_a_mesh():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")
    )
    return jpipe.pipeline(layers(), 4, balance=[4, 4], mesh=mesh)


PIPELINES = {
    "stages": lambda: jpipe.pipeline(layers(), 4, balance=[2, 3, 3]),
    "mesh": on_a_mesh,
    "pieces": lambda: jpipe.pipeline(Scanned(), 2, num_stages=4),
    "sequential": lambda: jpipe.sequential(layers(), 2),
}
OPTIMIZERS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "noisy sgd": optax.noisy_sgd(1e-2, key=1),
    "ema": optax.chain(optax.sgd(1e-2, momentum=0.9), optax.ema(0.9)),
}


def bits(tree):
    """The bytes of each leaf: a NaN equals itself, and -0.0 is not 0.0."""
    flat = jax.tree_util.tree_leaves_with_path(ref.on_host(tree))
    return {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in flat}


@pytest.mark.parametrize(
    ("pipeline", "optimizer"),
    [
        *((name, "clipped adamw") for name in PIPELINES),
        *(("stages", name) for name in ("noisy sgd", "ema")),
    ],
)
def test_a_step_that_is_not_finite_leaves_all_to_the_bit(quick, pipeline, optimizer):
    """Though one gradient of the first stage alone is not; the step is counted.

    Steps that are finite are those without the option. The new state of a spoiled one
    may be trained on.
    """
    pipe = PIPELINES[pipeline]()
    tx = OPTIMIZERS[optimizer]
    state = pipe.init_train_state(KEY, X, tx)
    plain = pipe.train_step(ref.mse, tx, donate=False)
    step = pipe.train_step(ref.mse, tx, skip_nonfinite=True)

    expected, metrics = plain(state, X, TARGETS)
    state, skipping = step(state, X, TARGETS)
    assert bits(state) == bits(expected)
    assert bits(skipping.pop("skipped")) == bits(np.int32(0))
    assert bits(skipping) == bits(metrics)

    before = bits(state.replace(step=state.step + 1))
    state, skipping = step(state, SPOILED, TARGETS)
    assert bits(state) == before
    assert int(skipping["skipped"]) == 1
    assert np.isfinite(float(skipping["loss"]))
    spoiled, _ = plain(expected, SPOILED, TARGETS)
    changed = {path for path, value in bits(spoiled).items() if value != before[path]}
    assert any("batch_stats" in path for path in changed) == (pipeline != "pieces")

    expected, _ = plain(expected.replace(step=state.step), X, TARGETS)
    state, skipping = step(state, X, TARGETS)
    assert bits(state) == bits(expected)
    assert int(skipping["skipped"]) == 0


def test_frozen_parameters_and_aux_are_as_without_it(quick):
    pipe = PIPELINES["stages"]()
    options = {"trainable": lambda path, _: path[0] != 0, "has_aux": True}
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(KEY, X, tx, trainable=options["trainable"])
    step = pipe.train_step(
        lambda y, t: (ref.mse(y, t), y), tx, skip_nonfinite=True, **options
    )
    kernel = bits(state.params[0])
    state, metrics = step(state, SPOILED, TARGETS)  # its gradient is not computed
    assert int(metrics["skipped"]) == 0
    assert metrics["aux"].shape == (4, 4, 4)
    state, metrics = step(state, X, TARGETS.at[0].set(jnp.nan))
    assert int(metrics["skipped"]) == 1
    assert bits(state.params[0]) == kernel


def masked_mean(y, targets):
    """The total and the weight of a loss of examples with a target that is not 0."""
    is_counted = targets[:, 0] != 0
    return jnp.sum(jnp.mean((y - targets) ** 2, 1) * is_counted), jnp.sum(is_counted)


def test_a_step_without_any_weight_is_skipped(quick):
    """Its loss is NaN; its gradients may be 0, as XLA multiplies by a mask."""
    tx = optax.adamw(1e-2)
    pipe = jpipe.pipeline([nn.Dense(8), jnp.tanh, nn.Dense(4)], 4, balance=[2, 1])
    state = pipe.init_train_state(KEY, X, tx)
    options = {"reduction": "weighted", "skip_nonfinite": True, "donate": False}
    step = pipe.train_step(masked_mean, tx, **options)
    state, metrics = step(state, X, TARGETS)
    assert int(metrics["skipped"]) == 0
    after, metrics = step(state, X, 0 * TARGETS)
    assert int(metrics["skipped"]) == 1
    assert bits(after.params) == bits(state.params)
    assert bits(after.opt_state) == bits(state.opt_state)


def test_a_model_without_parameters_has_nothing_to_skip(quick):
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([jnp.sin], 2)
    with pytest.warns(UserWarning, match="nothing here has parameters"):
        state = pipe.init_train_state(KEY, X, tx)
    step = pipe.train_step(lambda y, t: jnp.mean(y), tx, skip_nonfinite=True)
    _, metrics = step(state, X, TARGETS)
    assert int(metrics["skipped"]) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_takes_no_more_memory(optimizer):
    """Each new leaf is written over its old one, as without it."""
    wide = [ref.dense(64), jnp.tanh, ref.dense(64), jnp.tanh, ref.dense(64)]
    pipe = jpipe.pipeline([*wide, ref.dense(4)], 2, balance=[2, 2, 2])
    tx = OPTIMIZERS[optimizer]
    state = pipe.init_train_state(KEY, X, tx)
    peaks = list[list[int]]()
    workspaces = list[int]()
    for skip_nonfinite in (False, True):
        step = pipe.train_step(ref.mse, tx, skip_nonfinite=skip_nonfinite)
        report = step.compile(state, X, TARGETS)
        peaks.append([nbytes for _, nbytes in report.peak_bytes])
        updates = [x for x in report.programs if "optimizer_update" in x.name]
        workspaces.append(max(x.workspace_bytes or 0 for x in updates))
    flags_and_copies = 8 * 2
    for plain, skipping in zip(*peaks, strict=True):
        assert skipping <= plain + flags_and_copies
    assert workspaces[1] < workspaces[0] + 1024


@pytest.mark.slow
def test_two_processes_skip_the_same_steps():
    printed = [jobs.run(count, "skipping", "2") for count in (1, 2)]
    for outcome in printed:
        assert (outcome.status, outcome.left) == (0, []), str(outcome)
    alone = printed[0].of(0)
    assert "skipped [0, 1, 0]" in alone
    assert alone == printed[1].of(0) == printed[1].of(1)
