"""Text that every machine has: the source of the Python standard library, as bytes."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 256
MAX_FILE_BYTES = 2**16
HELD_BACK_EVERY = 10


class Corpus(NamedTuple):
    """Integers from 0 to 255.

    Attributes:
      training: what a model learns from.
      held_back: whole files that it never sees.
    """

    training: np.ndarray
    held_back: np.ndarray


class Batch(NamedTuple):
    """Windows of a text, integers ``[batch_size, context]``.

    Attributes:
      x: the bytes that a model reads.
      targets: the byte that follows each of them.
    """

    x: np.ndarray
    targets: np.ndarray


def read_corpus() -> Corpus:
    """Reads the library's modules in order of name; every tenth is held back.

    Raises:
      FileNotFoundError: if this Python came without the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # Names that begin with "_" are left out: some of these files describe the machine.
    files = sorted(folder.glob("[a-z]*.py"))
    if len(files) < 2 * HELD_BACK_EVERY:
        raise FileNotFoundError(f"{folder} holds {len(files)} modules: too little text")
    texts = [path.read_bytes()[:MAX_FILE_BYTES] for path in files]
    training = [text for i, text in enumerate(texts) if i % HELD_BACK_EVERY]
    return Corpus(_integers(training), _integers(texts[::HELD_BACK_EVERY]))


def _integers(texts: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)


def random_batches(
    text: np.ndarray, batch_size: int, context: int, seed: int
) -> Iterator[Batch]:
    """Batches of windows at random places, without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield _windows(
            text, rng.integers(len(text) - context, size=batch_size), context
        )


def even_batches(
    text: np.ndarray, batch_size: int, context: int, number: int
) -> list[Batch]:
    """So many batches of windows, spread evenly over the text."""
    last = len(text) - context - 1
    starts = np.linspace(0, last, number * batch_size).astype(int)
    return [_windows(text, some, context) for some in np.split(starts, number)]


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    windows = text[starts[:, None] + np.arange(length + 1)]
    return Batch(windows[:, :-1], windows[:, 1:])


def unigram_bits(training: np.ndarray, batches: Sequence[Batch]) -> float:
    """Bits per byte of a model that knows only how frequent each byte is."""
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1
    bits = -np.log2(counts / counts.sum())
    return float(np.mean([bits[batch.targets] for batch in batches]))
