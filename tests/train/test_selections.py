"""What may be given as ``trainable=``, and what is said of what may not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jpipe

from .. import reference as ref

TX = optax.adam(1e-2)


class Adapted(nnx.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(5, 5, rngs=rngs)
        self.lora = nnx.LoRA(5, 2, 5, rngs=rngs)
        self.lora.lora_b[...] = jnp.ones((2, 5)) / 5
        # A Variable may hold a tree.
        self.scale = nnx.LoRAParam({"all": jnp.ones(()), "each": jnp.ones(5)})

    def __call__(self, x):
        scale = self.scale.get_value()
        return self.base(x) + scale["all"] * scale["each"] * self.lora(x)


def model():
    """A linen layer between two of nnx."""
    rngs = nnx.Rngs(0)
    first, last = Adapted(rngs), Adapted(rngs)
    layers = [first, jnp.tanh, ref.dense(5), last]
    return layers, jpipe.pipeline(layers, 2, balance=[1, 2, 1])


def told(path, leaf):
    return isinstance(leaf, nnx.LoRAParam) and leaf.shape != ()


LORA = {f"{i}/{p}" for i in (0, 3) for p in ("lora/lora_a", "lora/lora_b")}
SCALES = {f"{i}/scale/{p}" for i in (0, 3) for p in ("all", "each")}


@pytest.mark.parametrize(
    ("trainable", "selected"),
    [
        (nnx.LoRAParam, LORA | SCALES),
        (nnx.All(nnx.LoRAParam, nnx.PathContains("lora")), LORA),
        (
            nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)),
            # As nnx would hold them, the parameters of linen are Params.
            (BASES := {f"{i}/base/{p}" for i in (0, 3) for p in ("kernel", "bias")})
            | {"2/bias", "2/kernel"},
        ),
        (told, LORA | {"0/scale/each", "3/scale/each"}),
        ({"*/lora_?", "?/scale"}, LORA | SCALES),
        (["2/bias", nnx.LoRAParam, "3/scale/all"], LORA | SCALES | {"2/bias"}),
        (..., LORA | SCALES | BASES | {"2/bias", "2/kernel"}),
    ],
)
def test_gradients_are_those_of_what_is_selected(trainable, selected):
    _, pipe = model()
    x, _ = ref.regression(6)
    variables = pipe.init(jax.random.key(0), x)
    loss, all_grads = pipe.value_and_grad(ref.mse)(variables, x, x)
    actual, grads = pipe.value_and_grad(ref.mse, trainable=trainable)(variables, x, x)
    expected, found = [], set()
    flat, tree = jax.tree_util.tree_flatten_with_path(all_grads)
    for path, leaf in flat:
        at = jax.tree_util.keystr(path, simple=True, separator="/")
        expected.append(leaf if at in selected else None)
        found |= {at} & selected
    assert found == selected
    ref.assert_close((actual, grads), (loss, tree.unflatten(expected)), ref.FLOAT32)


def test_gradients_of_variables_are_those_of_nnx():
    layers, pipe = model()
    x, _ = ref.regression(6)
    variables = pipe.init(jax.random.key(0), x)
    actual = pipe.value_and_grad(ref.mse, trainable=nnx.LoRAParam)(variables, x, x)
    first, _, dense, last = layers
    own = ref.on_host(variables[2])

    def loss(first, last):
        return ref.mse(last(dense.apply(own, jnp.tanh(first(x)))), x)

    adapters = [nnx.DiffState(i, nnx.LoRAParam) for i in (0, 1)]
    expected = nnx.value_and_grad(loss, argnums=adapters)(first, last)
    ref.assert_close(*map(jax.tree.leaves, (actual, expected)), ref.FLOAT32)


@pytest.mark.parametrize(
    ("trainable", "says"),
    [
        (3, r"trainable=3 is a int; trainable= takes paths such as '\*/lora_\*'"),
        ({"0": True}, "is a dict; trainable= takes"),
        ([["0"]], r"trainable=\['0'\] is a list"),
        ([], r"trainable=\[\] names nothing"),
    ],
)
def test_what_is_no_selection(trainable, says):
    _, pipe = model()
    x, _ = ref.regression(6)
    for build in (
        lambda: pipe.value_and_grad(ref.mse, trainable=trainable),
        lambda: pipe.train_step(ref.mse, TX, trainable=trainable),
        lambda: pipe.init_train_state(jax.random.key(0), x, TX, trainable=trainable),
    ):
        with pytest.raises(TypeError, match=says):
            build()


@pytest.mark.parametrize(
    ("trainable", "says"),
    [
        ("*/kernal", "'*/kernal': the nearest are '2/kernel', '"),
        ("4/bias", "'4/bias': the nearest are '2/bias', '"),
        (["2", "0/lora_a", "9/*"], "'0/lora_a': the nearest are '0/lora/lora_a', '"),
        (["2", "0/lora_a", "9/*"], "  * '9/*': the nearest are "),
        (nnx.LoRA, "LoRA: there are 14, such as (0, 'base', 'bias') and "),
        (nnx.BatchStat, "Variable types: LoRAParam, Param\nA path starts with the"),
        (lambda path, leaf: False, "<lambda>: there are 14, such as (0, 'base', "),
        (False, "False: there are 14"),
    ],
)
def test_what_selects_nothing_names_what_there_is(trainable, says):
    _, pipe = model()
    x, _ = ref.regression(6)
    with pytest.raises(ValueError, match="selects none of the floating") as error:
        pipe.init_train_state(jax.random.key(0), x, TX, trainable=trainable)
    assert says in str(error.value)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="selects none of the floating") as again:
        pipe.value_and_grad(ref.mse, trainable=trainable)(variables, x, x)
    assert str(again.value) == str(error.value)


def test_a_function_is_told_what_a_variable_is_and_runs_none_of_its_hooks():
    def told_a_value(variable, value):
        return 2 * value

    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    hooked = nnx.LoRAParam(jnp.ones((4, 4)), mine="yes")
    hooked.set_metadata(on_get_value=told_a_value)
    layer.kernel = hooked
    pipe = jpipe.pipeline([layer], 2)
    x = jnp.ones((4, 4))
    variables = pipe.init(jax.random.key(0), x)
    seen = {}

    def rule(path, leaf):
        seen[path] = type(leaf), leaf.shape, leaf.dtype, leaf.get_metadata().get("mine")
        return True

    pipe.value_and_grad(ref.mse, trainable=rule)(variables, x, x)
    assert seen == {
        (0, "bias"): (nnx.Param, (4,), jnp.float32, None),
        (0, "kernel"): (nnx.LoRAParam, (4, 4), jnp.float32, "yes"),
    }
    assert hooked.get_metadata()["on_get_value"] is told_a_value


def test_a_model_without_parameters_has_none_to_select():
    pipe = jpipe.pipeline([jnp.tanh], 2)
    with pytest.raises(ValueError, match=r"'\*': there are none"):
        pipe.value_and_grad(ref.mse, trainable="*")(({},), jnp.ones(4), jnp.ones(4))


def test_a_function_answers_true_or_false():
    _, pipe = model()
    x, _ = ref.regression(6)
    variables = pipe.init(jax.random.key(0), x)

    def answers(rule):
        pipe.value_and_grad(ref.mse, trainable=rule)(variables, x, x)

    answers(lambda path, leaf: np.bool_(path[0] == 0))
    with pytest.raises(TypeError, match=r"answers None for \(0, 'base', 'bias'\)"):
        answers(lambda path, leaf: None)
    with pytest.raises(KeyError, match="stranger") as error:
        answers(lambda path, leaf: {}["stranger"])
    assert (
        "raised by trainable=<lambda> on ((0, 'base', 'bias')"
        in (error.value.__notes__[0])
    )


class TestAStateMadeToTrainOtherParameters:
    def test_is_refused_with_what_it_lacks_and_has_too_much(self):
        _, pipe = model()
        x, _ = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, TX, trainable="0/lora")
        before = ref.on_host(state)
        step = pipe.train_step(ref.mse, TX, trainable=["0/lora/lora_a", "2/bias"])
        with pytest.raises(ValueError, match="made to train other parameters") as error:
            step(state, x, x)
        for says in (
            "the same trainable= to Pipeline.init_train_state",
            "opt_state[0].mu[0]['lora']['lora_b'] is surplus",
            "opt_state[0].mu[2]['bias'] is missing",
        ):
            assert says in str(error.value)
        ref.assert_equal(state, before)

    def test_leaves_are_listed_up_to_a_number(self):
        _, pipe = model()
        x, _ = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, TX, trainable="0/lora")
        with pytest.raises(ValueError, match=r"is missing, and 20 more$"):
            pipe.train_step(ref.mse, TX)(state, x, x)

    def test_another_optimizer_is_not_taken_for_that(self):
        _, pipe = model()
        x, _ = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, TX, trainable="0/lora")
        step = pipe.train_step(ref.mse, optax.sgd(0.1, 0.9), trainable="0/lora")
        with pytest.raises(ValueError, match="the same trainable=") as error:
            step(state, x, x)
        assert "other parameters" not in str(error.value)

    def test_is_told_where_the_optimizer_has_no_state(self):
        _, pipe = model()
        (x, _), sgd = ref.regression(6), optax.sgd(0.1)
        state = pipe.init_train_state(jax.random.key(0), x, sgd, trainable="2/bias")
        before = ref.on_host(state)
        with pytest.raises(ValueError, match=r"would train .*, and 9 more; give the"):
            pipe.train_step(ref.mse, sgd)(state, x, x)
        with pytest.raises(ValueError, match=r"train state.params\[2\]\['kernel'\]; g"):
            pipe.train_step(ref.mse, sgd, trainable=["2/*"])(state, x, x)
        ref.assert_equal(state, before)

    def test_and_of_all_that_is_made_of_that_state(self, tmp_path):
        _, pipe = model()
        (x, _), sgd = ref.regression(6), optax.sgd(0.1)
        state = pipe.init_train_state(jax.random.key(0), x, sgd, trainable="2/bias")
        after, _ = pipe.train_step(ref.mse, sgd, trainable="2/bias")(state, x, x)
        jpipe.checkpoint.save(tmp_path / "state", {"state": after})
        plain = serialization.to_state_dict(after)
        for same in (
            after,
            after.replace(step=after.step + 1),
            pipe.place(after),
            jpipe.checkpoint.restore(tmp_path / "state", {"state": after})["state"],
            pipe.place(serialization.from_state_dict(after, plain)),
        ):
            with pytest.raises(ValueError, match="made to train other parameters, and"):
                pipe.train_step(ref.mse, sgd)(same, x, x)

    def test_and_forgotten_with_the_state_of_the_optimizer(self):
        _, pipe = model()
        x, _ = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, TX, trainable="2/bias")
        state, _ = pipe.train_step(ref.mse, TX, trainable="2/bias")(state, x, x)
        state = state.replace(opt_state=pipe.optimizer(TX).init(state.params))
        state, _ = pipe.train_step(ref.mse, TX)(state, x, x)
        assert int(state.step) == 2
