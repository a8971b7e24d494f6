"""Flax models of Hugging Face as they are, against plain JAX.

They are of `transformers` 4, which `make test-all` installs in an environment of its
own. The configurations are small and the weights random: nothing is downloaded.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..compiling import log_compiled
from ..programs import ROOT, run

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
    pytest.skip("transformers 5 has no Flax models", allow_module_level=True)
pytestmark = pytest.mark.slow

KEY, COUNT, SIZE, LENGTH, VOCAB = jax.random.key(5), 3, 8, 6, 31
RNG = np.random.default_rng(0)
TOKENS, SOURCE = RNG.integers(1, VOCAB, (2, SIZE, LENGTH), np.int32)
MASK, SOURCE_MASK = np.arange(LENGTH) < RNG.integers(2, LENGTH, (2, SIZE, 1))
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (SIZE, LENGTH))
LABELS = RNG.integers(0, 2, SIZE, np.int32)
# The gradient of a bias of keys is nothing but rounding errors of such terms.
SCALE = 1e-2
entropy = optax.softmax_cross_entropy_with_integer_labels


class Case(NamedTuple):
    """A model of a library, and how it is trained.

    Attributes:
      kind: its class.
      config: its configuration, by the rate of its dropouts.
      inputs: what a call is given, by name.
      not_given: what its module has no default for.
      loss: the total over real tokens or examples and their number, of logits, inputs
        and labels.
      close: how close losses and gradients are.
    """

    kind: str
    config: Callable[[float], Any]
    inputs: dict[str, Any]
    not_given: dict[str, None]
    loss: Callable[[Any, dict[str, Any], Any], tuple[jax.Array, jax.Array]]
    close: float = ref.FLOAT64


def of_next_tokens(logits, inputs, _):
    real = inputs["attention_mask"][:, 1:]
    return (
        entropy(logits[:, :-1], inputs["input_ids"][:, 1:]) * real
    ).sum(), real.sum()


def of_labels(logits, _, labels):
    return entropy(logits, labels).sum(), jnp.int32(len(labels))


def of_target_tokens(logits, inputs, _):
    real = inputs["decoder_attention_mask"]
    shifted = jnp.roll(inputs["decoder_input_ids"], -1, axis=1)
    return (entropy(logits, shifted) * real).sum(), real.sum()


IDS = {"input_ids": TOKENS, "attention_mask": MASK.astype(np.int32)}
CASES = {
    "gpt2": Case(
        "FlaxGPT2LMHeadModel",
        lambda rate: transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=16,
            n_embd=16,
            n_layer=4,
            n_head=2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate),
        ),
        IDS | {"position_ids": POSITIONS},
        {},
        of_next_tokens,
    ),
    "bert": Case(
        "FlaxBertForSequenceClassification",
        lambda rate: transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=rate,
            attention_probs_dropout_prob=rate,
        ),
        IDS | {"token_type_ids": POSITIONS // 3, "position_ids": POSITIONS},
        {"head_mask": None},
        of_labels,
    ),
    "t5": Case(
        "FlaxT5ForConditionalGeneration",
        lambda rate: transformers.T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=rate,
            decoder_start_token_id=0,
        ),
        {
            "input_ids": SOURCE,
            "attention_mask": SOURCE_MASK.astype(np.int32),
            "decoder_input_ids": TOKENS,
            "decoder_attention_mask": MASK.astype(np.int32),
        },
        {},
        of_target_tokens,
        ref.FLOAT32,  # its norms compute their statistics in single precision
    ),
}


@pytest.fixture
def clip(monkeypatch):
    """`jnp.clip` with the names that its bounds had when T5 was written.

    Its module alone sees this one: JAX calls them ``min`` and ``max`` now.
    """
    t5 = pytest.importorskip("transformers.models.t5.modeling_flax_t5")

    def clip(x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)

    monkeypatch.setattr(t5, "jnp", type("jnp", (), {**vars(jnp), "clip": clip}))


@functools.cache
def made(name, rate):
    """A model and its initial parameters, in double precision."""
    case = CASES[name]
    options = {"input_shape": (1, LENGTH), "dtype": jnp.float64}
    model = getattr(transformers, case.kind)(case.config(rate), **options)
    return model, jax.tree.map(lambda leaf: np.asarray(leaf, float), model.params)


def loss_of(name, model):
    """The loss as users write it: with the model called by its own names."""

    def loss(params, inputs, labels, key):
        train = {"dropout_rng": key, "train": True}
        logits = model(**inputs, params=params, **train).logits
        return CASES[name].loss(logits, inputs, labels)

    return loss


def by_hand(name, model, params, count):
    """The loss of a mini-batch and its gradients, of so many parts, without jpipe."""

    def total(params, *args):
        total, weight = loss_of(name, model)(params, *args)
        return total.astype(float), weight

    find = jax.jit(jax.value_and_grad(total, has_aux=True))
    batch = CASES[name].inputs, LABELS
    leaves, structure = jax.tree.flatten(batch)
    columns = zip(*(np.array_split(leaf, count) for leaf in leaves), strict=True)
    parts = [
        find(params, *structure.unflatten(part), jpipe.microbatch_key(KEY, m))
        for m, part in enumerate(columns)
    ]
    weight = sum(weight for (_, weight), _ in parts)
    totals = [(total, grads) for (total, _), grads in parts]
    return jax.tree.map(lambda *leaves: sum(leaves) / weight, *totals)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_the_module_in_a_pipeline(double, clip, name, rate):
    case, (model, params) = CASES[name], made(name, rate)
    x = jpipe.inputs(**case.inputs, **case.not_given)
    pipe = jpipe.pipeline(model.module, COUNT, num_stages=3)
    variables = pipe.place({"params": params}, x)
    assert len({leaf.device for leaf in jax.tree.leaves(variables)}) == 3
    find = pipe.value_and_grad(
        lambda outputs, targets: case.loss(outputs.logits, *targets),
        reduction="weighted",
    )
    targets = case.inputs, LABELS
    loss, grads = find(variables, x, targets, rngs={"dropout": KEY})
    expected = by_hand(name, model, params, COUNT if rate else 1)
    ref.assert_close((loss, grads), expected, case.close, SCALE)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_function_of_the_model(double, clip, name, rate):
    model, params = made(name, rate)
    args = CASES[name].inputs, LABELS, KEY
    options = {"num_stages": 3, "reduction": "weighted"}
    find = jpipe.value_and_grad(loss_of(name, model), COUNT, **options)
    placed = find.place(params, *args)
    assert len({leaf.device for leaf in jax.tree.leaves(placed)}) == 3
    expected = by_hand(name, model, params, COUNT if rate else 1)
    ref.assert_close(find(placed, *args), expected, CASES[name].close, SCALE)


# ------------------------------------------------------------------------------- text

PROMPTS, TEXT_LENGTH = TOKENS[:4, :3], 10
# Of three, two, one and three tokens, behind those that are no text.
TEXT_MASK = np.arange(TEXT_LENGTH) >= np.array([[0], [1], [2], [0]])
TEXT_POSITIONS = np.maximum(TEXT_MASK.cumsum(axis=1) - 1, 0)


@functools.cache
def writer():
    """A GPT-2 whose greedy text has many tokens, and that text by itself alone."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    model = transformers.FlaxGPT2LMHeadModel(config, seed=0)
    mask = TEXT_MASK[:, : PROMPTS.shape[1]]
    options = {"max_length": TEXT_LENGTH, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = jnp.asarray(mask, jnp.int32)
    text = np.asarray(model.generate(PROMPTS, **options).sequences)
    assert len(np.unique(text[:, PROMPTS.shape[1] :])) > 5
    return model, text


def text_inputs(tokens, start, *more):
    """A prompt, or the last tokens, with the mask of the whole text."""
    positions = TEXT_POSITIONS[:, start : start + tokens.shape[1]]
    return jpipe.inputs(tokens, TEXT_MASK.astype(np.int32), positions, *more)


def write(step, state):
    """A greedy text, and what each call of a step compiled.

    Args:
      step: ``(state, tokens, start) -> (logits, state)``.
      state: the first one.
    """
    text, compiled, start = [PROMPTS], [], 0
    while start < TEXT_LENGTH - 1:
        with log_compiled() as names:
            logits, state = step(state, text[-1], start)
        compiled.append(names)
        start += text[-1].shape[1]
        text.append(np.asarray(logits[:, -1:].argmax(-1)))
    return np.concatenate(text, axis=1), compiled


@pytest.mark.parametrize("count", [1, 2])
def test_greedy_text_with_caches_as_variables(count):
    model, expected = writer()
    calls = []

    def count_calls(call, args, kwargs, context):
        calls.extend([1] * isinstance(context.module, type(model.module)))
        return call(*args, **kwargs)

    def step(variables, tokens, start):
        calls.clear()
        x = text_inputs(tokens, start)
        out, state = pipe.apply(variables, x, mutable={"cache": 0}, donate=True)
        num_calls.append(len(calls))
        return out.logits, {**variables, **state}

    num_calls = []
    pipe = jpipe.pipeline(model.module, count, num_stages=2)
    cache = model.init_cache(len(PROMPTS), TEXT_LENGTH)
    variables = {"params": model.params, "cache": cache}
    with nn.intercept_methods(count_calls):
        variables = pipe.place(variables, text_inputs(PROMPTS, 0))
        blocks = variables["cache"]["transformer"]["h"]
        devices = [blocks[f"{i}"]["attn"]["cached_key"].device for i in range(4)]
        assert devices == [jax.devices()[i] for i in (0, 0, 1, 1)]
        text, compiled = write(step, variables)
    assert text.tolist() == expected.tolist()
    # The prompt is traced and compiled, the first token alone, and no more.
    assert all(num_calls[:2])
    assert all(compiled[:2])
    assert not any(num_calls[2:])
    assert not any(compiled[2:])


class WithCaches(nn.Module):
    """The model as it is called outside Flax: it takes caches, and returns them."""

    model: Any

    @nn.compact
    def __call__(self, tokens, mask, positions, caches):
        params = self.param("model", lambda _: self.model.params)
        options = {"params": params, "past_key_values": caches}
        outputs = self.model(tokens, mask, positions, **options)
        return outputs.logits, outputs.past_key_values


@pytest.mark.parametrize("count", [1, 2])
def test_greedy_text_with_caches_as_inputs_and_outputs(count):
    model, expected = writer()
    caches = model.init_cache(len(PROMPTS), TEXT_LENGTH)
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, caches)
    pipe = jpipe.pipeline(
        WithCaches(model),
        count,
        num_stages=2,
        in_axes=jpipe.inputs(0, 0, 0, axes),
        out_axes=(0, axes),
    )
    params = {"params": {"model": model.params}}
    variables = pipe.place(params, text_inputs(PROMPTS, 0, caches))

    def step(caches, tokens, start):
        return pipe.apply(variables, text_inputs(tokens, start, caches))

    text, compiled = write(step, caches)
    assert text.tolist() == expected.tolist()
    assert not any(compiled[2:])


def test_the_program_of_the_page_writes_the_text_of_one_device():
    page = (ROOT / "docs" / "generate.md").read_text()
    (program,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    printed = run("-c", program, devices=2)
    assert re.search(r"all 36 tokens are those of one device", printed)
