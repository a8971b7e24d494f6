"""Models and loss functions over meshes and replicas, against plain JAX."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref
from ..mesh.stages import mesh
from ..slow import slow, slow_except
from .test_unchanged_models import KEY, TX, case_of, two_steps

pytestmark = [
    pytest.mark.usefixtures("double"),
    # Flax's own norm of nnx writes statistics of double precision into single ones.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible"),
]


def fully_sharded(path, leaf):
    """The first axis that two devices divide, over those of the examples."""
    even = [axis for axis, size in enumerate(leaf.shape) if size % 2 == 0]
    return P(*[None] * even[0], "data") if even else None


def megatron(path, leaf):
    """Products in the blocks, cut across their inner axis."""
    across = {"Dense_0": P(None, "model"), "Dense_1": P("model")}
    is_inner = len(path) > 2 and path[-1] == "kernel"
    return across.get(path[-2]) if is_inner else None


ROWS = {
    "examples are spread": ("resnet", {"mesh": (2, 2)}),
    "one micro-batch": ("resnet", {"mesh": (2, 2), "num_microbatches": 1}),
    "parameters are spread too": ("gpt", {"mesh": (2, 2), "sharding": fully_sharded}),
    "parameters are gathered each time": (
        "gpt with a mask",
        {"mesh": (2, 2), "sharding": fully_sharded, "gather": "microbatch"},
    ),
    "products are spread": ("vit", {"mesh": (2, 2, 2), "sharding": megatron}),
    "of nnx": ("nnx cnn", {"mesh": (2, 2), "sharding": fully_sharded}),
    "ranks take turns": ("resnet", {"replicas": [1, 2]}),
    "ranks take turns at the first": ("albert", {"replicas": [2, 1]}),
    "ranks with meshes take turns": ("bert", {"replicas": [1, 2], "mesh": (3, 2)}),
}


# The others differ from these in where, and on which model; lists hold replicas.
QUICK = {
    "examples are spread",
    "parameters are gathered each time",
    "products are spread",
}


@pytest.mark.parametrize("row", slow_except(QUICK, ROWS))
def test_two_steps_on_meshes_and_replicas_are_those_of_one_device(row):
    name, options = ROWS[row]
    case, options = case_of(name), {"num_microbatches": 2} | options
    parts = options["num_microbatches"]
    if "mesh" in options:
        options |= {"mesh": mesh(*options["mesh"])}
        parts *= 2
    pipe = jpipe.pipeline(case.model, num_stages=2, **options, **case.axes)
    variables = pipe.init(KEY, case.x)
    alone = jpipe.pipeline(case.model, 2, num_stages=2, **case.axes)
    ref.assert_equal(variables, alone.init(KEY, case.x))
    state = two_steps(name, pipe, variables, parts)
    if "sharding" in options:
        cut = [not x.is_fully_replicated for x in jax.tree.leaves(state.params)]
        momenta = [not x.is_fully_replicated for x in jax.tree.leaves(state.opt_state)]
        assert sum(cut) > 1
        assert sum(momenta) == 2 * sum(cut)
    ref.assert_close(
        pipe.apply(state.variables, case.x),
        alone.apply(alone.place(state.variables, case.x), case.x),
        case.close,
    )
    placed = pipe.place(jax.device_get(state))
    for one, other in zip(*map(jax.tree.leaves, (placed, state)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_a_loss_of_one_micro_batch_is_checked_in_shards():
    x, targets = np.ones((8, 6)), np.ones((8, 3))
    pipe = jpipe.pipeline(ref.dense(3, float), 1, mesh=mesh(1, 2))
    variables = pipe.init(KEY, x)
    assert pipe.value_and_grad(ref.mse)(variables, x, targets)
    with pytest.raises(ValueError, match="for a sum over examples type reduction"):
        pipe.value_and_grad(lambda y, t: ((y - t) ** 2).sum())(variables, x, targets)


def loss_fn(params, x, targets, key):
    """With a penalty, a product of parameters alone, a mean in aux, and a dropout."""
    kept = jax.random.bernoulli(key, 0.5, (len(x), 8))
    h = jnp.tanh(x @ (params["a"] @ params["b"])) * kept
    total = jnp.sum((h @ params["c"] - targets) ** 2)
    return total + 0.1 * jnp.sum(params["c"] ** 2), {"mean": h.mean(), "h": h}


def quarters(x):
    return x.reshape(4, 2, -1)


@pytest.mark.parametrize("sharding", [slow(None), fully_sharded])
def test_gradients_of_a_loss_function_on_a_mesh_are_those_of_one_device(sharding):
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 2), "b": (2, 8), "c": (8, 4)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, targets, key = rng.normal(size=(8, 6)), rng.normal(size=(8, 4)), KEY
    grad_fn = jpipe.value_and_grad(
        loss_fn,
        2,
        num_stages=2,
        mesh=mesh(2, 2),
        sharding=sharding,
        has_aux=True,
        aux_axes={"mean": jpipe.MEAN, "h": 0},
        in_axes=(0, 0, None),
        reduction="sum",
    )
    placed = grad_fn.place(params, x, targets, key)
    (loss, aux), grads = grad_fn(placed, x, targets, key)

    def by_hand(params):
        parts = [
            loss_fn(params, *part, jpipe.microbatch_key(key, m))
            for m, part in enumerate(zip(*map(quarters, (x, targets)), strict=True))
        ]
        penalty = 0.1 * jnp.sum(params["c"] ** 2)
        loss = sum(loss for loss, _ in parts) - 3 * penalty
        h = jnp.concatenate([aux["h"] for _, aux in parts])
        return loss, {"mean": h.mean(), "h": h}

    expected = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(params)
    ref.assert_close(((loss, aux), grads), expected, ref.FLOAT64)
    cut = {name for name in params if not grads[name].is_fully_replicated}
    assert cut == ({"a", "b", "c"} if sharding else set())
    optimizer = grad_fn.optimizer(TX)
    updates, _ = optimizer.update(grads, optimizer.init(placed), placed)
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(placed[name].sharding, 2)


THEIRS = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(THEIRS, P(*spec)))


@jax.custom_vjp
def sine(x):
    return constrain(jnp.sin(x), "data")


def sine_forward(x):
    return constrain(jnp.sin(x), "data", "model"), x


def sine_backward(x, cotangent):
    return (constrain(cotangent * jnp.cos(x), "data"),)


sine.defvjp(sine_forward, sine_backward)


def constrained(params, x):
    """Constraints by themselves, and in all that may be around them."""
    x = constrain(x, "data", None)
    for w in params:
        x = jax.jit(lambda x, w: sine(constrain(x @ w, "data", "model")))(x, w)
        turn = jax.checkpoint(lambda x, _: (constrain(jnp.tanh(x), "data"), None))
        x, _ = jax.lax.scan(turn, x, None, length=2)
        branches = jnp.negative, lambda x: constrain(x, None, "model")
        x = jax.lax.cond(w.sum() > 0, *branches, x)
        x = jax.vmap(lambda row: constrain(row, "model"))(x)
        # JAX writes the sharding of what is constrained into the broadcasts.
        x = jnp.where(x > x.var(-1, keepdims=True), x, jnp.zeros_like(x) - 0.1)
    return constrain(jnp.mean(x**2))


PLACES = {
    "a device": (lambda: {}, ""),
    "data": (
        lambda: {"mesh": mesh(2, 2)},
        r"is left out, \d+ times: each stage runs on a mesh of its own, {'data': 2}",
    ),
    "model": (lambda: {"mesh": mesh(2, 2, names=("stage", "model"))}, ""),
    "data and model": (lambda: {"mesh": mesh(2, 2, 2)}, ""),
}


@pytest.mark.parametrize(
    "name", slow_except({"a device", "data", "data and model"}, PLACES)
)
def test_constraints_over_a_mesh_of_the_users_change_no_value(name, monkeypatch):
    """A model of MaxText, written for tensor parallelism, in stages without 'model'.

    Without the warning nobody would know that its activations are sharded no more.
    """
    options, says = PLACES[name]
    constraint, specs = jax.lax.with_sharding_constraint, []

    def recorded(x, sharding):
        theirs = getattr(sharding, "mesh", None) is THEIRS
        specs.extend([] if theirs else [getattr(sharding, "spec", sharding)])
        return constraint(x, sharding)

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", recorded)
    rng = np.random.default_rng(0)
    params, x = list(rng.normal(size=(4, 6, 6))), rng.normal(size=(8, 6))
    expected = jax.jit(jax.value_and_grad(constrained))(params, x)
    grad_fn = jpipe.value_and_grad(constrained, 2, num_stages=2, **options())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = grad_fn(grad_fn.place(params, x), x)
        assert grad_fn.check(params, x)
        shorter = x[:6] if name == "a device" else x[:4]  # compiled once more
        grad_fn(grad_fn.place(params, shorter), shorter)
    ref.assert_close(found, expected, ref.FLOAT64)
    assert len(caught) == bool(says)
    assert all(re.search(says, str(one.message)) for one in caught)
    assert (P(None, "model") in specs) == ("model" in name)


class Annotated(nn.Module):
    """Parameters and activations that are annotated as for the mesh of a user."""

    @nn.compact
    def __call__(self, x):
        rules = ("batch", "data"), ("hidden", "model")
        init = nn.with_partitioning(
            nn.initializers.lecun_normal(), (None, "model"), mesh=THEIRS
        )
        for _ in range(3):
            x = jnp.tanh(nn.Dense(6, kernel_init=init, param_dtype=float)(x))
            x = nn.with_logical_constraint(
                x, ("batch", "hidden"), rules=rules, mesh=THEIRS
            )
        return x


@pytest.mark.parametrize("name", slow_except({"a device", "data and model"}, PLACES))
def test_an_annotated_model_trains_as_it_is(name):
    rng, (options, says) = np.random.default_rng(0), PLACES[name]
    x, targets = rng.normal(size=(2, 8, 6))
    pipe = jpipe.pipeline(Annotated(), 2, num_stages=2, **options())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = pipe.init_train_state(KEY, x, optax.sgd(0.1))
        params = jax.device_get(state.params)
        step = pipe.train_step(ref.mse, optax.sgd(0.1))
        state, metrics = step(state, x, targets)
    assert len(caught) == bool(says)

    def loss(params):
        return ref.mse(Annotated().apply({"params": params}, x), targets)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    ref.assert_close(metrics["loss"], value, ref.FLOAT64)
    stepped = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads)
    ref.assert_close(state.params, stepped, ref.FLOAT64)


def test_stages_that_differ_in_a_constraint_alone_are_different_programs(monkeypatch):
    """Of four layers the third is constrained along another axis than the second."""
    constraint, axes_of_stages = jax.lax.with_sharding_constraint, set()

    def recorded(x, sharding):
        if sharding.mesh is not THEIRS:
            axes_of_stages.add(tuple(sharding.spec))
        return constraint(x, sharding)

    def loss(params, x):
        for i, w in enumerate(params):
            axes = ("model",) if i == 2 else (None, "model")
            x = jpipe.boundary(x) if i else x
            x = jnp.tanh(constrain(x @ w, *axes))
        return jnp.mean(x**2)

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", recorded)
    rng = np.random.default_rng(0)
    params, x = list(rng.normal(size=(4, 6, 6))), rng.normal(size=(8, 6))
    options = {"mesh": mesh(4, 2, names=("stage", "model")), "num_stages": 4}
    grad_fn = jpipe.value_and_grad(loss, 2, **options)
    grad_fn(grad_fn.place(params, x), x)
    assert axes_of_stages == {(None, "model"), ("model",)}
