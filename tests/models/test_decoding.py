"""Text token by token: what each call leaves in a cache, the next one reads."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import jpipe

from .. import listing
from .. import reference as ref
from ..compiling import log_compiled

pytestmark = pytest.mark.usefixtures("quick")

KEY = jax.random.key(0)
PROMPTS, LENGTH, WIDTH, VOCAB = 4, 5, 8, 11
TOKENS = jax.random.randint(KEY, (PROMPTS, LENGTH), 0, VOCAB)
CACHE = ["cache"]


class Embed(nn.Module):
    """Tokens and their positions, which it counts."""

    decode: bool = True

    @nn.compact
    def __call__(self, tokens):
        table = self.param("positions", nn.initializers.normal(), (LENGTH, WIDTH))
        start = jnp.zeros((), jnp.int32)
        if self.decode:
            is_made = self.has_variable("cache", "position")
            position = self.variable("cache", "position", lambda: start)
            start = position.value
            if is_made:
                position.value = start + 1
        here = jax.lax.dynamic_slice_in_dim(table, start, tokens.shape[1])
        return nn.Embed(VOCAB, WIDTH)(tokens) + here


class Block(nn.Module):
    decode: bool = True

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(2, decode=self.decode)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


class GPT(nn.Module):
    decode: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = Embed(self.decode)(tokens)
        for _ in range(2):
            x = Block(self.decode)(x)
        return nn.Dense(VOCAB)(x)


class ScannedBlock(nn.Module):
    decode: bool

    @nn.compact
    def __call__(self, x, _):
        return Block(self.decode)(x), None


class ScannedGPT(nn.Module):
    """The caches of all layers are stacked, as their parameters are."""

    decode: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = Embed(self.decode)(tokens)
        options: Any = {
            "variable_axes": {"params": 0, "cache": 0},
            "split_rngs": {"params": True},
            "in_axes": nn.broadcast,
        }
        x, _ = nn.scan(ScannedBlock, length=4, **options)(self.decode)(x, None)
        return nn.Dense(VOCAB)(x)


class NnxBlock(nnx.Module):
    def __init__(self, decode, rngs):
        self.attend = nnx.MultiHeadAttention(2, WIDTH, WIDTH, decode=decode, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.decode = decode
        if decode:
            self.attend.init_cache((PROMPTS, LENGTH, WIDTH))

    def __call__(self, x):
        mask = None if self.decode else nnx.make_causal_mask(x[..., 0])
        return x + self.dense(jnp.tanh(self.attend(x, mask=mask)))


class NnxGPT(nnx.Module):
    def __init__(self, decode=True):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(decode, rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def merge(variables, state):
    """The next variables."""
    if isinstance(variables, dict):
        return {**variables, **state}
    pairs = zip(variables, state, strict=True)
    return tuple({**old, **new} for old, new in pairs)


def decode(pipe, variables, mutable: Any = CACHE, *, length=LENGTH, **options):
    """The logits ``[prompts, length, vocab]``, token by token, and the variables."""
    logits = []
    for i in range(length):
        token = TOKENS[:, i : i + 1]
        y, state = pipe.apply(variables, token, mutable=mutable, **options)
        variables = merge(variables, state)
        logits.append(np.asarray(y))
    return np.concatenate(logits, 1), variables


def decode_alone(model, variables):
    """The same by Flax alone, on one device."""
    logits = []
    apply = jax.jit(functools.partial(model.apply, mutable=CACHE))
    for i in range(LENGTH):
        y, state = apply(variables, TOKENS[:, i : i + 1])
        variables = {**variables, **state}
        logits.append(np.asarray(y))
    return np.concatenate(logits, 1), variables


MODELS = {
    "model": (GPT(), GPT(decode=False)),
    "scanned": (ScannedGPT(), ScannedGPT(decode=False)),
}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_microbatches", "num_stages", "donate"),
    [
        ("model", 1, 2, True),
        ("model", 2, 3, True),
        ("scanned", 2, 2, False),
        pytest.param("model", 2, 2, False, marks=slow),
        pytest.param("model", 3, 2, True, marks=slow),  # of 2, 1 and 1 prompts
        pytest.param("scanned", 1, 2, True, marks=slow),
    ],
)
def test_each_token_and_each_cache_of_a_model_is_that_of_one_device(
    name, num_microbatches, num_stages, donate
):
    model, without_cache = MODELS[name]
    pipe = jpipe.pipeline(model, num_microbatches, num_stages=num_stages)
    variables = pipe.init(KEY, TOKENS)
    alone = jax.device_get(jax.jit(model.init)(KEY, TOKENS))
    ref.assert_close(variables, alone, ref.FLOAT32)
    expected = decode_alone(model, alone)
    logits, variables = decode(pipe, variables, donate=donate)
    ref.assert_close((logits, variables), expected, ref.FLOAT32)
    # Nor does it differ from the whole text at once, without any cache.
    whole = without_cache.apply({"params": alone["params"]}, TOKENS)
    ref.assert_close(logits, np.asarray(whole), 2 * ref.FLOAT32)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_each_layer_of_a_list_has_its_cache(num_microbatches):
    layers = [Embed(), Block(), Block(), nn.Dense(VOCAB)]
    pipe = jpipe.pipeline(layers, num_microbatches, balance=[2, 2])
    variables = pipe.init(KEY, TOKENS)
    expected, alone = TOKENS, jax.device_get(variables)
    whole = [Embed(decode=False), *[Block(decode=False)] * 2, nn.Dense(VOCAB)]
    for layer, entry in zip(whole, alone, strict=True):
        expected = layer.apply({"params": entry["params"]}, expected)
    logits, variables = decode(pipe, variables, donate=num_microbatches == 2)
    ref.assert_close(logits, np.asarray(expected), 2 * ref.FLOAT32)
    assert [int(variables[0]["cache"]["position"])] == [LENGTH]
    assert [*variables[3]] == ["params"]
    for i, stage in enumerate([0, 0, 1]):
        for leaf in jax.tree.leaves(variables[i]["cache"]):
            assert leaf.devices() == {jax.devices()[stage]}


@pytest.mark.parametrize(
    ("is_list", "num_microbatches", "mutable"),
    [(False, 1, "cache"), (False, 2, {"cache": 0}), (True, 2, {"cache": 0})],
)
def test_caches_that_nnx_modules_hold(is_list, num_microbatches, mutable):
    model = NnxGPT()
    pipe = jpipe.pipeline(model, num_microbatches, num_stages=2)
    if is_list:
        layers = [model.embed, *model.blocks, model.head]
        pipe = jpipe.pipeline(layers, num_microbatches, balance=[2, 3])
    variables = pipe.init(None, TOKENS[:, :1])
    logits, variables = decode(pipe, variables, mutable, donate=True)
    whole = NnxGPT(decode=False)
    ref.assert_close(logits, np.asarray(whole(TOKENS)), 2 * ref.FLOAT32)
    # The module itself goes on from the cache that it left.
    (again,) = {int(x) for x in jax.tree.leaves(variables) if x.ndim == 0}
    assert again == LENGTH


def programs(pipe, variables, token, **options):
    """The list of instructions of a call."""
    specialization = pipe._pipelined_model.forward(
        variables, token, None, train=False, **options
    )
    return specialization.program_overwriting_state


@pytest.mark.parametrize("model", [GPT(), ScannedGPT()], ids=["model", "scanned"])
def test_activations_alone_cross_and_caches_are_overwritten(model):
    pipe = jpipe.pipeline(model, 1, num_stages=2)
    variables = pipe.init(KEY, TOKENS)
    token = TOKENS[:, :1]
    _, variables = decode(pipe, variables, length=1)
    mutable = jpipe._arguments._mutable.read_mutable(CACHE)
    program = programs(pipe, variables, token, mutable=mutable)
    assert [move[3] for move in listing.moves(program)] == [PROMPTS * WIDTH * 4]
    num_arrays = len(listing.leaves_of(variables["cache"]))
    assert sum(len(x.donates) for x in program.instructions) == num_arrays
    old = jax.tree.leaves(variables["cache"])
    decode(pipe, variables, length=1, donate=True)
    assert all(leaf.is_deleted() for leaf in old)


def test_after_compile_no_token_compiles():
    pipe = jpipe.pipeline(GPT(), 2, num_stages=2)
    variables = pipe.init(KEY, TOKENS)
    report = pipe.compile(variables, TOKENS[:, :1], mutable=CACHE, donate=True)
    assert sum(x.calls for x in report.programs if "forward" in x.name) == 4
    tokens = [TOKENS[:, i : i + 1] for i in range(3)]
    with log_compiled() as compiled:
        for token in tokens:
            y, state = pipe.apply(variables, token, mutable=CACHE, donate=True)
            variables = merge(variables, state)
    assert compiled == []
    assert y.shape == (PROMPTS, 1, VOCAB)


@pytest.mark.parametrize("axis", ["data", pytest.param("model", marks=slow)])
def test_stages_of_several_devices(axis):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    pipe = jpipe.pipeline(GPT(), 2, num_stages=2, mesh=Mesh(devices, ("stage", axis)))
    variables = pipe.init(KEY, TOKENS)
    expected = decode_alone(GPT(), jax.device_get(variables))
    found = decode(pipe, variables)
    ref.assert_close(found, expected, ref.FLOAT32)


class Averaged(nn.Module):
    """The mean of all vectors so far; the mask is as long as the cache, if it has one.

    So a prompt and the mask of a whole text are no input of an initialization.
    """

    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        is_made = self.has_variable("cache", "vectors")
        vectors = self.variable("cache", "vectors", jnp.zeros, x.shape)
        count = self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
        if is_made:
            start = (0, count.value, 0)
            x = jax.lax.dynamic_update_slice(vectors.value, x, start)
            vectors.value = x
            count.value += tokens.shape[1]
        x = x * mask[..., None]
        return nn.Dense(VOCAB)(x.sum(axis=1))


def test_a_prompt_and_the_mask_of_a_whole_text():
    mask = jnp.arange(LENGTH) < jnp.array([[3], [5], [4], [2]])
    pipe = jpipe.pipeline(Averaged(), 2, num_stages=2)
    alone = jax.device_get(Averaged().init(KEY, TOKENS, mask))
    embed, dense = (alone["params"][name] for name in ("Embed_0", "Dense_0"))
    x = jpipe.inputs(TOKENS[:, :3], mask)
    empty = jax.tree.map(jnp.zeros_like, alone["cache"])
    variables = pipe.place({"params": alone["params"], "cache": empty}, x)
    for stop, inputs in ((3, x), (4, jpipe.inputs(TOKENS[:, 3:4], mask))):
        y, state = pipe.apply(variables, inputs, mutable={"cache": 0})
        variables = merge(variables, state)
        vectors = embed["embedding"][TOKENS[:, :stop]] * mask[:, :stop, None]
        expected = vectors.sum(1) @ dense["kernel"] + dense["bias"]
        ref.assert_close(y, expected, ref.FLOAT32)
    assert int(variables["cache"]["count"]) == 4


@slow
def test_replicas_of_stages():
    pipe = jpipe.pipeline(GPT(), 4, num_stages=2, replicas=[2, 1])
    variables = pipe.init(KEY, TOKENS)
    expected = decode_alone(GPT(), jax.device_get(variables))
    ref.assert_close(decode(pipe, variables), expected, ref.FLOAT32)


def test_what_a_call_does_not_change_is_returned_as_it_is():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("counts", "calls", jnp.zeros, (), jnp.int32)
            if not self.is_initializing():
                count.value += 1
            return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))

    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    x = jnp.ones((4, 3))
    variables = pipe.init(KEY, x)
    for count in (1, 2):
        _, state = pipe.apply(variables, x, mutable=["counts", "batch_stats", "none"])
        assert set(state) == {"counts", "batch_stats"}
        assert int(state["counts"]["calls"]) == count
        ref.assert_close(state["batch_stats"], variables["batch_stats"], 0)
        variables = merge(variables, state)


# --------------------------------------------------------------------------- refusals


class Summed(nn.Module):
    """It adds up examples, which are other ones in each micro-batch."""

    @nn.compact
    def __call__(self, x):
        total = self.variable("sums", "total", jnp.zeros, (3,))
        if not self.is_initializing():
            total.value += x.sum(0)
        return nn.Dense(3)(x)


def test_state_of_all_examples_needs_one_micro_batch():
    x = jnp.ones((4, 3))
    pipe = jpipe.pipeline([Summed(), nn.Dense(3)], 2)
    variables = pipe.init(KEY, x)
    says = r"no row for each is another.*variables\[0\]\['sums'\]\['total'\] of shape"
    with pytest.raises(ValueError, match=f"(?s){says}"):
        pipe.apply(variables, x, mutable="sums")
    pipe = jpipe.pipeline([Summed(), nn.Dense(3)], 1, balance=[1, 1])
    _, state = pipe.apply(pipe.place(variables), x, mutable="sums")
    ref.assert_close(state[0]["sums"]["total"], jnp.full(3, 4.0), 0)
    assert state[1] == {}


def test_the_axis_of_a_cache_of_nnx_is_not_guessed():
    pipe = jpipe.pipeline(NnxGPT(), 2, num_stages=2)
    variables = pipe.init(None, TOKENS[:, :1])
    says = r"type it, as in (mutable=\{'cache': 0\}).*cached_key'\] of shape \(4, 5, 2"
    with pytest.raises(ValueError, match=f"(?s){says}") as refusal:
        pipe.apply(variables, TOKENS[:, :1], mutable=CACHE)
    typed = re.search(says, str(refusal.value), re.DOTALL)
    assert typed
    options = eval(f"dict({typed[1]})")
    y, _ = pipe.apply(variables, TOKENS[:, :1], **options)
    assert y.shape == (PROMPTS, 1, VOCAB)


def test_an_input_that_is_none_of_an_initialization_is_told_with_its_error():
    mask = jnp.ones((PROMPTS, LENGTH), bool)
    pipe = jpipe.pipeline(Averaged(), 2, num_stages=2)
    variables = pipe.init(KEY, jpipe.inputs(TOKENS, mask))
    says = r"type it, as in mutable=\{'cache': 0\}.*\['vectors'\] of shape \(4, 5, 8\)"
    why = r"The initialization with this input says: mul got incompatible shapes"
    with pytest.raises(ValueError, match=f"(?s){says}.*{why}"):
        pipe.apply(variables, jpipe.inputs(TOKENS[:, :3], mask), mutable=CACHE)


def test_a_cache_has_a_row_for_each_example():
    pipe = jpipe.pipeline([Block(), nn.Dense(VOCAB)], 2, balance=[1, 1])
    variables = pipe.init(KEY, jnp.ones((PROMPTS, LENGTH, WIDTH)))
    says = r"x has 2 examples, and state needs a row for each.*\(4, 5, 2, 4\), axis 0"
    with pytest.raises(ValueError, match=f"(?s){says}"):
        pipe.apply(variables, jnp.ones((2, 1, WIDTH)), mutable=CACHE)


def test_a_call_that_would_lose_a_cache_says_what_to_type():
    token = TOKENS[:, :1]
    says = r"y, state = pipe\.apply\(variables, x, mutable=\['cache'\]\)"
    layers = [Embed(), Block(), nn.Dense(VOCAB)]
    for pipe in (
        jpipe.pipeline(GPT(), 1, num_stages=1),
        jpipe.pipeline(layers, 1, balance=[1, 2]),
    ):
        variables = pipe.init(KEY, TOKENS)
        with pytest.raises(Exception, match=says):
            pipe.apply(variables, token)
    pipe = jpipe.pipeline(NnxGPT(), 1, num_stages=2)
    variables = pipe.init(None, token)
    with pytest.warns(UserWarning, match=says):
        pipe.apply(variables, token)


def test_errors_of_models_with_caches_are_those_of_the_user():
    with pytest.raises(ValueError, match=r"9 stages need 9 devices, there are \d"):
        jpipe.pipeline(GPT(), 2, num_stages=9).init(KEY, TOKENS)
    pipe = jpipe.pipeline(GPT(), 2, num_stages=2)
    variables = pipe.init(KEY, TOKENS)
    with pytest.raises(Exception, match=r"mutable=\['cache'\]"):
        pipe.apply(variables, TOKENS[:, :1])


def test_a_cache_is_no_mean_over_micro_batches():
    layers = [Embed(), Block(), nn.Dense(VOCAB)]
    pipe = jpipe.pipeline(layers, 2, balance=[1, 2])
    variables = pipe.init(KEY, TOKENS[: PROMPTS // 2])
    find = pipe.value_and_grad(ref.mse, has_state=True)
    says = r"rows for each example.*mutable=\['cache'\].*layer 1 \(Block\) writes cache"
    with pytest.raises(ValueError, match=f"(?s){says}"):
        find(variables, TOKENS[:, :1], jnp.zeros((PROMPTS, 1, VOCAB)))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mutable": True}, ValueError, "names of the collections.*mutable=.'cache'"),
        ({"mutable": "params"}, ValueError, "changed by the optimizer alone"),
        ({"mutable": 3}, TypeError, r"mutable=3: needs names.*\{'cache': 0\}"),
        ({"donate": True}, ValueError, r"type mutable=\['cache'\] too"),
        (
            {"mutable": CACHE, "train": True},
            ValueError,
            r"value_and_grad\(\.\.\., has_state=True\)",
        ),
        ({"mutable": {"cache": "a"}}, ValueError, "mutable: 'a' is neither an axis"),
    ],
)
def test_options_that_do_not_go_together(options, error, says):
    pipe = jpipe.pipeline([Embed(), nn.Dense(VOCAB)], 2, balance=[1, 1])
    variables = pipe.init(KEY, TOKENS)
    with pytest.raises(error, match=says):
        pipe.apply(variables, TOKENS[:, :1], **options)
