"""Fine-tunes a Flax model of Hugging Face through a pipeline, in three stages.

The model is BERT for classification, as `transformers` has it: its module goes into
`jpipe.pipeline`, its parameters into the train state. Its embeddings are frozen. To be
quick it is small and its weights are random; nothing is downloaded. With a model of the
hub the two lines in `make_model` become

    FlaxBertForSequenceClassification.from_pretrained("google-bert/bert-base-uncased")

It learns whether a sentence has more words of one list than of another.

    pip install -e '.[hugging-face]'      # transformers 4: 5 has no Flax models
    python examples/hugging_face.py
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
import transformers  # pyright: ignore[reportMissingImports]

import jpipe

STAGES, VOCAB_SIZE, LENGTH, BATCH_SIZE = 3, 100, 16, 64
PAD = 0


def make_model() -> Any:
    """A small BERT with random weights: a module, and its parameters."""
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    return transformers.FlaxBertForSequenceClassification(config, seed=0)


def make_batch(rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """Sentences as a tokenizer gives them (``return_tensors="np"``), and labels."""
    tokens = rng.integers(1, VOCAB_SIZE, (BATCH_SIZE, LENGTH), np.int32)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (BATCH_SIZE, 1))
    mask = np.arange(LENGTH) < lengths
    tokens = np.where(mask, tokens, PAD)
    is_first_list = (tokens >= VOCAB_SIZE // 2) & mask
    labels = is_first_list.sum(axis=1) > lengths[:, 0] / 2
    return {"input_ids": tokens, "attention_mask": mask}, labels.astype(np.int32)


def make_inputs(encoding: dict[str, Any]) -> Any:
    """All that the module is called with: the model's own call would add this."""
    shape = encoding["input_ids"].shape
    return jpipe.inputs(
        input_ids=encoding["input_ids"],
        attention_mask=encoding["attention_mask"].astype(np.int32),
        token_type_ids=np.zeros(shape, np.int32),
        position_ids=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        head_mask=None,
    )


def loss_fn(outputs: Any, labels: jax.Array) -> jax.Array:
    """The mean over sentences, in nats; the outputs are those of transformers."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, labels)
    return losses.mean()


def is_trainable(path: tuple[str, ...], _: Any) -> bool:
    """False for the embeddings, such as ``bert/embeddings/word_embeddings``."""
    return "embeddings" not in path


def main() -> None:
    """Fine-tunes, and gives the parameters back to the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    devices = (STAGES * jax.devices())[:STAGES]  # with fewer, stages share them
    rng = np.random.default_rng(0)
    encoding, labels = make_batch(rng)
    x = make_inputs(encoding)
    model = make_model()

    pipe = jpipe.pipeline(model.module, 4, num_stages=STAGES, devices=devices)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = pipe.init_train_state(
        jax.random.key(0),
        x,
        tx,
        variables={"params": model.params},
        trainable=is_trainable,
    )
    step = pipe.train_step(loss_fn, tx, trainable=is_trainable)
    print(pipe, flush=True)
    for number in range(1, steps + 1):
        state, metrics = step(state, x, labels)
        if number % 20 == 0 or number == steps:
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)
        encoding, labels = make_batch(rng)
        x = make_inputs(encoding)

    logits = np.asarray(pipe.apply(state.variables, x).logits)
    model.params = jax.device_get(state.params)  # ready for model.save_pretrained
    expected = np.asarray(model(**encoding).logits)
    print(f"{np.mean(logits.argmax(-1) == labels):.1%} of new sentences are right")
    print(f"the model's own call differs by at most {abs(logits - expected).max():.1e}")


if __name__ == "__main__":
    main()
