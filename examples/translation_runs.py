"""Trainings of translators: their programs, their checkpoints, their tests.

A run is a value. Its folder is named after it and holds checkpoints, the curve and,
once it is done, its result, which is not computed again. A checkpoint holds the train
state, the position in the data and the losses so far.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sacrebleu  # pyright: ignore[reportMissingImports]
from messages import LENGTHS, PAD, Batches, Corpus, Pairs, shift_right
from resume import KEEP, STOPPED_EARLY
from rich.progress import track
from translation_report import draw_losses
from translator import Sizes, Translator, count_parameters, translate

import jpipe

STAGES = 2
MICROBATCHES = 2
LEARNING_RATE = 3e-3  # the highest
WARM_UP = 100  # steps
SMOOTHING = 0.1  # of labels
TEMPERATURE = 5.0  # see `messages`
SAVE_EVERY = 500  # steps
LOG_EVERY = 50  # steps
STEPS_IN_FLIGHT = 4  # before the host waits
RESULT = "result.json"
TEST_ROWS = 64  # messages that are translated at once


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
      sizes: the model.
      steps: updates of the optimizer.
      tokens: positions of targets in a batch, padding included.
      seed: the seed of parameters, dropout and batches.
      language: the only language of a bilingual model; empty for all languages.
    """

    sizes: Sizes
    steps: int
    tokens: int
    seed: int = 0
    language: str = ""

    @property
    def name(self) -> str:
        """A name for the folder of the run."""
        sizes = self.sizes
        shape = f"{sizes.layers}x{sizes.hidden}x{sizes.heads}"
        dtype = jnp.dtype(sizes.dtype).name
        words = [self.language or "all", shape, dtype, self.tokens, self.steps]
        return "-".join(map(str, [*words, self.seed]))


class Job(NamedTuple):
    """Programs that are compiled once for all runs of a model.

    Attributes:
      pipe: the model as a pipeline.
      tx: the optimizer.
      step: ``(state, x, targets) -> (state, metrics)``.
    """

    pipe: jpipe.Pipeline
    tx: optax.GradientTransformation
    step: Callable[..., Any]


def loss_fn(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of smoothed losses over the tokens that are no padding, their number."""
    labels = jax.nn.one_hot(targets, logits.shape[-1])
    labels = optax.smooth_labels(labels, SMOOTHING)
    mask = targets != PAD
    losses = optax.softmax_cross_entropy(logits, labels)
    return (losses * mask).sum(), mask.sum()


def learning_rate(step: Any) -> Any:
    """Rises for `WARM_UP` steps, then falls with the root of the step."""
    ratio = (step + 1) / WARM_UP
    return LEARNING_RATE * jnp.minimum(ratio, ratio**-0.5)


@functools.cache
def build_job(sizes: Sizes) -> Job:
    """Builds the pipeline of a model, its optimizer and its step."""
    pipe = jpipe.pipeline(
        Translator(sizes),
        MICROBATCHES,
        num_stages=STAGES,
        devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share them
    )
    adam = optax.adam(learning_rate, b1=0.9, b2=0.98)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
    step = pipe.train_step(loss_fn, tx, reduction="weighted")
    return Job(pipe, tx, step)


def make_inputs(pairs: Pairs) -> Any:
    """The inputs of the model: sources, and targets one to the right."""
    return jpipe.inputs(pairs.source, shift_right(pairs.target))


class Trainer:
    """Runs trainings one after another; each keeps its results and its position."""

    def __init__(
        self, corpus: Corpus, folder: Path, *, preempt_after: int | None = None
    ) -> None:
        """Prepares to stop after SIGTERM.

        Args:
          corpus: the messages.
          folder: a folder for results and checkpoints, one below it for each run.
          preempt_after: a step after which the program sends itself SIGTERM.
        """
        self.corpus = corpus
        self._folder = folder
        self._preempt_after = preempt_after

    def has_result(self, run: Run) -> bool:
        """True if a run is done."""
        return (self._folder / run.name / RESULT).exists()

    def result(self, run: Run, test: Pairs) -> dict[str, Any]:
        """The result of a run: that of an earlier call, else it trains and tests.

        Args:
          run: the training.
          test: the messages that are translated.

        Raises:
          SystemExit: if the run was stopped, with status 75.
        """
        folder = self._folder / run.name
        path = folder / RESULT
        if self.has_result(run):
            return json.loads(path.read_text("utf-8"))
        begin = time.perf_counter()
        state, losses = self.train(run, folder)
        seconds = time.perf_counter() - begin
        result = {
            "model": str(run.sizes),
            "parameters": count_parameters(run.sizes),
            "losses": losses.tolist(),
            "seconds": round(seconds, 1),
            **{name: getattr(run, name) for name in ("steps", "tokens", "seed")},
            **evaluate(build_job(run.sizes), state.variables, self.corpus, test),
        }
        path.write_text(json.dumps(result, ensure_ascii=False), "utf-8")
        draw_losses({run.name: losses.tolist()}, folder / "losses.png")
        return result

    def train(self, run: Run, folder: Path) -> tuple[jpipe.TrainState, np.ndarray]:
        """Trains from the last checkpoint on.

        Args:
          run: the training.
          folder: the folder of its checkpoints.

        Returns:
          The last state, and the loss of each step.

        Raises:
          SystemExit: if the run was stopped, with status 75.
        """
        pairs = self.corpus.parts["training"]
        if run.language:
            index = self.corpus.languages.index(run.language)
            pairs = pairs.select(pairs.languages == index)
        batches = Batches(
            pairs, tokens=run.tokens, temperature=TEMPERATURE, seed=run.seed
        )
        job = build_job(run.sizes)
        key = jax.random.key(run.seed)
        state = job.pipe.init_train_state(key, make_inputs(batches.draw(0)), job.tx)
        tree = {"state": state, "position": 0, "losses": np.zeros(run.steps)}
        tree = jpipe.checkpoint.restore_latest(folder, tree)
        if tree["position"]:
            print(f"restored {folder / str(tree['position'])}", flush=True)
        state = tree["state"]
        losses = np.array(tree["losses"])
        first = int(tree["position"])
        arrays = []  # losses of the steps from `first` on, which may be on their way

        for position in track(range(first, run.steps), run.name):
            batch = batches.draw(position)
            state, metrics = job.step(state, make_inputs(batch), batch.target)
            arrays.append(metrics["loss"])
            if len(arrays) > STEPS_IN_FLIGHT:  # the host runs ahead, but not far
                arrays[-STEPS_IN_FLIGHT].block_until_ready()
            num_done = position + 1
            if num_done % LOG_EVERY == 0 or run.steps <= LOG_EVERY:
                print(f"step {num_done}: loss {float(arrays[-1]):.9f}", flush=True)
            if num_done == self._preempt_after:
                os.kill(os.getpid(), signal.SIGTERM)
            is_stopped = jpipe.preempted()
            is_last = num_done == run.steps
            if is_stopped or is_last or num_done % SAVE_EVERY == 0:
                losses[first:num_done] = [float(loss) for loss in arrays]
                tree = {"state": state, "position": num_done, "losses": losses}
                jpipe.checkpoint.save(folder, tree, step=num_done, keep=KEEP)
                print(f"saved {folder / str(num_done)}", flush=True)
            if is_stopped and not is_last:
                sys.exit(STOPPED_EARLY)
        return state, losses


# ------------------------------------------------------------------------------- tests


def evaluate(job: Job, variables: Any, corpus: Corpus, test: Pairs) -> dict[str, Any]:
    """Translates messages and compares them with the English ones.

    Args:
      job: the programs of the model.
      variables: the variables of the model.
      corpus: the corpus that the messages are of.
      test: the messages.

    Returns:
      The loss per token, without smoothing, BLEU and chrF, of all messages and of those
      of each language, and some translations.
    """
    texts = np.empty(len(test.languages), object)
    total_loss = 0.0
    buckets = np.searchsorted(LENGTHS, test.lengths)
    for bucket, length in enumerate(LENGTHS):
        rows = np.flatnonzero(buckets == bucket)
        for start in range(0, len(rows), TEST_ROWS):
            chosen = rows[start : start + TEST_ROWS]
            # The last batch is filled up, so that all have one shape.
            filled = np.resize(chosen, TEST_ROWS)
            batch = test.select(filled).cut(length)
            logits = job.pipe.apply(variables, make_inputs(batch))
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch.target
            )
            losses = np.where(batch.target == PAD, 0, losses)
            total_loss += float(losses[: len(chosen)].sum())
            tokens = translate(job.pipe, variables, batch.source, length)
            texts[chosen] = corpus.decode(tokens)[: len(chosen)]

    languages = {}
    for index in np.unique(test.languages):
        rows = np.flatnonzero(test.languages == index)
        languages[corpus.languages[index]] = {
            "training": int(corpus.counts[index]),
            "test": len(rows),
            **score([*texts[rows]], [*test.english[rows]]),
        }
    samples = [
        (corpus.languages[test.languages[row]], test.english[row], texts[row])
        for row in range(0, len(texts), max(len(texts) // 20, 1))
    ]
    return {
        "nll": total_loss / int((test.target != PAD).sum()),
        **score([*texts], [*test.english]),
        "languages": languages,
        "samples": samples,
    }


def score(texts: list[str], expected: list[str]) -> dict[str, float]:
    """BLEU and chrF of translations, from 0 to 100."""
    return {
        "bleu": sacrebleu.corpus_bleu(texts, [expected]).score,
        "chrf": sacrebleu.corpus_chrf(texts, [expected]).score,
    }
