"""What a plan holds: as its instructions say, as the optimizer does, under a limit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..listing import program_of
from .models import MODELS, SAMPLE, X, dense

KIB = 1 << 10
KEEPING = [
    (lambda: dense(5), SAMPLE, "zb_v", "full", 1),
    (MODELS["skips"].layers, X, "1f1b", "dots", 2),
]


@pytest.mark.parametrize(("made", "sample", "schedule", "remat", "data"), KEEPING)
def test_the_bytes_of_a_plan_are_those_of_its_instructions(
    made, sample, schedule, remat, data
):
    """Parameters, gradients and activations."""
    plan = jpipe.plan(
        made(),
        sample,
        optax.sgd(0.1),
        num_devices=2 * data,
        data=data,
        num_microbatches=4,
        measure=False,
        action_seconds=0.0,
        schedules=schedule,
        remat=remat,
    )
    pipe = jpipe.pipeline(made(), plan=plan)
    x = jax.random.normal(jax.random.key(0), sample.shape)
    state = pipe.init_train_state(jax.random.key(1), x, optax.sgd(0.1))
    targets = jnp.ones(sample.shape[0])
    step = pipe.train_step(lambda y, t: y.mean() - t.mean(), optax.sgd(0.1))
    program_of(step, state, x, targets)  # which says what is held, and need not run
    stages = step.plan.stages
    params = [sum(s.param_bytes for s in stages if s.rank == r) for r in (0, 1)]
    assert [memory.gradients for memory in plan.forecast.memory] == params
    held = [stage.residual_bytes for stage in stages]
    # The pipeline has a loss, whose residuals are a few numbers.
    assert [s.residual_bytes for s in plan.stages] == pytest.approx(held, abs=64)
    for said, own in zip(plan.stages, stages, strict=True):
        # Neither has the last stage of the other, where a forward has its own program.
        assert said.residuals.keys() == own.residuals.keys()
        assert list(said.residuals.values()) == pytest.approx(
            [*own.residuals.values()], abs=64
        )
        assert (
            said.recomputed_flops == own.recomputed_flops
            or said.index == len(stages) - 1
        )
    for (_, peak), memory in zip(
        step.plan.peak_bytes, plan.forecast.memory, strict=True
    ):
        held = memory.parameters + memory.gradients + memory.activations
        # Beside these: the mini-batch, its targets, losses, keys.
        assert held == pytest.approx(peak, abs=512)


def test_gradients_that_devices_add_up_stand_beside_their_sums():
    given = dense(5), SAMPLE, optax.sgd(0.1)
    options = {"num_devices": 4, "data": 2, "schedules": "1f1b", "remat": "full"}
    options |= {"num_microbatches": 4, "measure": False, "action_seconds": 0.0}
    plan = jpipe.plan(*given, **options)
    for memory in plan.forecast.memory:
        # That little is gone at the end, when the totals are there.
        assert memory.activations < memory.gradients / 4
        assert memory.total >= memory.parameters + 2 * memory.gradients - 64
    # Half of the parameters three times, which no partition makes less.
    limit = 3 * sum(memory.parameters for memory in plan.forecast.memory) // 2 - 256
    with pytest.raises(ValueError, match="no plan fits"):
        jpipe.plan(*given, memory_limit=limit, **options)


def test_a_plan_fits_into_the_bytes_that_it_holds():
    """Layers store less in a stage than each by itself: one's output is another's."""
    layers = [nn.Dense(64), nn.tanh] * 4
    options = {"num_devices": 2, "num_microbatches": 4, "data": 1, "measure": False}
    options |= {"schedules": "gpipe", "balance": (4, 4), "bandwidth": 1e9}
    given = layers, jnp.ones((256, 64)), optax.sgd(0.1)
    free = jpipe.plan(*given, **options)
    assert free.remat == ["min_cut", "min_cut"]
    limit = max(memory.total for memory in free.forecast.memory)
    assert jpipe.plan(*given, memory_limit=limit, **options).remat == free.remat


def labels(params):
    """By depth: the first layer's parameters, and those of the others."""
    return tuple(
        jax.tree.map(lambda _, i=i: "first" if i == 0 else "rest", entry)
        for i, entry in enumerate(params)
    )


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "several": optax.multi_transform(
        {"first": optax.sgd(0.1), "rest": optax.adam(1e-3)}, labels
    ),
}


@pytest.mark.parametrize(
    ("name", "trainable"),
    [*((name, None) for name in OPTIMIZERS), ("several", "1/*")],
)
def test_the_optimizer_is_counted_as_a_train_step_spreads_it(name, trainable):
    tx, sample = OPTIMIZERS[name], jax.ShapeDtypeStruct((8, 5), jnp.int32)
    tied = nn.Embed(30, 8)
    layers = [tied, ref.Residual(8), ref.Residual(8), jpipe.layer(tied, "attend")]
    plan = jpipe.plan(
        layers,
        sample,
        tx,
        num_devices=2,
        data=1,
        num_microbatches=2,
        measure=False,
        action_seconds=0.0,
        schedules="1f1b",
        trainable=trainable,
    )
    assert plan.schedule.num_ranks == 2
    pipe = jpipe.pipeline(layers, plan=plan)
    x = jnp.zeros(sample.shape, sample.dtype)
    options = {} if trainable is None else {"trainable": trainable}
    state = pipe.init_train_state(jax.random.key(0), x, tx, **options)
    held = dict.fromkeys(jax.devices()[:2], 0)
    for leaf in jax.tree.leaves(state.opt_state):
        held[leaf.device] += leaf.nbytes
    assert [memory.optimizer for memory in plan.forecast.memory] == [*held.values()]


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state():
    given = [nn.Dense(6), nn.tanh, nn.Dense(100), nn.Dense(1)], SAMPLE, optax.adam(1e-3)
    # 700 parameters, as many gradients, two moments and a counter.
    says = r"(?s)no plan fits.*parameters 2\.7 KiB, gradients 2\.7 KiB, optimizer 5\.5"
    with pytest.raises(ValueError, match=says):
        jpipe.plan(
            *given, num_devices=4, memory_limit=10 * KIB, measure=False, balance=[1] * 4
        )
    jpipe.plan(
        *given,
        num_devices=2,
        memory_limit=10 * KIB,
        measure=False,
        trainable="3/*",
        schedules="1f1b",
        num_microbatches=2,
    )
