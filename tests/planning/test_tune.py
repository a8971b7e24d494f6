"""`jpipe.tune`: the plan is the fastest of steps that ran, and computes the same."""

import re
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

TX = optax.adam(1e-2)
# Two families of schedules; one size of micro-batches.
FEW = {"schedules": ("1f1b", "zb_h1"), "num_microbatches": 4, "data": 1, "rounds": 1}


def blocks(dtype=jnp.float32):
    return [ref.dense(16, dtype), jnp.tanh, ref.dense(16, dtype), ref.dense(4, dtype)]


def tune(layers, x, targets, **options):
    devices = jax.devices()[:2]
    given = {"devices": devices, **FEW, **options}
    return jpipe.tune(layers, x, targets, ref.mse, TX, **given)


def most_bytes(report):
    """The bytes of the fullest device, with the workspace of its programs."""
    needed = []
    for device, peak in report.peak_bytes:
        programs = [x for x in report.programs if x.device == device]
        needed.append(peak + max(x.workspace_bytes for x in programs))
    return max(needed)


def split_evenly(layers, balance, num_microbatches, remat):
    return jpipe.pipeline(
        layers,
        num_microbatches,
        balance=balance,
        devices=jax.devices()[:2],
        schedule="1f1b",
        remat=remat,
    )


def needed_bytes(pipe, x, targets):
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    return most_bytes(pipe.train_step(ref.mse, TX).compile(state, x, targets))


def test_a_tuned_pipeline_computes_what_one_device_does(double):
    layers = blocks(jnp.float64)
    x, targets = ref.regression(8, dtype=jnp.float64)
    plan = tune(layers, x, targets)
    pipe = jpipe.pipeline(layers, plan=plan)
    assert pipe.schedule == plan.schedule
    assert pipe.plan.remat == plan.remat
    ref.compare(pipe, layers, x, targets, ref.FLOAT64)


def test_the_table_has_all_that_ran_with_the_even_split_and_the_fastest_first():
    """A schedule of as many actions is tried, whatever they take."""

    def forwards_first(num_ranks, num_microbatches):
        return jpipe.schedules.gpipe(num_ranks, num_microbatches)

    schedules = ("1f1b", forwards_first)
    plan = tune(blocks(), *ref.regression(8), schedules=schedules)
    trials = plan.forecast.trials
    assert len(trials) > 1
    texts = [trial.text for trial in trials]
    assert "1f1b, balance [2, 2], 4 micro-batches, remat min_cut" in texts
    seconds = [trial.seconds for trial in trials]
    assert seconds == sorted(seconds)
    assert all(trial.num_bytes > 0 and not trial.outcome for trial in trials)
    assert texts[0].startswith(f"{plan.schedule.name}, balance {plan.balance}, ")
    text = str(plan)
    assert re.search(r"tried +predicted +fullest device +measured", text)
    assert all(listed in text for listed in texts)
    (measured,) = [x for x in plan.forecast.reasons if x.startswith("measured: ")]
    assert " a step, the median of " in measured
    assert " in the fullest device, with the workspace of its programs" in measured
    assert not any(x.startswith("on paper") for x in plan.forecast.reasons)
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    # A pipeline of the plan prints the table too, and its step needs these bytes.
    pipe = jpipe.pipeline(blocks(), plan=plan)
    assert texts[0] in str(pipe)
    x, targets = ref.regression(8)
    assert trials[0].num_bytes == needed_bytes(pipe, x, targets)


def test_where_nothing_fits_the_error_has_what_each_step_needs():
    """Once a schedule was compiled, others of its kind are known to need too much."""
    layers = [*(ref.dense(64) for _ in range(4)), ref.dense(4)]
    with pytest.raises(ValueError, match=r"no step fits as it is compiled:") as error:
        tune(layers, *ref.regression(512), memory_limit=1000)
    listed = re.findall(r"(\w+), balance .* needs ", str(error.value))
    assert listed == ["1f1b", "1f1b", "zb_h1"]


def test_where_the_even_split_does_not_fit_one_that_stores_less_is_tried():
    """It has both large layers in one stage; other plans have one in each."""
    wide = [ref.dense(256), ref.dense(256), ref.dense(256)]
    layers = [*wide, jnp.tanh, jnp.tanh, ref.dense(4)]
    x, targets = ref.regression(16)
    even_split = split_evenly(layers, [3, 3], 4, "min_cut")
    even_bytes = needed_bytes(even_split, x, targets)
    plan = tune(layers, x, targets, memory_limit=even_bytes - 1)
    trials = {trial.text: trial for trial in plan.forecast.trials}
    even = trials["1f1b, balance [3, 3], 4 micro-batches, remat min_cut"]
    assert even.num_bytes == even_bytes
    assert even.seconds is None
    assert even.outcome == "does not fit: 1 B more than a device has"
    # With less that is stored it was tried too.
    assert "1f1b, balance [3, 3], 4 micro-batches, remat full" in trials
    for trial in plan.forecast.trials:
        is_dropped = trial.num_bytes >= even_bytes
        assert is_dropped == (trial.seconds is None)
        assert is_dropped == trial.outcome.startswith("does not fit: ")
    # The forecast has the bytes that it needs as it is compiled.
    (best, *_) = plan.forecast.trials
    assert max(x.total for x in plan.forecast.memory) == best.num_bytes < even_bytes


def test_an_even_split_that_fits_in_no_mode_is_tried_in_more_microbatches():
    layers = [*(ref.dense(64) for _ in range(4)), ref.dense(4)]
    x, targets = ref.regression(512)
    even_split = split_evenly(layers, [2, 3], 8, "full")
    limit = needed_bytes(even_split, x, targets) - 1
    plan = tune(
        layers,
        x,
        targets,
        memory_limit=limit,
        schedules="1f1b",
        num_microbatches=(8, 32),
    )
    trials = {trial.text: trial for trial in plan.forecast.trials}
    split = "1f1b, balance [2, 3]"
    assert trials[f"{split}, 8 micro-batches, remat min_cut"].seconds is None
    assert trials[f"{split}, 32 micro-batches, remat full"].seconds
    assert f"{split}, 32 micro-batches, remat min_cut" not in trials


def test_later_steps_are_planned_with_the_times_of_earlier_ones():
    """By its jaxpr the first layer has no work; it takes nearly all of the time."""

    def wait(x):
        time.sleep(0.01)
        return x

    def slow(x):
        read = jax.lax.stop_gradient(x)
        return x + jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), read)

    layers = [slow, *(ref.dense(16) for _ in range(4)), ref.dense(4)]
    plan = tune(layers, *ref.regression(8), schedules="1f1b")
    texts = [trial.text for trial in plan.forecast.trials]
    assert any("balance [3, 3]" in text for text in texts)
    assert any(re.search(r"balance \[[12], [45]\]", text) for text in texts)


def test_an_interrupt_returns_the_fastest_so_far():
    """Control-C when the second step is traced: the even split has run."""
    has_run = False

    def note_run(x):
        nonlocal has_run
        has_run = True
        return x

    def noted(x):
        read = jax.lax.stop_gradient(x)
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(note_run, spec, read)

    def loss_fn(outputs, targets):
        if has_run:
            raise KeyboardInterrupt
        return ref.mse(outputs, targets)

    layers = [noted, *blocks()]
    x, targets = ref.regression(8)
    options = {**FEW, "devices": jax.devices()[:2], "schedules": None}
    plan = jpipe.tune(layers, x, targets, loss_fn, TX, **options)
    assert any(x.startswith("interrupted: ") for x in plan.forecast.reasons)
    best, *_ = plan.forecast.trials
    assert best.text == "1f1b, balance [2, 3], 4 micro-batches, remat min_cut"
    assert best.seconds is not None
    # Before any step ran there is nothing to return.
    assert has_run
    with pytest.raises(KeyboardInterrupt):
        jpipe.tune(layers, x, targets, loss_fn, TX, **options)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(3):
            x = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(4)(x)


def test_a_model_is_tuned_in_sections():
    model = Classifier()
    x, targets = ref.regression(8)
    plan = tune(model, x, targets)
    pipe = jpipe.pipeline(model, plan=plan)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    _, metrics = pipe.train_step(ref.mse, TX)(state, x, targets)
    variables = model.init(jax.random.key(0), x)
    expected = ref.mse(model.apply(variables, x), targets)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_what_cannot_be_run_is_refused():
    x, targets = ref.regression(8)
    specs = jax.eval_shape(lambda: x)
    with pytest.raises(TypeError, match=r"values of x and targets; .* jpipe\.plan\("):
        tune(blocks(), specs, targets)
    with pytest.raises(ValueError, match="rounds=0: needs an int of at least 1; sched"):
        tune(blocks(), x, targets, rounds=0, schedules="2f2b")


def test_the_steps_that_run_have_all_options_of_the_train_step():
    """Without one of them no step runs, or it needs other bytes."""

    def scale(inputs):
        x, scales = inputs
        return x * scales

    def loss_fn(outputs, targets):
        expected, weights = targets
        return jnp.mean(weights * (outputs - expected) ** 2), outputs.sum()

    layers = [scale, *blocks()]
    x, expected = ref.regression(8)
    inputs = x, jnp.ones(5)
    targets = expected, jnp.ones(4)
    axes = {"in_axes": (0, None), "target_axes": (0, None)}
    options = {"has_aux": True, "reduction": "batch", "trainable": "1/*"}
    given = {**FEW, **options, **axes, "devices": jax.devices()[:2]}
    given["schedules"] = "gpipe"
    plan = jpipe.tune(layers, inputs, targets, loss_fn, TX, **given)
    pipe = jpipe.pipeline(layers, plan=plan, **axes)
    state = pipe.init_train_state(jax.random.key(0), inputs, TX, trainable="1/*")
    report = pipe.train_step(loss_fn, TX, **options).compile(state, inputs, targets)
    assert plan.forecast.trials[0].num_bytes == most_bytes(report)
