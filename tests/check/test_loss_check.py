"""A loss that its micro-batches would not add up to is refused before it trains."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

pytestmark = pytest.mark.usefixtures("quick")
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
BATCH, TIME, WORDS = 12, 3, 5
RNG = np.random.default_rng(3)
X = RNG.normal(size=(BATCH, TIME, 2)).astype(np.float32)
TOKENS = RNG.integers(0, WORDS, (BATCH, TIME))


@pytest.fixture(scope="module")
def model():
    pipe = jpipe.sequential([nn.Dense(WORDS)], 3)
    return pipe, pipe.init(jax.random.key(0), X)


def masked_mean(y, t):
    mask = t > 0
    return (cross_entropy(y, t) * mask).sum() / mask.sum()


def in_chunks(y, t):
    """The same, in chunks of time under a scan, as for large vocabularies."""

    def add(totals, chunk):
        y, t = chunk
        mask = t > 0
        return (
            totals[0] + (cross_entropy(y, t) * mask).sum(),
            totals[1] + mask.sum(),
        ), None

    chunks = jnp.moveaxis(y, 1, 0), jnp.moveaxis(t, 1, 0)
    (total, count), _ = jax.lax.scan(add, (0.0, 0), chunks)
    return total / count


def contrastive(y, t):
    flat = y.reshape(len(y), -1)
    return cross_entropy(flat @ flat.T, jnp.arange(len(y))).mean()


WRONG = {
    "sum": (lambda y, t: cross_entropy(y, t).sum(), "mean", r"type reduction='sum'"),
    "masked mean": (masked_mean, "mean", "return .total, weight."),
    "masked mean in chunks": (in_chunks, "mean", "return .total, weight."),
    "root": (lambda y, t: jnp.sqrt((y**2).mean()), "mean", "random outputs"),
    "contrastive": (contrastive, "mean", "reduction='microbatch_mean'"),
    "a mean for a sum": (
        lambda y, t: cross_entropy(y, t).mean(),
        "sum",
        "as combined of",
    ),
    "a mean for a total": (
        lambda y, t: (cross_entropy(y, t).mean(), (t > 0).sum()),
        "weighted",
        "as combined of two parts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loss_raises(model, name):
    pipe, variables = model
    loss_fn, reduction, match = WRONG[name]
    with pytest.raises(
        ValueError, match=rf"reduction='{reduction}': loss_fn is.*{match}"
    ):
        pipe.value_and_grad(loss_fn, reduction=reduction)(variables, X, TOKENS)


def relative(y, t):
    """In any parts 1, with a gradient that depends on the parts."""
    losses = cross_entropy(y, t).mean(-1)
    return (losses / jax.lax.stop_gradient(losses.mean())).mean()


@jax.custom_vjp
def normed(y):
    return y


normed.defvjp(lambda y: (y, None), lambda _, g: (g / jnp.linalg.norm(g),))


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (relative, "mean"),
        (lambda y, t: cross_entropy(normed(y), t).sum(), "sum"),
        (lambda y, t: (cross_entropy(normed(y), t).sum(), t.size), "weighted"),
    ],
)
@pytest.mark.parametrize("stages", [[nn.Dense(WORDS)], nn.Dense(WORDS)])
def test_a_loss_with_another_gradient_in_micro_batches_is_refused(
    stages, loss_fn, reduction
):
    """Though its value is the same; `check` says so too."""
    tx = optax.sgd(0.1)
    pipe = jpipe.sequential(stages, 3)
    state = pipe.init_train_state(jax.random.key(0), X, tx)
    says = rf"reduction='{reduction}': .* but its gradient, of numbers up to .* differs"
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    step = pipe.train_step(loss_fn, tx, reduction=reduction)
    for function, variables in ((find, state.variables), (step, state)):
        with pytest.raises(ValueError, match=says):
            function(variables, X, TOKENS)
        report = function.check(variables, X, TOKENS)
        assert [layer.is_same for layer in report.layers] == [True]
        assert not report.loss.is_same


def test_check_of_a_loss_function_compares_its_gradient():
    def loss_fn(params, x, t):
        return relative(x @ params, t)

    grad_fn = jpipe.value_and_grad(loss_fn, 3, num_stages=1)
    report = grad_fn.check(jnp.ones((2, WORDS)) * jnp.arange(WORDS), X, TOKENS)
    with pytest.raises(ValueError, match=r"gradients.* differ"):
        report.raise_if_different()


@pytest.mark.parametrize("num_rows", [3, 4, 8])
@pytest.mark.parametrize("follows", ["nothing", "parameters", "a mean over examples"])
def test_outputs_without_examples_keep_their_shape(num_rows, follows):
    """Whatever their length is: micro-batches have four examples."""

    def add_rows(y):
        rows = jnp.ones((num_rows, 2)) if follows == "nothing" else y["rows"]
        if follows == "a mean over examples":
            rows = rows * y["y"].mean()
        return y["y"], rows

    def init(key, x):
        return {"params": {"w": jnp.ones((2, WORDS)), "rows": jnp.ones((num_rows, 2))}}

    def apply(variables, x):
        params = variables["params"]
        return {"y": x @ params["w"], "rows": params["rows"]}

    def loss_fn(outputs, t):
        y, rows = outputs
        return cross_entropy(y, t).mean() + jnp.sum(rows**2)

    pipe = jpipe.sequential([jpipe.Layer(init, apply), add_rows], 3)
    variables = pipe.init(jax.random.key(0), X)
    find = pipe.value_and_grad(loss_fn)
    find(variables, X, TOKENS)
    assert "not checked" not in str(find)


def test_outputs_that_have_all_tokens_on_one_axis_are_checked():
    pipe = jpipe.sequential([nn.Dense(WORDS), lambda y: y.reshape(-1, WORDS)], 3)
    variables = pipe.init(jax.random.key(0), X)

    def mean(y, t):
        return cross_entropy(y, t.reshape(-1)).mean()

    find = pipe.value_and_grad(mean)
    find(variables, X, TOKENS)
    assert "not checked" not in str(find)
    with pytest.raises(ValueError, match=r"for 12 examples but .*float32\[36,5\]"):
        pipe.value_and_grad(lambda y, t: mean(y, t) ** 2)(variables, X, TOKENS)


def centred(y, t):
    """Its value is the rounding error of numbers that cancel each other."""
    losses = cross_entropy(y, t).mean(-1)
    return (losses - jax.lax.stop_gradient(losses.mean())).mean()


RIGHT = {
    "a value of rounding errors": (centred, "mean"),
    "masked, at least one": (
        lambda y, t: (
            (cross_entropy(y, t) * (t > 0)).sum(),
            jnp.maximum((t > 0).sum(), 1),
        ),
        "weighted",
    ),
    "clipped": (lambda y, t: jnp.clip(cross_entropy(y, t).mean(), 0, 50), "mean"),
    "bfloat16": (
        lambda y, t: cross_entropy(y.astype(jnp.bfloat16), t).mean(),
        "mean",
    ),
    "total in bfloat16, weight an integer": (
        lambda y, t: (cross_entropy(y.astype(jnp.bfloat16), t).sum(), t.size),
        "weighted",
    ),
    "each micro-batch by itself": (contrastive, "microbatch_mean"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_ordinary_loss_passes_without_a_word(model, name):
    pipe, variables = model
    loss_fn, reduction = RIGHT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = pipe.value_and_grad(loss_fn, reduction=reduction)(
            variables, X, TOKENS
        )
    assert np.isfinite(loss)


def padded(first, last):
    """Targets of which the examples from `first` to before `last` are padding."""
    tokens = np.maximum(TOKENS, 1)
    tokens[first:last] = 0
    return tokens


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (BATCH - 1, BATCH, r"targets of the first and the last examples"),
        (0, 2, r"but nan as combined"),
    ],
)
def test_a_masked_mean_of_padded_examples_is_refused(model, first, last, says):
    """The check looks at half of the examples: at the last ones too."""
    _, variables = model
    pipe = jpipe.sequential([nn.Dense(WORDS)], 6)

    def loss_fn(y, t):
        return masked_mean(y, t) * 1.0

    step = pipe.value_and_grad(loss_fn)
    with pytest.raises(ValueError, match=says):
        step(variables, X, padded(first, last))


def test_a_loss_is_checked_again_on_the_targets_of_another_function(model):
    pipe, variables = model

    def loss_fn(y, t):
        return masked_mean(y, t) * 2.0

    pipe.value_and_grad(loss_fn)(variables, X, padded(0, 0))
    with pytest.raises(ValueError, match=r"return \(total, weight\)"):
        pipe.value_and_grad(loss_fn)(variables, X, padded(1, 3))


@pytest.mark.slow
def test_wrong_loss_raises_at_real_size():
    """Two examples are enough where all outputs together are 10^8 numbers."""
    pipe = jpipe.sequential([lambda x: jnp.broadcast_to(x, (*x.shape[:-1], 50_000))], 2)
    x, t = np.zeros((4, 512, 1), np.float32), RNG.integers(0, 3, (4, 512))
    with pytest.raises(ValueError, match=r"for 2 examples but .* two parts of 1 and 1"):
        pipe.value_and_grad(in_chunks)(({},), x, t)


def test_loss_with_effects_is_reported_as_unchecked():
    pipe = jpipe.sequential([jnp.sin], 2)

    def loss_fn(y, t):
        jax.debug.print("{}", y.sum())
        return y.mean()

    find = pipe.value_and_grad(loss_fn)
    tx = optax.sgd(0.1)
    step = pipe.train_step(loss_fn, tx)
    find(({},), X, TOKENS)
    assert "the loss was not checked: it has effects" in str(find)
    # It is a fact of this function, and not of the pipeline.
    assert "not checked" not in f"{pipe} {step}"
    with pytest.warns(UserWarning, match="nothing here has parameters"):
        state = pipe.init_train_state(jax.random.key(0), X, tx)
    step(state, X, TOKENS)
    assert "the loss was not checked: it has effects" in str(step)


def test_a_wrong_loss_is_refused_whatever_came_before(model):
    """What was compiled, was refused, or could not be built, was not checked."""
    pipe, variables = model

    def loss_fn(y, t):
        return jnp.sqrt((y**2).mean()), y

    step = pipe.value_and_grad(loss_fn, has_aux=True)
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (variables, X)
    )
    step.compile(*specs, jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32))
    with pytest.raises(ValueError, match="so do the shapes of aux"):
        step(variables, X[:5], TOKENS[:5])
    for count in (12, 9, 12):
        with pytest.raises(ValueError, match=f"for {count} examples but"):
            step(variables, X[:count], TOKENS[:count].astype(np.int32))


def test_a_step_compiled_for_specs_checks_its_loss_until_it_passes():
    pipe, tx = jpipe.sequential([nn.Dense(WORDS)], 3), optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), X, tx)
    step = pipe.train_step(masked_mean, tx)
    args = state, X, TOKENS.astype(np.int32)
    step.compile(*jax.eval_shape(lambda: args))
    assert "the loss was not checked: its targets are not arrays" in str(step)
    for _ in range(2):
        with pytest.raises(ValueError, match="micro-batches would train another loss"):
            step(*args)
    assert int(state.step) == 0
    step(state, X, np.ones_like(args[2]))
    assert "not checked" not in str(step)


def test_loss_that_passed_is_compiled_once(model):
    pipe, variables = model

    def build():
        return pipe.value_and_grad(lambda y, t: (cross_entropy(y, t) ** 3).mean())

    compiled = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    first, _ = build()(variables, X, TOKENS)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        again, _ = build()(variables, X, TOKENS)
        assert not compiled
        build_of_another = pipe.value_and_grad(lambda y, t: (y**4).mean())
        build_of_another(variables, X, TOKENS)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert again == first


def test_loss_that_passed_as_a_mean_is_checked_as_a_sum(model):
    pipe, variables = model

    def loss_fn(y, t):
        return (cross_entropy(y, t) ** 2).mean()

    pipe.value_and_grad(loss_fn)(variables, X, TOKENS)
    with pytest.raises(ValueError, match="reduction='sum'"):
        pipe.value_and_grad(loss_fn, reduction="sum")(variables, X, TOKENS)


def factor(x):
    """The Cholesky factor by LAPACK, a kernel that JAX knows nothing of."""
    specs = (x, jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32))
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", specs, vmap_method="broadcast_all")
    return call(x, uplo=np.uint8(ord("L")))[0]


@jax.custom_vjp
def logdet(x):
    return 2 * jnp.log(jnp.diagonal(factor(x), axis1=-2, axis2=-1)).sum(-1)


logdet.defvjp(
    lambda x: (logdet(x), x), lambda x, ct: (ct[:, None, None] * jnp.linalg.inv(x),)
)


def positive(x):
    """A positive definite matrix of each example."""
    x = x.reshape(len(x), 3, 3)
    return x @ x.mT + 2 * jnp.eye(3)


@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="the kernel under test is one of XLA for CPUs",
)
def test_foreign_kernels_pass_without_a_word():
    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # registers the kernel
    layers = [nn.Dense(9), positive, logdet, lambda y: y[:, None], nn.Dense(9)]
    x, t = X.reshape(BATCH, -1), jnp.ones((BATCH, 9))

    def loss_fn(y, t):
        return logdet(positive(y - t)).mean()

    def plain(params):
        y = logdet(positive(nn.Dense(9).apply({"params": params[0]}, x)))[:, None]
        return loss_fn(nn.Dense(9).apply({"params": params[4]}, y), t)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = jpipe.pipeline(layers, 4, balance=[3, 2])
        variables = pipe.init(jax.random.key(0), x)
        find = pipe.value_and_grad(loss_fn)
        value = find(variables, x, t)
        assert find.check(variables, x, t)
    expected = jax.value_and_grad(plain)(ref.params_of(variables))
    ref.assert_close(value, expected, ref.FLOAT32)
