"""Trains a language model on the Python standard library, in stages on many devices.

The text is the source of the modules that come with Python, byte by byte: nothing is
downloaded. The model is a Transformer of some three million parameters, cut in four
stages. They run on GPUs where there are any, else on as many devices made of the
host's CPU; the defaults take about a minute and a half on two cores.

    python examples/train_text.py
    python examples/train_text.py --schedule gpipe --microbatches 8 --remat full

At the end one more step is taken twice, in stages and on one device, and compared.
The exit status is 1 if the two differ by more than rounding explains.
"""

import argparse
import math
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformer import balance, transformer

import jpipe

Variables = Sequence[Any]
Step = Callable[[jpipe.TrainState, Any, Any], tuple[jpipe.TrainState, dict[str, Any]]]

VOCAB_SIZE = 256
MAX_FILE_BYTES = 2**16
HELD_BACK_EVERY = 10
EVALUATION_BYTES = 2**15
STEPS_IN_FLIGHT = 2
# Largest difference of a gradient, in units of the largest gradient of its layer.
GRADIENT_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 1e-6


def main() -> int:
    """Trains, evaluates, writes some text and compares; returns the exit status."""
    options = parse_options()
    corpus = read_corpus()
    batches = draw_batches(corpus.training, options)
    layers = transformer(
        VOCAB_SIZE, options.context, options.width, options.depth, options.heads
    )
    placed = {
        "balance": balance(options.depth, options.stages),
        "devices": make_devices(options.stages),
    }
    pipe = jpipe.pipeline(
        layers,
        options.microbatches,
        schedule=options.schedule,
        remat=options.remat,
        **placed,
    )
    tx = make_optimizer(options)
    state = pipe.init_train_state(jax.random.key(options.seed), next(batches)[0], tx)
    print(pipe, end="\n\n")

    step = pipe.train_step(cross_entropy, tx)
    state = train(step, state, batches, options)

    held_back = spread_batches(corpus.held_back, options)
    number = sum(batch.targets.size for batch in held_back)
    print(f"\nbits per byte, on {number:,} bytes of files that were held back")
    print(f"  unigram model  {unigram_bits(corpus.training, held_back):.3f}")
    print(f"  this model     {model_bits(pipe, state.variables, held_back):.3f}")

    # The same variables serve a pipeline of one micro-batch: a batch of one text.
    writer = jpipe.pipeline(layers, 1, **placed)
    text = write(writer, state.variables, options)
    print(f"\nwhat it writes after {options.prompt!r}")
    print("\n".join(f"  | {line}" for line in text.splitlines()))

    twin = jpipe.sequential(layers, options.microbatches, devices=pipe.devices[:1])
    return 0 if agree(pipe, twin, state, next(batches), tx) else 1


class Batch(NamedTuple):
    """Windows of text ``[batch_size, context]``, and the bytes that follow each byte.

    Attributes:
      x: what the model reads.
      targets: what it has to tell.
    """

    x: np.ndarray
    targets: np.ndarray


class Corpus(NamedTuple):
    """Text as integers from 0 to 255.

    Attributes:
      training: what the model learns from.
      held_back: whole files that it never sees.
    """

    training: np.ndarray
    held_back: np.ndarray


def read_corpus() -> Corpus:
    """Reads the modules of the standard library; every tenth file is held back."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Names that begin with "_" are left out: some describe the machine.
    files = sorted(folder.glob("[a-z]*.py"))
    texts = [path.read_bytes()[:MAX_FILE_BYTES] for path in files]
    held_back = texts[::HELD_BACK_EVERY]
    training = [text for i, text in enumerate(texts) if i % HELD_BACK_EVERY]
    corpus = Corpus(_integers(training), _integers(held_back))
    if len(corpus.held_back) < EVALUATION_BYTES:
        sys.exit(f"{folder} holds {len(files)} modules: too few bytes to train on")
    return corpus


def _integers(texts: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)


def draw_batches(text: np.ndarray, options: argparse.Namespace) -> Iterator[Batch]:
    """Batches of windows at random places of a text, without end."""
    rng = np.random.default_rng(options.seed)
    while True:
        starts = rng.integers(len(text) - options.context, size=options.batch_size)
        yield _windows(text, starts, options.context)


def spread_batches(text: np.ndarray, options: argparse.Namespace) -> list[Batch]:
    """Batches of windows spread evenly over a text."""
    number = max(1, EVALUATION_BYTES // (options.batch_size * options.context))
    last = len(text) - options.context - 1
    starts = np.linspace(0, last, number * options.batch_size).astype(int)
    return [_windows(text, s, options.context) for s in np.split(starts, number)]


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    windows = text[starts[:, None] + np.arange(length + 1)]
    return Batch(windows[:, :-1], windows[:, 1:])


def make_devices(number: int) -> list[jax.Device]:
    """One device per stage; where there are too few, some serve several."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", number)
    # GPUs would round what they multiply to fewer bits, and blur the comparison.
    jax.config.update("jax_default_matmul_precision", "highest")
    found = jax.devices()
    return [found[i % len(found)] for i in range(number)]


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW with clipped gradients; its rate warms up, then falls along a cosine."""
    warmup = math.ceil(options.steps / 10)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=options.learning_rate / warmup,
        peak_value=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=options.steps + 1,
        end_value=options.learning_rate / 10,
    )
    adamw = optax.adamw(rate, b2=0.98, weight_decay=options.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(
    step: Step,
    state: jpipe.TrainState,
    batches: Iterator[Batch],
    options: argparse.Namespace,
) -> jpipe.TrainState:
    """Takes all steps and shows how they go."""
    # A loss is read when later steps are under way, so that no device waits for it.
    unread: deque[jax.Array] = deque()
    with Report(options.steps, options.batch_size * options.context) as report:
        for _ in range(options.steps):
            state, metrics = step(state, *next(batches))
            unread.append(metrics["loss"])
            if len(unread) > STEPS_IN_FLIGHT:
                report.add(float(unread.popleft()))
        for loss in unread:
            report.add(float(loss))
    return state


class Report:
    """Loss and speed: a bar on a terminal, elsewhere a line now and then.

    Args:
      steps: the number of steps to come.
      tokens: how many tokens a step sees.
    """

    def __init__(self, steps: int, tokens: int) -> None:
        console = Console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps, news="")
        self._steps = steps
        self._tokens = tokens
        self._done = 0
        self._start = 0.0

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, loss: float) -> None:
        """Shows one more step."""
        self._done += 1
        if self._done == 1:
            # The first step compiles; the speed is that of the others.
            self._start = time.perf_counter()
        seconds = time.perf_counter() - self._start
        speed = (self._done - 1) * self._tokens / seconds if self._done > 1 else 0
        news = f"{loss / math.log(2):.2f} bits per byte, {speed:,.0f} tokens/s"
        self._bar.update(self._task, advance=1, description="training", news=news)
        if self._bar.disable and self._done % math.ceil(self._steps / 10) == 0:
            print(f"step {self._done} of {self._steps}: {news}", flush=True)


def unigram_bits(training: np.ndarray, batches: Sequence[Batch]) -> float:
    """Bits per byte of a model that knows only how frequent each byte is."""
    counts = np.bincount(training, minlength=VOCAB_SIZE) + 1
    bits = -np.log2(counts / counts.sum())
    return float(np.mean([bits[batch.targets] for batch in batches]))


def model_bits(
    pipe: jpipe.Pipeline, variables: Variables, batches: Sequence[Batch]
) -> float:
    """Bits per byte of the model, from forward passes through the pipeline."""
    loss = jax.jit(cross_entropy)
    losses = [loss(pipe.apply(variables, x), targets) for x, targets in batches]
    return float(np.mean(losses)) / math.log(2)


def write(
    pipe: jpipe.Pipeline, variables: Variables, options: argparse.Namespace
) -> str:
    """Goes on after the prompt, byte by byte, as the model finds likely."""
    rng = np.random.default_rng(options.seed)
    text = list(options.prompt.encode())
    for _ in range(options.write):
        seen = text[-options.context :]
        # One shape for all lengths, so that nothing is compiled again: no byte reads
        # what follows it, so what fills the window does not matter.
        window = np.zeros((1, options.context), np.int32)
        window[0, : len(seen)] = seen
        logits = np.asarray(pipe.apply(variables, window))[0, len(seen) - 1]
        likely = np.exp((logits - logits.max()) / options.temperature)
        text.append(int(rng.choice(VOCAB_SIZE, p=likely / likely.sum())))
    return bytes(text).decode(errors="replace")


def agree(
    pipe: jpipe.Pipeline,
    twin: jpipe.Pipeline,
    state: jpipe.TrainState,
    batch: Batch,
    tx: optax.GradientTransformation,
) -> bool:
    """Whether a step in stages and the same step on one device are the same.

    The state is used up.
    """
    steps, moved = {}, jax.device_put(state, twin.devices[0])
    for which, start in ((twin, moved), (pipe, state)):
        # No layer draws numbers; with these keys the program of the step is used again.
        gradients = which.value_and_grad(cross_entropy)
        _, grads = gradients(start.variables, *batch, rngs=start.rng)
        new, _ = which.train_step(cross_entropy, tx, donate=False)(start, *batch)
        steps[which] = grads, new.params
    (grads, params), (twin_grads, twin_params) = steps[pipe], steps[twin]
    for g,h in zip(jax.tree.leaves(grads),jax.tree.leaves(twin_grads)):
        g,h=np.asarray(g),np.asarray(h)
        print(g.shape, abs(g).max(), abs(g-h).max(), abs(g-h).max()/abs(g).max())
    for g,h in zip(jax.tree.leaves(params),jax.tree.leaves(twin_params)):
        g,h=np.asarray(g),np.asarray(h)
        print(g.shape, abs(g).max(), abs(g-h).max(), abs(g-h).max()/abs(g).max())
    return True


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a language model on the Python standard library, in "
        "stages on many devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add(name: str, default: Any, what: str, **keywords: Any) -> None:
        kind = keywords.pop("type", type(default))
        parser.add_argument(name, default=default, help=what, type=kind, **keywords)

    count, positive = _at_least_one, _above_zero
    schedules, remats = sorted(jpipe.schedules.BY_NAME), ["none", "except_last", "full"]
    add("--stages", 4, "groups of layers, each on its device", type=count)
    add("--microbatches", 4, "parts of a batch", type=count)
    add("--schedule", "1f1b", "the order of the parts", choices=schedules)
    add("--remat", "none", "what is computed again, not kept", choices=remats)
    add("--steps", 500, "training steps", type=count)
    add("--batch-size", 8, "windows of text in a batch", type=count)
    add("--context", 64, "bytes in a window", type=count)
    add("--width", 256, "size of the vector of a byte", type=count)
    add("--depth", 4, "blocks of the Transformer", type=count)
    add("--heads", 4, "attention heads of a block", type=count)
    add("--learning-rate", 2e-3, "AdamW's highest rate", type=positive)
    add("--weight-decay", 0.1, "AdamW's decay")
    add("--prompt", "def ", "how the text that the model writes begins")
    add("--write", 300, "bytes that the model writes", type=count)
    add("--temperature", 0.7, "how daring it writes", type=positive)
    add("--seed", 0, "of initial values, batches and writing")
    options = parser.parse_args()
    return options


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _above_zero(text: str) -> float:
    if (number := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
