"""Plans and profiles of one model, which is taken in sections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from ..listing import program_of
from ..models import small_models as models
from ..slow import slow

TOKENS = np.random.default_rng(0).integers(0, models.VOCAB, (8, 6))
TX = optax.adam(1e-2)
MODEL = models.GPT(layers=4, rate=0.0)


def loss_fn(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def planned(model=MODEL, x=TOKENS, **options):
    given = {"loss_fn": loss_fn, "targets": TOKENS, "measure": False, **options}
    return jpipe.plan(model, x, TX, data=1, **given)


@functools.cache
def plan():
    """A plan in three stages."""
    with jax.enable_x64(True):
        # Without time for actions, in which so small a model would stay on one device.
        given = {"num_microbatches": 4, "schedules": "1f1b", "action_seconds": 0.0}
        return planned(num_devices=3, **given)


def plain(variables):
    """The loss and the gradients of the model without jpipe."""

    def loss(params):
        return loss_fn(MODEL.apply({"params": params}, TOKENS), TOKENS)

    return jax.jit(jax.value_and_grad(loss))(ref.on_host(variables)["params"])


def step_bytes(memory):
    """The bytes of a step beside the optimizer's state and workspace."""
    return memory.parameters + memory.gradients + memory.activations


def test_a_plan_of_a_model_is_built_and_gives_the_numbers_of_one_device(double):
    read = jpipe.Plan.from_json(plan().to_json())
    assert read == plan()
    assert len(read.stages) == 3
    pipe = jpipe.pipeline(MODEL, plan=read)
    assert (pipe.num_stages, pipe.schedule) == (3, read.schedule)
    variables = pipe.init(jax.random.key(0), TOKENS)
    ref.assert_equal(variables, jax.jit(MODEL.init)(jax.random.key(0), TOKENS))
    find = pipe.value_and_grad(loss_fn)
    found = find(variables, TOKENS, TOKENS)
    ref.assert_close(found, plain(variables), ref.FLOAT64, 1.0)
    assert pipe.plan.cuts == find.plan.cuts == read.cuts
    # What runs holds what the plan says that it does.
    assert [held for _, held in find.plan.peak_bytes] == list(
        map(step_bytes, read.forecast.memory)
    )
    assert [stage.residual_bytes for stage in find.plan.stages] == [
        stage.residual_bytes for stage in read.stages
    ]
    assert "bottleneck: " in str(pipe)
    assert "bottleneck: " in str(find)


def test_a_plan_names_each_module_once_in_a_stage_and_says_what_is_a_part():
    names = [name for stage in plan().stages for name in stage.layers]
    assert names.count("Block_1") > 1
    names = plan().layer_names
    assert all(len(own) == len(set(own)) for own in names)
    everywhere = [name for own in names for name in own]
    assert all((everywhere.count(n) > 1) == n.endswith(" (part)") for n in everywhere)
    # A section may have several modules, of which the one before has a part.
    assert names[-1][-2:] == ["LayerNorm_0", "Embed_0.attend"]
    assert "Block_1 (part)" in str(plan())
    assert "Block_1 x" not in str(plan())


def test_a_pipeline_says_where_it_is_cut_to_one_of_another_batch(double):
    first = jpipe.pipeline(MODEL, 2, num_stages=3)
    variables = first.init(jax.random.key(0), TOKENS[:4])
    again = jpipe.pipeline(MODEL, plan=jpipe.Plan.from_json(first.plan.to_json()))
    ref.assert_equal(again.place(variables, TOKENS), variables)
    for one, other in zip(
        jax.tree.leaves(again.place(variables, TOKENS)),
        jax.tree.leaves(variables),
        strict=True,
    ):
        assert one.device == other.device


def test_a_loss_function_is_divided_as_before(double):
    def loss(params, tokens):
        return loss_fn(MODEL.apply(params, tokens), tokens)

    first = jpipe.value_and_grad(loss, 4, num_stages=3, schedule="gpipe")
    params = jax.jit(MODEL.init)(jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match="known once it was placed or called"):
        _ = first.plan
    placed = first.place(params, TOKENS)
    with pytest.raises(ValueError, match="it decides replicas, which was given too"):
        jpipe.value_and_grad(loss, plan=first.plan, replicas=[1, 1, 1])
    again = jpipe.value_and_grad(loss, plan=first.plan)
    assert [x.device for x in jax.tree.leaves(again.place(params, TOKENS))] == [
        x.device for x in jax.tree.leaves(placed)
    ]
    assert again.plan == first.plan
    value, grads = again(placed, TOKENS)
    ref.assert_close((value, grads["params"]), plain(params), ref.FLOAT64, 1.0)


def test_sections_have_all_parameters_and_the_times_of_their_equals(double):
    options = {"loss_fn": loss_fn, "targets": TOKENS, "num_microbatches": 4}
    profile = jpipe.profile(MODEL, TOKENS, measure=False, **options)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert sum(section.num_params for section in profile.layers) == size
    blocks = [x for x in profile.layers if x.name == "Block_2"]
    others = [x for x in profile.layers if x.name == "Block_1"]
    assert blocks
    assert [x.forward for x in blocks] == [x.forward for x in others]
    # The table is read by the first section and by the last one that has parameters.
    (tie,) = profile.ties
    assert (tie[0], len(tie)) == (0, 2)
    measured = jpipe.profile(MODEL, TOKENS, rounds=1, **options)
    assert measured.ties == profile.ties
    assert sum(x.backward for x in measured.layers) > 0


def test_a_function_without_modules_is_printed_without_a_column_for_them():
    def model(x):
        for _ in range(4):
            x = jpipe.boundary(jnp.tanh(x @ jnp.ones((4, 4))))
        return x

    x, options = jnp.ones((8, 4)), {"measure": False, "num_devices": 2, "data": 1}
    made = jpipe.plan(model, x, TX, **options, action_seconds=0.0)
    pipe = jpipe.pipeline(model, plan=made, devices=2 * jax.devices()[:1])
    pipe.apply(pipe.init(None, x), x)
    assert not any(pipe.plan.layer_names)
    header, *_ = str(pipe).splitlines()
    assert header.split()[:3] == ["stage", "device", "remat"]
    assert "a part of the function" in jpipe.draw.svg(pipe.plan)


class Checkpointed(nn.Module):
    """Blocks each of which the author put into a `jax.checkpoint`."""

    @nn.compact
    def __call__(self, tokens):
        x = models.Embed(models.VOCAB)(tokens)
        for _ in range(4):
            x = nn.remat(models.Feedforward)()(x)
        return models.Dense(models.VOCAB)(x)


class WideHead(nn.Module):
    """A loss of so many classes costs more than the layers."""

    @nn.compact
    def __call__(self, tokens):
        x = models.Embed(models.VOCAB)(tokens)
        for _ in range(3):
            x = jnp.tanh(models.Dense(models.WIDTH)(x))
        return models.Dense(400, use_bias=False)(x)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        # Within a checkpointed block, which is one operation where stages are larger.
        (Checkpointed(), {"num_devices": 2, "balance": [3, 27]}),
        # Two stages of the loss alone, that have nothing to compute in evaluation.
        slow(WideHead(), {"num_devices": 4, "balance": [3, 1, 2, 1]}),
    ],
)
def test_a_step_holds_the_planned_bytes(double, model, options):
    given = {"num_microbatches": 4, "schedules": "1f1b", "action_seconds": 0.0}
    made = planned(model, **given, **options)
    pipe = jpipe.pipeline(model, plan=made)
    variables = pipe.init(jax.random.key(0), TOKENS)
    outputs = pipe.apply(variables, TOKENS)
    find = pipe.value_and_grad(loss_fn)
    found = find(variables, TOKENS, TOKENS)
    assert [held for _, held in find.plan.peak_bytes] == list(
        map(step_bytes, made.forecast.memory)
    )

    @functools.partial(jax.value_and_grad, has_aux=True)
    def plain(params):
        outputs = model.apply({"params": params}, TOKENS)
        return loss_fn(outputs, TOKENS), outputs

    (loss, expected), grads = plain(ref.on_host(variables)["params"])
    ref.assert_close(outputs, expected, ref.FLOAT64)
    ref.assert_close(found, (loss, grads), ref.FLOAT64, 1.0)


def test_a_plan_of_some_parameters_is_of_those_that_are_trained(double):
    options = {"num_devices": 2, "schedules": "1f1b", "action_seconds": 0.0}
    made = planned(num_microbatches=4, trainable="*/Dense_*", **options)
    pipe = jpipe.pipeline(MODEL, plan=made)
    variables = pipe.init(jax.random.key(0), TOKENS)
    grads = pipe.value_and_grad(loss_fn, trainable="*/Dense_*")
    # Its program says what is held, and need not run.
    program_of(grads, variables, TOKENS, TOKENS)
    assert [held for _, held in grads.plan.peak_bytes] == list(
        map(step_bytes, made.forecast.memory)
    )
    trained_bytes = sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
        if "Dense_" in jax.tree_util.keystr(path)
    )
    # Two moments of these, and a counter on each device.
    optimizer_bytes = sum(memory.optimizer for memory in made.forecast.memory)
    assert 2 * trained_bytes < optimizer_bytes <= 2 * trained_bytes + 32


def test_a_pipeline_has_the_cuts_of_a_model_that_a_loss_divided(double):
    pipe = jpipe.pipeline(MODEL, 2, num_stages=2)
    find = pipe.value_and_grad(loss_fn)
    for function in (pipe, find):
        assert "known once it was initialized or called" in str(function)
        with pytest.raises(ValueError, match="known once it was initialized or called"):
            _ = function.plan
    specs = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    program_of(find, specs, TOKENS, TOKENS)
    assert pipe.plan.cuts == find.plan.cuts
    again = jpipe.pipeline(MODEL, plan=jpipe.Plan.from_json(pipe.plan.to_json()))
    assert again.plan.cuts == find.plan.cuts
    assert again.plan.schedule == find.plan.schedule
    assert str(again) == str(pipe)


def test_sections_end_at_boundary_marks():
    def model(x):
        for _ in range(3):
            x = jpipe.boundary(jnp.tanh(x @ jnp.ones((4, 4))))
        return jnp.sin(x)

    profile = jpipe.profile(model, jnp.ones((8, 4)), measure=False)
    assert [x.name for x in profile.layers] == [f"section {i}" for i in range(4)]


def test_nnx_modules_and_several_inputs_are_planned(double):
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(6)])

        def __call__(self, x, scale):
            for layer in self.layers:
                x = jnp.tanh(layer(x)) * scale
            return x

    x = jpipe.inputs(np.ones((8, 6)), np.float64(0.5))
    axes = jpipe.inputs(0, None)
    options = {"loss_fn": ref.mse, "targets": np.ones((8, 6)), "in_axes": axes}
    made = planned(Net(), x, num_devices=2, **options)
    pipe = jpipe.pipeline(Net(), plan=made, in_axes=axes)
    variables = pipe.init(None, x)
    loss, _ = pipe.value_and_grad(ref.mse)(variables, x, np.ones((8, 6)))
    expected = ref.mse(Net()(np.ones((8, 6)), 0.5), np.ones((8, 6)))
    ref.assert_close(loss, expected, ref.FLOAT64)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: jpipe.pipeline(MODEL, 4, num_stages=2, plan=plan()),
            "it decides num_microbatches, .*it decides num_stages, which was given",
        ),
        (
            lambda: jpipe.pipeline([nn.Dense(2)], plan=plan()),
            "it is of one model or function; plan these layers, by jpipe.plan",
        ),
        (
            lambda: jpipe.pipeline(
                MODEL, plan=jpipe.pipeline([nn.Dense(2)], num_microbatches=1).plan
            ),
            "it is of a list of layers; plan what is given here, by jpipe.plan",
        ),
        (
            lambda: jpipe.pipeline(models.GPT(layers=3, rate=0.0), plan=plan()).init(
                jax.random.key(0), TOKENS
            ),
            "it is of a model or function of 68 arrays of .*this one has 52; make",
        ),
        (
            lambda: jpipe.pipeline(MODEL, 2).plan,
            "known once it was initialized or called; jpipe.plan decides them before",
        ),
    ],
)
def test_a_plan_of_something_else_is_refused(double, build, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        build()


class Perceptron(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(jnp.tanh(nn.Dense(self.width)(x)))


def initialized(stages, x, **options):
    """A pipeline with variables, and these."""
    pipe = jpipe.pipeline(stages, devices=jax.devices()[:2], **options)
    return pipe, pipe.init(jax.random.key(0), x)


@pytest.mark.parametrize(
    ("stages", "options", "says"),
    [
        (Perceptron, {"num_stages": 2}, r"\['params'\]\['Dense_1'\]\['kernel'\]"),
        (lambda n: [nn.Dense(n), nn.Dense(3)], {}, r"\[0\]\['params'\]\['kernel'\]"),
    ],
)
def test_a_plan_of_a_narrower_model_is_refused_with_the_shapes_of_both(
    stages, options, says
):
    x = jnp.ones((4, 5))
    pipe, variables = initialized(stages(6), x, num_microbatches=2, **options)
    find = pipe.value_and_grad(ref.mse)
    program_of(find, variables, x, jnp.ones((4, 3)))
    plan = jpipe.Plan.from_json(find.plan.to_json())
    _, again = initialized(stages(6), x, plan=plan)
    ref.assert_equal(again, variables)
    says = rf"(?s)other parameters:.*variables{says} has shape \(5, 7\), in the plan "
    with pytest.raises(ValueError, match=says + r"\(5, 6\)\n.*make a plan of this one"):
        initialized(stages(7), x, plan=plan)
    _, wider = initialized(stages(7), x, num_microbatches=2, **options)
    grads = jpipe.pipeline(stages(7), plan=plan).value_and_grad(ref.mse)
    with pytest.raises(ValueError, match=says):
        grads(wider, x, jnp.ones((4, 3)))


def test_a_plan_of_a_narrower_loss_function_is_refused_with_the_shapes_of_both():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    first = jpipe.value_and_grad(loss, 2, num_stages=2)
    first.place([jnp.ones((3, 3))] * 2, jnp.ones((4, 3)))
    again = jpipe.value_and_grad(loss, plan=first.plan)
    says = r"params\[1\] has shape \(4, 4\), in the plan \(3, 3\)"
    with pytest.raises(ValueError, match=says):
        again.place([jnp.ones((4, 4))] * 2, jnp.ones((4, 4)))


class Skipping(nn.Module):
    """After its last parameter there is little to compute."""

    @nn.compact
    def __call__(self, x):
        y = models.Dense(3)(models.Dense(3)(jnp.tanh(x)))
        return y + x[:, :3]


def test_a_loss_is_a_part_of_the_last_stage(double):
    model, x = Skipping(), np.ones((1, 6))
    pipe = jpipe.pipeline(model, 1, num_stages=3, devices=jax.devices()[:1] * 3)
    variables = pipe.init(jax.random.key(0), x)
    found = pipe.value_and_grad(ref.mse)(variables, x, np.ones((1, 3)))

    def loss(params):
        return ref.mse(model.apply({"params": params}, x), np.ones((1, 3)))

    expected = jax.value_and_grad(loss)(ref.on_host(variables)["params"])
    ref.assert_close(found, expected, ref.FLOAT64)


def test_a_loss_function_is_told_what_to_plan(double):
    def fun(params, tokens):
        return loss_fn(MODEL.apply({"params": params}, tokens), tokens)

    params = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)["params"]
    for sample, tx in ((params, TOKENS), ((params, TOKENS), TX)):
        with pytest.raises((TypeError, ValueError)) as refusal:
            jpipe.plan(fun, sample, tx, measure=False)
        (note,) = [x for x in refusal.value.__notes__ if "loss function" in x]
        assert "plan = jpipe.plan(model, x, tx, loss_fn=..., targets=...)" in note
    with pytest.raises(TypeError, match="needs an optax optimizer") as refusal:
        jpipe.plan(MODEL, params, TOKENS, measure=False)
    assert not getattr(refusal.value, "__notes__", ())
