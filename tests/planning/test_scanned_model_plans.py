"""Plans and profiles of models that scan over their layers.

Each iteration of a scan is a section of the model; the plan has the pieces of stacked
parameters that stages hold.
"""

import collections
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..models import scanned_models as scanned
from ..models import small_models as models
from ..slow import slow

pytestmark = pytest.mark.usefixtures("double")

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, models.VOCAB, (8, 6))
X = np.random.default_rng(1).normal(size=(8, models.WIDTH))
OPTIONS: dict[str, Any] = {
    "num_devices": 4,
    "num_microbatches": 4,
    "data": 1,
    "schedules": "1f1b",
    "measure": False,
    "action_seconds": 0.0,
}


def cross_entropy(logits: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def decoder(num_layers: int) -> Any:
    return scanned.Decoder(rate=0.0, layers=num_layers)


def make_plan(model: Any, tx: Any = None, **options: Any) -> Any:
    """The plan of a model of tokens, saved and loaded."""
    plan = jpipe.plan(
        model,
        TOKENS,
        optax.adam(1e-2) if tx is None else tx,
        loss_fn=cross_entropy,
        targets=TOKENS,
        **{**OPTIONS, **options},
    )
    loaded = jpipe.Plan.from_json(plan.to_json())
    assert loaded == plan
    return loaded


def compute_plainly(model: Any, params: Any) -> Any:
    """The loss and the gradients without jpipe."""

    def loss(params: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, TOKENS), TOKENS)

    return jax.jit(jax.value_and_grad(loss))(params)


def sizes_of_pieces(plan: Any) -> set[Any]:
    """The sizes of the pieces in which parameters are."""
    return {pieces.sizes for pieces in plan.cuts.division.params.values()}


def bytes_by_device(tree: Any) -> dict[Any, int]:
    """The bytes of all arrays on each device."""
    held = collections.Counter[Any]()
    for leaf in jax.tree.leaves(tree):
        for array in getattr(leaf, "arrays", [leaf]):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
    return dict(held)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(8, (3, 2, 2, 1)), (7, (2, 2, 2, 1))]
)
def test_a_plan_of_a_scanned_model_is_built(
    num_layers: int, sizes: tuple[int, ...]
) -> None:
    """The last stage has the head, which is worth half of a layer."""
    model = decoder(num_layers)
    plan = make_plan(model)
    assert sizes_of_pieces(plan) == {sizes}
    assert plan.balance == [*sizes[:-1], 2]

    pipe = jpipe.pipeline(model, plan=plan)
    variables = pipe.init(KEY, TOKENS)
    params = jax.tree.map(np.asarray, variables["params"])
    grads = pipe.value_and_grad(cross_entropy)
    found = grads(variables, TOKENS, TOKENS, rngs=KEY)
    expected = compute_plainly(model, params)
    ref.assert_close(jax.tree.map(np.asarray, found), expected, ref.FLOAT64, 1.0)
    assert pipe.plan.cuts == plan.cuts
    # What runs holds what the plan says that it does.
    assert [num_bytes for _, num_bytes in grads.plan.peak_bytes] == [
        memory.parameters + memory.gradients + memory.activations
        for memory in plan.forecast.memory
    ]


def test_a_loss_function_is_divided_by_the_plan_of_its_model() -> None:
    model = decoder(7)
    plan = make_plan(model)

    def loss(params: Any, tokens: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, tokens), tokens)

    params = jax.jit(model.init)(KEY, TOKENS)["params"]
    grad_fn = jpipe.value_and_grad(loss, plan=plan)
    found = grad_fn(grad_fn.place(params, TOKENS), TOKENS)
    expected = compute_plainly(model, params)
    ref.assert_close(jax.tree.map(np.asarray, found), expected, ref.FLOAT64, 1.0)
    assert grad_fn.plan.cuts == plan.cuts


def test_iterations_are_sections_with_the_costs_of_their_equals() -> None:
    profile = jpipe.profile(
        decoder(6), TOKENS, loss_fn=cross_entropy, targets=TOKENS, measure=False
    )
    iterations = profile.layers[:6]
    assert [x.name for x in iterations] == [f"layer {i}" for i in range(6)]
    # The first one has the embedding too.
    assert len({(x.forward, x.backward, x.num_params) for x in iterations[1:]}) == 1
    shapes = jax.eval_shape(decoder(6).init, KEY, TOKENS)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert sum(x.num_params for x in profile.layers) == num_params


@pytest.mark.slow
def test_equal_iterations_are_measured_once() -> None:
    profile = jpipe.profile(
        decoder(6), TOKENS, loss_fn=cross_entropy, targets=TOKENS, rounds=1
    )
    times = {(x.forward, x.backward) for x in profile.layers[1:6]}
    assert len(times) == 1
    plan = jpipe.plan(
        decoder(6),
        TOKENS,
        optax.sgd(0.1),
        num_devices=2,
        loss_fn=cross_entropy,
        targets=TOKENS,
        profile=profile,
    )
    assert sum(plan.balance) == len(profile.layers)


def test_a_balance_counts_iterations() -> None:
    model = decoder(8)
    plan = make_plan(model, num_devices=2, balance=[2, 7])
    assert plan.layer_names[0] == ["layers 0-1"]
    assert sizes_of_pieces(plan) == {(2, 6)}
    assert sizes_of_pieces(make_plan(model, num_devices=1, balance=[9])) == set()


# Of lists of layers it is quick: see `test_memory`.
@pytest.mark.slow
@pytest.mark.parametrize(
    "tx", [optax.adam(1e-2), optax.adafactor(1e-3, min_dim_size_to_factor=4)]
)
def test_the_optimizer_is_counted_as_a_train_step_spreads_it(tx: Any) -> None:
    model = decoder(7)
    plan = make_plan(model, tx)
    pipe = jpipe.pipeline(model, plan=plan)
    state = pipe.init_train_state(KEY, TOKENS, tx)
    held = bytes_by_device(state.opt_state)
    assert [memory.optimizer for memory in plan.forecast.memory] == [
        held.get(device, 0) for device in jax.devices()[:4]
    ]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return models.Feedforward()(x), None


class Normalized(nn.Module):
    """State beside the stacked layers."""

    @nn.compact
    def __call__(self, x, train=False):
        norm = nn.BatchNorm(
            use_running_average=not train,
            dtype=np.float64,
            param_dtype=np.float64,
        )
        scanned_layer = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=5
        )
        x, _ = scanned_layer(name="layers")(norm(x), None)
        return models.Dense(3)(x)


@pytest.mark.parametrize("is_planned", [True, slow(False)])
def test_plans_of_models_with_state_beside_a_scan(is_planned: bool) -> None:
    first = jpipe.pipeline(Normalized(), 2, num_stages=2)
    first.init(KEY, X)
    plan: Any = first.plan
    if is_planned:
        plan = jpipe.plan(
            Normalized(),
            X,
            optax.sgd(0.1),
            loss_fn=ref.mse,
            targets=np.ones((8, 3)),
            **{**OPTIONS, "num_devices": 2},
        )
    pipe = jpipe.pipeline(Normalized(), plan=plan)
    variables = pipe.init(KEY, X)
    assert len(pipe.plan.stages) == 2
    assert len(bytes_by_device(variables["params"]["layers"])) == 2
    found = pipe.apply(variables, X)
    expected = Normalized().apply(jax.tree.map(np.asarray, variables), X)
    ref.assert_close(found, expected, ref.FLOAT64)


def test_iterations_of_many_layers_are_joined_to_sections() -> None:
    """A section is no less than a part of what one of many stages computes."""
    profile = jpipe.profile(
        decoder(150), TOKENS, loss_fn=cross_entropy, targets=TOKENS, measure=False
    )
    assert 60 <= len(profile.layers) < 100
    assert profile.layers[1].name.startswith("layers ")
