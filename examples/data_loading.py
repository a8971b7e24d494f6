"""Feeds a pipeline with Grain: shuffled, augmented, prefetched, in whole batches.

* Shuffling: each epoch has another order, which follows from a seed.
* Prefetch: threads make the next batches while the devices run a step.
* Last partial batch: training drops it, and another order drops other images.
  Evaluation fills it up with images of weight 0, so that all batches have one shape:
  another shape would be another program to compile.
* Processes: a pipeline over several hosts is ONE consumer. Each process reads the same
  batches, from the same seed. Do not give each a shard of the data, as data-parallel
  programs do: the inputs of one process would meet the targets of another.
* Position: `iterator.get_state()` is a dictionary for `json`, to save by a checkpoint.

    python examples/data_loading.py
"""

import argparse
from typing import Any

import grain  # pyright: ignore[reportMissingImports]
import jax
import numpy as np
import optax
from digits import convolutional_network, cross_entropy, read_digits

import jpipe

SEED, BATCH_SIZE = 0, 64


def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Shifts an image by a pixel at most, in a direction that Grain's seed decides."""
    shift = rng.integers(-1, 2, size=2)
    return {**example, "image": np.roll(example["image"], shift, axis=(0, 1))}


def make_examples(x: np.ndarray, labels: np.ndarray) -> grain.MapDataset:
    """The images one by one; any class with `__len__` and `__getitem__` would do."""
    pairs = zip(x, labels, strict=True)
    return grain.MapDataset.source(
        [{"image": image, "label": label, "weight": 1.0} for image, label in pairs]
    )


def training_batches(x: np.ndarray, labels: np.ndarray) -> grain.DatasetIterator:
    """Endless batches, made ahead by four threads."""
    dataset = (
        make_examples(x, labels)
        .seed(SEED)  # the same in all processes
        .shuffle()
        .repeat()  # each repetition has an order of its own
        .random_map(augment)
        .batch(BATCH_SIZE, drop_remainder=True)
    )
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    return iter(dataset.to_iter_dataset(options))


def evaluation_batches(x: np.ndarray, labels: np.ndarray) -> grain.DatasetIterator:
    """All images once; the last batch is filled up with images of weight 0."""
    padding = -len(x) % BATCH_SIZE
    examples = make_examples(x, labels)
    first: Any = examples[0]
    empty = {**first, "weight": 0.0}
    padded = grain.MapDataset.concatenate(
        [examples, grain.MapDataset.source([empty] * padding)]
    )
    return iter(padded.batch(BATCH_SIZE).to_iter_dataset())


def main() -> None:
    """Trains, evaluates, and shows that the position in the data can be restored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 4)
    devices = (4 * jax.devices())[:4]  # with fewer, stages share them
    layers = convolutional_network()
    pipe = jpipe.pipeline(layers, 8, balance=[2, 3, 2, 2], devices=devices)
    x, x_test, labels, labels_test = read_digits()
    tx = optax.adamw(1e-3)
    state = pipe.init_train_state(jax.random.key(0), x[:BATCH_SIZE], tx)
    step = pipe.train_step(cross_entropy, tx)

    batches = training_batches(x, labels)
    for number in range(1, steps + 1):
        batch = next(batches)
        state, metrics = step(state, batch["image"], batch["label"])
        if number % 50 == 0 or number == steps:
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)

    @pipe.jit
    def count_right(logits, labels, weights):
        return ((logits.argmax(axis=-1) == labels) * weights).sum(), weights.sum()

    right = number = 0.0
    for batch in evaluation_batches(x_test, labels_test):
        logits = pipe.apply(state.variables, batch["image"])
        counts = count_right(logits, batch["label"], batch["weight"])
        right += float(counts[0])
        number += float(counts[1])
    print(f"{right / number:.1%} of {number:.0f} unseen images are named rightly")

    position = batches.get_state()  # saved with the train state, see resume.py
    expected = next(batches)["label"]
    resumed = training_batches(x, labels)
    resumed.set_state(position)
    np.testing.assert_array_equal(next(resumed)["label"], expected)
    print("a second iterator goes on at the same batch")


if __name__ == "__main__":
    main()
