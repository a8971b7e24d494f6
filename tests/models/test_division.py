"""What `print` tells of the work and the names of stages, and what is warned of."""

import itertools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(0), jnp.ones((4, 64))


def placed(function, params, num_stages=2):
    """A gradient that knows its stages, and what was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grad_fn = jpipe.value_and_grad(function, 2, num_stages=num_stages)
        grad_fn.place(params, X)
        grad_fn.place(params, X[:3])  # of another size: nothing is said again
    return grad_fn, [str(one.message) for one in caught]


def narrow(weights, x):
    for _ in range(4):
        x = jnp.tanh(x) * 1.1 + x
    return jnp.tanh(x @ weights["in"]) @ weights["out"]


def blocks(wrap):
    def loss(params, x):
        for weights in params["blocks"]:
            x = x + wrap(narrow)(weights, x)
        return (x @ params["head"]).mean()

    return loss


BLOCK = {"in": jnp.ones((64, 2)), "out": jnp.ones((2, 64))}
BLOCKS = {"blocks": [BLOCK] * 4, "head": jnp.ones((64, 1))}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_blocks_are_divided_alike_in_a_checkpoint(wrap):
    grad_fn, said = placed(blocks(wrap), BLOCKS)
    first, last = grad_fn.plan.stages
    assert not said
    assert first.num_params == 2 * 2 * 2 * 64
    assert last.num_params == 2 * 2 * 2 * 64 + 64
    assert first.work + last.work == pytest.approx(1)
    assert re.search(rf"work\n.* {first.work:.0%}\n.* {last.work:.0%}\n", str(grad_fn))
    again = jpipe.Plan.from_json(grad_fn.plan.to_json())
    assert again == grad_fn.plan


def multiply(params, x):
    for weights in params:
        x = x @ weights
    return x.mean()


def test_a_gap_is_compared_with_those_up_to_a_quarter_of_a_stage_away():
    """Gaps half a stage away, which fewer bytes cross, are no better."""
    widths = [64, 64, 62, 60, 58]
    params = [jnp.ones(shape) for shape in itertools.pairwise(widths)]

    grad_fn, said = placed(multiply, params)
    assert not said
    sizes = [leaf.size for leaf in params]
    num_params = [stage.num_params for stage in grad_fn.plan.stages]
    assert num_params == [sum(sizes[:2]), sum(sizes[2:])]


def test_the_number_of_stages_in_an_error_can_be_typed():
    """With fewer stages there are fewer candidates, and so there may be even fewer."""
    widths = [64, 64, *range(24, 6, -2)]
    params = [jnp.ones(shape) for shape in itertools.pairwise(widths)]
    devices = [jax.devices()[0]] * 32

    def place(num_stages):
        grad_fn = jpipe.value_and_grad(
            multiply, 2, num_stages=num_stages, devices=devices
        )
        grad_fn.place(params, X)
        return len(grad_fn.plan.stages)

    with pytest.raises(ValueError, match=r"num_stages=32: .* in 10 at most; type"):
        place(32)
    assert place(10) == 10
    assert place(None) == 10


def test_an_operation_of_more_than_a_stage_is_one_of_as_many_stages_as_typed():
    """It is a head that is half of the model, as fused losses are."""

    def plain_head(weights, x):
        return jax.nn.logsumexp(x @ weights, axis=-1).mean()

    head = jax.custom_vjp(plain_head)
    head.defvjp(
        lambda weights, x: jax.vjp(plain_head, weights, x),
        lambda pullback, cotangent: pullback(cotangent),
    )

    def loss(params, x):
        for weights in params["blocks"]:
            x = jnp.tanh(x @ weights)
        return head(params["head"], x)

    params = {
        "blocks": [jax.random.normal(KEY, (64, 64)) / 8] * 5,
        "head": jax.random.normal(KEY, (64, 300)),
    }
    grad_fn, said = placed(loss, params, num_stages=4)
    (warning,) = said
    assert re.search(r"custom_vjp.* is 53% and cannot be divided; take fewer", warning)
    num_params = [stage.num_params for stage in grad_fn.plan.stages]
    assert len(num_params) == 4
    assert 64 * 300 in num_params
    placed_params = grad_fn.place(params, X)
    ref.assert_close(
        grad_fn(placed_params, X), jax.value_and_grad(loss)(params, X), 1e-5
    )


def test_a_program_without_modules_names_its_parameters():
    grad_fn, _ = placed(blocks(jax.checkpoint), BLOCKS)
    assert grad_fn.plan.layer_names == [
        ["blocks/0", "blocks/1"],
        ["blocks/2", "blocks/3", "head"],
    ]


def test_names_of_parameters_are_long_enough_to_tell_stages_apart():
    """They are in two trees, as of a model in two parts; then in two lists."""
    matrix = jnp.ones((64, 64))
    layers = {str(i): {"in": {"w": matrix}, "out": {"w": matrix}} for i in range(4)}
    trees = (
        {"model": {"layers": layers, "head": matrix}},
        {"scale": {"all": [jnp.ones(())] * 4}},
    )

    def loss(params, x):
        model, scale = params
        for i in range(4):
            layer = model["model"]["layers"][str(i)]
            x = jnp.tanh(x @ layer["in"]["w"]) @ layer["out"]["w"]
            x = x * scale["scale"]["all"][i]
        return (x @ model["model"]["head"]).mean()

    grad_fn, _ = placed(loss, trees)
    first, last = grad_fn.plan.layer_names
    assert first[:2] == ["0/model/layers/0", "0/model/layers/1"]
    assert {"0/model/head", "0/model/layers/3"} <= {*last}

    def of_lists(params, x):
        for weights, bias in zip(*params, strict=True):
            x = jnp.tanh(x @ weights + bias)
        return x.mean()

    grad_fn, _ = placed(of_lists, ([matrix] * 4, [jnp.ones(64)] * 4))
    assert grad_fn.plan.layer_names == [
        ["0/0", "0/1", "1/0", "1/1"],
        ["0/2", "0/3", "1/2", "1/3"],
    ]


@pytest.mark.parametrize(
    ("num_stages", "names"),
    [
        (2, [["left"], ["right"]]),
        (3, [["left (part)"], ["left (part)", "right (part)"], ["right (part)"]]),
    ],
)
def test_two_towers_of_one_module_are_named_by_their_parameters(num_stages, names):
    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.relu(nn.Dense(64)(x))
            return x

    def loss(params, x):
        left: Any = Tower().apply({"params": params["left"]}, x)
        right: Any = Tower().apply({"params": params["right"]}, x)
        return jnp.mean((left - right) ** 2)

    params = {side: Tower().init(KEY, X)["params"] for side in ("left", "right")}
    grad_fn, _ = placed(loss, params, num_stages)
    assert grad_fn.plan.layer_names == names


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(64)(jnp.tanh(nn.Dense(64)(x))), None


class Layers(nn.Module):
    """Dense layers, then one block in a loop, or several in checkpoints."""

    has_loop: bool

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(nn.Dense(64)(x))
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        if self.has_loop:
            return nn.scan(Block, length=3, **options)()(x, None)[0]
        for _ in range(2):
            x, _ = nn.remat(Block)()(x)
        return x


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return layers()(x, None)[0].mean(1)


PERCEPTRON = nn.Sequential([nn.Sequential([nn.relu, nn.Dense(6)]) for _ in range(8)])


@pytest.mark.parametrize("model", [PERCEPTRON, Scanned()], ids=["python", "scan"])
@pytest.mark.filterwarnings("ignore:stage .* of the estimated work:UserWarning")
def test_there_are_fewer_stages_than_devices_where_a_model_has_fewer_cuts(model):
    devices = jax.devices() * 8
    pipe = jpipe.pipeline(model, 2, devices=devices)
    variables = pipe.init(KEY, X)
    assert len(pipe.devices) == pipe.num_stages < 32
    exact = jpipe.pipeline(model, 2, devices=devices, num_stages=pipe.num_stages)
    exact.init(KEY, X)
    assert exact.plan.stages == pipe.plan.stages

    y = jax.jit(model.apply)(jax.device_get(variables), X)
    ref.assert_close(pipe.apply(variables, X), y, 1e-6)

    more = jpipe.pipeline(model, 2, devices=devices, num_stages=60)
    with pytest.raises(ValueError, match=r"num_stages=60: .* divided in \d+ at most"):
        more.init(KEY, X)


class Outer(nn.Module):
    """A model in a model, all of whose blocks are in its one child."""

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(64, name=name) for name in "abcd"]
        return nn.Sequential(layers, name="inner")(x)


def test_modules_of_a_module_in_all_stages_are_named():
    pipe = jpipe.pipeline(Outer(), 2, num_stages=2)
    pipe.init(KEY, X)
    assert pipe.plan.layer_names == [["inner/a", "inner/b"], ["inner/c", "inner/d"]]


def test_modules_in_checkpoints_and_of_nnx_are_named():
    pipe = jpipe.pipeline(Layers(False), 2, num_stages=2)
    pipe.init(KEY, X)
    first, last = pipe.plan.layer_names
    assert first[:3] == ["Dense_0", "Dense_1", "Dense_2"]
    assert [*first[3:], *last] == ["CheckpointBlock_0", "CheckpointBlock_1"]
    pipe = jpipe.pipeline(Perceptron(nnx.Rngs(0)), 2, num_stages=2)
    pipe.init(KEY, X)
    assert pipe.plan.layer_names == [["blocks/0", "blocks/1"], ["blocks/2", "head"]]


def test_a_loop_that_is_more_than_its_share_is_warned_of_once():
    pipe = jpipe.pipeline(Layers(True), 2, num_stages=2)
    says = (
        r"stage 1 has 7\d% of the estimated work, .* is 50%: one operation, scan of "
        r"Layers/ScanBlock_0, at \S*test_division.py:\d+ \(Layers.__call__\), is "
        r"6\d% .*; write the loop in Python, or take fewer stages: num_stages=1"
    )
    with pytest.warns(UserWarning, match=says):
        variables = pipe.init(KEY, X)
    pipe.apply(variables, X)
    pipe.apply(variables, X[:3])
    assert pipe.plan.layer_names == [["Dense_0", "Dense_1", "Dense_2"], ["ScanBlock_0"]]


def test_a_scan_of_one_layer_is_no_loop_to_write_in_python():
    def loss(params, x):
        x = jnp.tanh(x @ params["in"])
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["scanned"])
        return x.mean()

    params = {"in": jnp.ones((64, 128)), "scanned": jnp.ones((1, 128, 128))}
    with pytest.raises(
        ValueError, match=r"num_stages=9: .* cannot be divided; type num_stages=\d+$"
    ):
        placed(loss, params, num_stages=9)
    _, said = placed(loss, params)
    (warning,) = said
    assert warning.endswith("cannot be divided; take fewer stages: num_stages=1")


def with_a_number_of_each_block(params, x):
    """As experts add a loss: one more number crosses each gap than the one before."""
    numbers = []
    for w in params:
        x = x + jnp.tanh(x @ w)
        numbers.append(jnp.mean(x))
    return jnp.mean(x**2) + jnp.mean(jnp.stack(numbers))


def test_numbers_that_cross_beside_activations_do_not_decide_where_to_cut():
    params = [jnp.full((32, 32), 0.01 + i / 1000) for i in range(24)]
    grad_fn = jpipe.value_and_grad(with_a_number_of_each_block, 2, num_stages=4)
    grad_fn.place(params, jnp.ones((64, 32)))
    assert [len(names) for names in grad_fn.plan.layer_names] == [6, 6, 6, 6]


def indexed(params, x):
    for i in range(4):
        x = jnp.tanh(x @ params["w"][i] + params["b"][i])
    return x.mean()


def tied(params, x):
    tokens = jnp.int32(x[:, 0])
    h = params["table"][tokens]
    for w in params["w"]:
        h = jnp.tanh(h @ w)
    return (h @ params["table"].T).mean()


def test_large_parameters_that_are_read_by_slices_are_warned_of():
    """A GPT in plain JAX: blocks made by ``jax.vmap(init)``, read in a Python loop.

    Each stage would hold all blocks, and more stages would save no memory.
    """
    stacked = {"w": jnp.ones((4, 64, 64)), "b": jnp.ones((4, 64))}
    _, said = placed(indexed, stacked)
    (message,) = said
    path = r"params\['w'\]"
    line = rf"{path}, 64.0 KiB, in stages 0, 1: jnp.unstack\({path}, axis=0\)"
    assert re.search(rf"is given all of it.*\n  \* {line}$", message)
    _, said = placed(indexed, {"w": jnp.unstack(stacked["w"]), "b": stacked["b"]})
    assert not said
    tree = {"w": [jnp.ones((64, 64))] * 4, "table": jnp.ones((256, 64))}
    _, said = placed(tied, tree)
    assert not said
