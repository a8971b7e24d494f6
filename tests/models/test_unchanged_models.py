"""Models as their authors write them, unchanged, against plain JAX."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import jpipe

from .. import reference as ref
from ..slow import slow_except
from . import scanned_models as scanned
from . import small_models as models

# Flax's own norm of nnx writes statistics of double precision into single ones.
pytestmark = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible")
KEY, RNGS = jax.random.key(0), jax.random.key(5)
# Where a gradient is nothing but rounding, as that of a bias of keys, so is the step.
TX = optax.adam(1e-2, eps=1e-3)
RNG = np.random.default_rng(0)
TOKENS, SOURCE = RNG.integers(1, models.VOCAB, (2, 8, 6), np.int32)
LENGTHS = RNG.integers(2, 7, 8)
MASK = np.arange(6) < LENGTHS[:, None]
IMAGES, ROWS = RNG.normal(size=(8, 4, 4, 2)), RNG.normal(size=(8, 6))
LABELS, TARGETS = RNG.integers(0, 3, 8, np.int32), RNG.normal(size=(8, 3))
COUNT, MOMENTUM = 3, 0.9
entropy = optax.softmax_cross_entropy_with_integer_labels


def of_labels(logits, labels):
    return entropy(logits, labels).mean()


def next_token(logits, tokens):
    return entropy(logits[:, :-1], tokens[:, 1:]).mean()


def of_real_tokens(logits, targets):
    """The total over tokens that are no padding, and how many these are."""
    tokens, mask = targets
    return (entropy(logits, tokens) * mask).sum(), mask.sum()


def of_both(outputs, targets):
    of_tokens, of_pairs = outputs
    return of_labels(of_tokens, targets[0]) + of_labels(of_pairs, targets[1])


def squares(y, targets):
    return jnp.mean((y - targets) ** 2)


def elbo(outputs, x):
    y, mean, logvar = outputs
    divergence = (jnp.exp(logvar) + mean**2 - 1 - logvar).sum(-1)
    return ((y - x) ** 2).sum(-1).mean() + 0.5 * divergence.mean()


def contrastive(outputs, _):
    a, b, scale = outputs
    logits = scale * a @ b.T
    pairs = jnp.arange(len(logits))
    return of_labels(logits, pairs) + of_labels(logits.T, pairs)


class Case(NamedTuple):
    """A model and how it is trained.

    Attributes:
      model: the model.
      x: its inputs.
      loss: of outputs and targets.
      targets: the targets.
      stages: in how many it is divided.
      by_parts: whether micro-batches differ from the whole batch: they draw, or
        normalize.
      options: of the gradient.
      axes: of the pipeline.
      close: how close loss, gradients and what is written are.
    """

    model: Any
    x: Any
    loss: Any
    targets: Any
    stages: int = 2
    by_parts: bool = False
    options: Any = {}  # noqa: RUF012
    axes: Any = {}  # noqa: RUF012
    close: float = ref.FLOAT64


BERT = jpipe.inputs(TOKENS, LABELS[:, None] % 2 + np.zeros_like(TOKENS), MASK)
PADDED = jpipe.inputs(SOURCE * MASK, TOKENS)
CASES = {
    "gpt": lambda: Case(models.GPT(), TOKENS, next_token, TOKENS, by_parts=True),
    "gpt with a mask": lambda: Case(
        models.GPT(rate=0.0),
        jpipe.inputs(TOKENS, mask=MASK[:, None, None]),
        of_real_tokens,
        (TOKENS, MASK),
        options={"reduction": "weighted"},
    ),
    "bert": lambda: Case(
        models.Bert(), BERT, of_both, (TOKENS, LABELS % 2), by_parts=True
    ),
    "translator": lambda: Case(models.Translator(), PADDED, of_labels, TOKENS),
    "vit": lambda: Case(models.ViT(), IMAGES, of_labels, LABELS),
    "mixer": lambda: Case(models.Mixer(), IMAGES, of_labels, LABELS),
    "albert": lambda: Case(models.Albert(), TOKENS, of_labels, SOURCE),
    "resnet": lambda: Case(
        models.ResNet(), IMAGES, of_labels, LABELS, stages=3, by_parts=True
    ),
    "vae": lambda: Case(models.VAE(), ROWS, elbo, ROWS, by_parts=True),
    "seq2seq": lambda: Case(
        models.Seq2Seq(), jpipe.inputs(SOURCE, TOKENS), next_token, TOKENS
    ),
    "unet": lambda: Case(
        models.UNet(), jpipe.inputs(IMAGES, ROWS[:, 0]), squares, -IMAGES
    ),
    "two towers": lambda: Case(
        models.TwoTower(),
        jpipe.inputs(IMAGES, TOKENS),
        contrastive,
        LABELS,
        by_parts=True,
        options={"reduction": "microbatch_mean"},
        axes={"out_axes": (0, 0, None)},
    ),
    "lora": lambda: Case(
        models.LoRA(), ROWS, squares, TARGETS, options={"trainable": "*lora*"}
    ),
    "nnx gpt": lambda: Case(
        models.NnxGPT(nnx.Rngs(params=0, dropout=1)),
        TOKENS,
        next_token,
        TOKENS,
        by_parts=True,
        close=ref.FLOAT32,  # nnx attends in single precision
    ),
    "nnx cnn": lambda: Case(
        models.NnxCNN(nnx.Rngs(0)),
        IMAGES,
        of_labels,
        LABELS,
        by_parts=True,
        close=ref.FLOAT32,  # nnx keeps statistics in single precision
    ),
    "scanned decoder": lambda: Case(
        scanned.Decoder(), TOKENS, next_token, TOKENS, stages=4, by_parts=True
    ),
    "scanned positioned decoder": lambda: Case(
        scanned.PositionedDecoder(), TOKENS, next_token, TOKENS, stages=4
    ),
    "scanned encoder and decoder": lambda: Case(
        scanned.EncoderDecoder(), PADDED, of_labels, TOKENS, stages=4
    ),
    "scanned vit": lambda: Case(
        scanned.ScannedViT(), IMAGES, of_labels, LABELS, stages=4
    ),
    "remat_scan": lambda: Case(scanned.RematScan(), ROWS, squares, TARGETS, stages=3),
    "nnx.scan": lambda: Case(
        scanned.NnxScan(nnx.Rngs(0)), ROWS, squares, TARGETS, stages=4
    ),
    "nnx scanned by hand": lambda: Case(
        scanned.NnxByHand(nnx.Rngs(0)), ROWS, squares, TARGETS, stages=2
    ),
    "lstm": lambda: Case(scanned.Recurrent(), TOKENS, of_labels, SOURCE),
}
case_of = functools.cache(lambda name: CASES[name]())


@functools.cache
def made(name):
    """A case, its pipeline, and initial variables."""
    case = case_of(name)
    options = {"num_stages": case.stages, **case.axes}
    pipe = jpipe.pipeline(case.model, COUNT, **options)
    return case, pipe, pipe.init(KEY, case.x)


def called(x):
    return x.call if hasattr(x, "call") else ((x,), {})


def applied(model, variables, x, key, train):
    """What a model returns, and what it writes, without jpipe."""
    args, kwargs = called(x)
    if isinstance(model, nnx.Module):
        return nnx_applied(model, variables, args, key, train)
    known = inspect.signature(type(model).__call__).parameters
    switches = {"train": train, "deterministic": not train}
    kwargs |= {name: value for name, value in switches.items() if name in known}
    written = [name for name in variables if name != "params"]
    if train and written:
        return model.apply(variables, *args, **kwargs, rngs=key, mutable=written)
    return model.apply(variables, *args, **kwargs, rngs=key), {}


def nnx_applied(model, variables, args, key, train):
    own, kinds = nnx.clone(model), {"params": nnx.Param, "batch_stats": nnx.BatchStat}
    for name, values in variables.items():
        state = nnx.state(own, kinds[name])
        nnx.replace_by_pure_dict(state, values)
        nnx.update(own, state)
    keys = {"params": key, "dropout": jax.random.fold_in(key, 1), "default": key}
    nnx.reseed(own, policy="match_shape", **keys)
    own.train() if train else own.eval()
    y = own(*args)
    written = nnx.to_pure_dict(nnx.state(own, nnx.BatchStat))
    return y, {"batch_stats": written} if written else {}


def split(tree, count):
    leaves, structure = jax.tree.flatten(tree)
    columns = [np.array_split(leaf, count) for leaf in leaves]
    return [structure.unflatten(column) for column in zip(*columns, strict=True)]


@functools.cache
def of_part(name):
    """The loss of some examples, what is written, and the gradients, without jpipe."""
    case, trainable = case_of(name), case_of(name).options.get("trainable")

    def loss(params, frozen, state, x, targets, key):
        variables = {"params": whole(params, frozen), **state}
        y, new = applied(case.model, variables, x, key, True)
        value = case.loss(y, targets)
        return (value[0] / value[1] if isinstance(value, tuple) else value), new

    find = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(variables, *rest):
        params = variables["params"]
        state = {k: v for k, v in variables.items() if k != "params"}
        return find(free(params, trainable), params, state, *rest)

    return run


def whole(params, frozen):
    """The parameters, of which None are those that are frozen."""
    return jax.tree.map(
        lambda p, f: f if p is None else p, params, frozen, is_leaf=lambda p: p is None
    )


def free(params, trainable):
    """The parameters that are trained, and None for the others."""
    word = trainable.strip("*") if trainable else ""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if word in jax.tree_util.keystr(path) else None, params
    )


def by_hand(name, variables, key, parts=COUNT):
    """The loss of a mini-batch, what is written, and its gradients, without jpipe."""
    case, variables = case_of(name), ref.on_host(variables)
    count = parts if case.by_parts else 1
    losses, news, grads, sizes = [], [], [], []
    for m, (x, targets) in enumerate(split((case.x, case.targets), count)):
        one = of_part(name)(variables, x, targets, jpipe.microbatch_key(key, m))
        (loss, new), grad = ref.on_host(one)
        for column, entry in zip((losses, news, grads), (loss, new, grad), strict=True):
            column.append(entry)
        sizes.append(len(jax.tree.leaves(x)[0]))
    is_mean = case.options.get("reduction", "mean") == "mean"
    weights = np.array(sizes) / sum(sizes) if is_mean else np.full(count, 1 / count)
    old = {name: variables[name] for name in news[0]}
    return mean(weights, losses), merged(weights, old, news), mean(weights, grads)


def mean(weights, trees):
    return jax.tree.map(
        lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)), *trees
    )


def merged(weights, old, news):
    """Statistics of all micro-batches, and the momentum applied once."""
    if not news[0]:
        return {}
    old = flatten_dict(old)
    own = [
        {
            p: (v - MOMENTUM * old[p]) / (1 - MOMENTUM)
            for p, v in flatten_dict(n).items()
        }
        for n in news
    ]
    first = mean(weights, own)
    second = mean(weights, [{p: v**2 for p, v in one.items()} for one in own])
    for *path, last in old:
        if last == "var":
            means = (*path, "mean")
            first[*path, last] += second[means] - first[means] ** 2
    new = {p: MOMENTUM * old[p] + (1 - MOMENTUM) * first[p] for p in old}
    return unflatten_dict({p: v.astype(old[p].dtype) for p, v in new.items()})


# What the others have, these have too: dropout, an encoder and a decoder, statistics,
# both kinds of Flax modules, and the three ways to loop over layers or times.
QUICK = {
    "gpt",
    "translator",
    "resnet",
    "nnx gpt",
    "scanned decoder",
    "nnx.scan",
    "lstm",
}

NAMES = slow_except(QUICK, CASES)


@pytest.mark.parametrize("name", NAMES)
def test_variables_and_outputs_are_those_of_the_model(double, name):
    case, pipe, variables = made(name)
    if isinstance(case.model, nnx.Module):
        expected = {"params": nnx.to_pure_dict(nnx.state(case.model, nnx.Param))}
        stats = nnx.to_pure_dict(nnx.state(case.model, nnx.BatchStat))
        expected |= {"batch_stats": stats} if stats else {}
    else:
        args, kwargs = called(case.x)
        expected = jax.jit(lambda key: case.model.init(key, *args, **kwargs))(KEY)
    ref.assert_equal(variables, expected)
    devices = set().union(*[leaf.devices() for leaf in jax.tree.leaves(variables)])
    assert len(devices) == case.stages
    find = jax.jit(functools.partial(applied, case.model, train=False))
    if name == "vae":  # it draws in evaluation too
        rngs = {"rngs": RNGS}
        parts = enumerate(split(case.x, COUNT))
        own = [find(expected, x, jpipe.microbatch_key(RNGS, m))[0] for m, x in parts]
        y = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *own)
    else:
        rngs, (y, _) = {}, find(expected, case.x, RNGS)
    ref.assert_close(pipe.apply(variables, case.x, **rngs), y, case.close)


GRADIENTS = ["resnet", "two towers", "lora", "nnx cnn"]


@pytest.mark.parametrize("name", slow_except({"lora"}, GRADIENTS))
def test_loss_gradients_and_state_are_those_of_plain_jax(double, name):
    case, pipe, variables = made(name)
    find = pipe.value_and_grad(case.loss, has_state=True, **case.options)
    (loss, new), grads = find(variables, case.x, case.targets, rngs=RNGS)
    expected = by_hand(name, variables, RNGS)
    ref.assert_close((loss, grads), expected[::2], case.close, 1.0)
    ref.assert_close(new, expected[1], case.close)
    trained = free(variables["params"], case.options.get("trainable"))
    ref.assert_equal(
        jax.tree.map(lambda grad: np.array(grad.device.id), grads),
        jax.tree.map(lambda param: np.array(param.device.id), trained),
    )


# A model with statistics is trained in `test_meshes_and_replicas`.
TRAINED = {"gpt", "scanned decoder", "nnx.scan"}


@pytest.mark.parametrize("name", slow_except(TRAINED, CASES))
def test_two_steps_are_those_of_a_plain_loop(double, name):
    """Of the optimizer's state the first moment tells the gradients."""
    _, pipe, variables = made(name)
    two_steps(name, pipe, variables)


def two_steps(name, pipe, variables, parts=COUNT, close=None):
    """Asserts that steps are those of a plain loop; returns the last state."""
    case, trainable = case_of(name), case_of(name).options.get("trainable")
    close = close or case.close
    own = {"variables": variables, "trainable": trainable}
    state = pipe.init_train_state(KEY, case.x, TX, **own)
    step = pipe.train_step(case.loss, TX, **case.options)
    variables, update = ref.on_host(variables), jax.jit(TX.update)
    opt_state = TX.init(free(variables["params"], trainable))
    for number in range(2):
        key = jax.random.fold_in(state.rng, number)
        loss, new, grads = by_hand(name, variables, key, parts)
        updates, opt_state = update(grads, opt_state)
        params = optax.apply_updates(free(variables["params"], trainable), updates)
        variables = {"params": whole(params, variables["params"]), **new}
        state, metrics = step(state, case.x, case.targets)
        ref.assert_close(metrics["loss"], loss, close)
        ref.assert_close(state.opt_state, opt_state, close, 1.0)
    ref.assert_close(state.params, variables["params"], close, 1.0)
    written = {k: v for k, v in variables.items() if k != "params"}
    ref.assert_close(state.model_state, written, close)
    return state


def test_loss_is_behind_the_cut_for_micro_batches_of_any_size(double):
    """Where few bytes cross there is a sum of one example, and of two another one."""
    dense = functools.partial(nn.Dense, 3, dtype=jnp.float64, param_dtype=jnp.float64)

    class Skip(nn.Module):
        @nn.compact
        def __call__(self, x):
            means = jnp.mean(x.reshape(len(x), -1), 1).reshape(-1, 1, 1, 1)
            return dense()(dense()(jnp.tanh(x))) + means

    def loss(y, targets):
        far = -targets + y.reshape(len(y), -1) @ jnp.cos(jnp.arange(18.0))
        return jnp.mean(jnp.sqrt(1 + far**2))

    x, targets = RNG.normal(size=(3, 2, 3, 3)), RNG.normal(size=3)
    pipe = jpipe.pipeline(Skip(), 2, num_stages=3)
    variables = pipe.init(KEY, x)
    wanted = jax.value_and_grad(
        lambda params: loss(Skip().apply({"params": params}, x), targets)
    )(ref.on_host(variables["params"]))
    find = pipe.value_and_grad(loss)
    ref.assert_close(find(variables, x, targets), wanted, ref.FLOAT64)
    assert find.plan.stages[1].sent_bytes == 2 * x[0].nbytes
