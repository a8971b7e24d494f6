"""Trains a language model on the Python standard library, in stages on many devices.

The text is the source of the modules that come with Python, byte by byte: nothing is
downloaded. The model is a Transformer of some three million parameters, cut in four
stages. They run on GPUs where there are any, else on as many devices made of the
host's CPU; the defaults take some 110 seconds of processor time.

    python examples/train_text.py
    python examples/train_text.py --schedule gpipe --microbatches 8 --remat full
    python examples/train_text.py --mesh stage=2,data=2
    python examples/train_text.py --processes 2

With a mesh each stage has several devices, of which each takes a part of every
micro-batch. With several processes each runs some stages, as on several hosts, and none
has all that writing and comparing need.

In one process one more step is taken twice, in stages and on one device, and compared.
The exit status is 1 if the two differ by more than rounding explains.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from stdlib_text import (
    VOCAB_SIZE,
    Batch,
    even_batches,
    random_batches,
    read_corpus,
    unigram_bits,
)
from transformer import balance, transformer

import jpipe

STEPS_IN_FLIGHT = 2

Options = argparse.Namespace
State = jpipe.TrainState
Step = Callable[[State, Any, Any], tuple[State, dict[str, Any]]]


def main() -> int:
    """Trains, evaluates, writes some text and compares; returns the exit status."""
    options = parse_options()
    if options.processes > 1 and "JPIPE_PROCESS" not in os.environ:
        start = "-m", "jpipe", "launch", "--processes", str(options.processes)
        return subprocess.call([sys.executable, *start, *sys.argv])
    corpus = read_corpus()
    shape = options.batch_size, options.context
    batches = random_batches(corpus.training, *shape, options.seed)
    layers = transformer(
        VOCAB_SIZE, options.context, options.width, options.depth, options.heads
    )
    devices = make_devices(
        options.stages, math.prod(options.mesh.values()), options.processes
    )
    in_stages = partial(
        jpipe.pipeline, layers, balance=balance(options.depth, options.stages)
    )
    try:
        pipe = in_stages(
            options.microbatches,
            schedule=options.schedule,
            remat=options.remat,
            **where(devices, options.mesh),
        )
    except ValueError as error:
        sys.exit(str(error))
    tx = make_optimizer(options)
    first = next(batches)
    print("making the parameters", flush=True)
    state = pipe.init_train_state(jax.random.key(options.seed), first.x, tx)
    print(f"{pipe}\n\ncompiling the step", flush=True)
    step = pipe.train_step(cross_entropy, tx)
    made = pipe.compile(step, state, *first)  # on a terminal it says how far it is
    print(f"{len(made.programs)} programs in {made.seconds:.0f} s\n", flush=True)

    state = train(step, state, batches, options)

    held_back = even_batches(corpus.held_back, *shape, options.evaluation_batches)
    number = sum(batch.targets.size for batch in held_back)
    print(f"\nbits per byte, on {number:,} bytes of files that were held back")
    print(f"  unigram model  {unigram_bits(corpus.training, held_back):.3f}")
    print(f"  this model     {model_bits(pipe, state, held_back):.3f}", flush=True)
    if jax.process_count() > 1:
        return 0

    # The same variables serve a pipeline of one micro-batch, here one text.
    writer = in_stages(1, devices=devices[: options.stages])
    text = write(writer, writer.place(state.variables), options)
    print(f"\nwhat the model writes after {options.prompt!r}")
    print("\n".join(f"  | {line}" for line in text.splitlines()), flush=True)

    parts = options.microbatches * options.mesh.get("data", 1)
    one_device = jpipe.sequential(layers, parts, devices=devices[:1])
    # A tenth of the rate at which training ends.
    slack = options.learning_rate / 100
    return 0 if agree(pipe, one_device, state, next(batches), tx, slack) else 1


def make_devices(stages: int, in_mesh: int, processes: int) -> list[Any]:
    """One device per stage; where there are fewer, some serve several stages.

    Args:
      stages: how many there are.
      in_mesh: how many devices a mesh needs.
      processes: how many have them together.
    """
    number = max(stages, in_mesh)
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", -(-number // processes))
    if processes > 1:
        jpipe.distributed()
        if jax.process_index():  # one of them tells how it goes
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- until the end
    # GPUs else round what they multiply to 11 bits, which would blur the comparison.
    jax.config.update("jax_default_matmul_precision", "highest")
    return (number * jax.devices())[:number]


def where(devices: list[Any], mesh: dict[str, int]) -> dict[str, Any]:
    """What `jpipe.pipeline` is told of where stages run."""
    if not mesh:
        return {"devices": devices}
    if len(set(devices)) < len(devices):
        sys.exit(f"--mesh needs {len(devices)} devices, there are {len(set(devices))}")
    along = np.array(devices).reshape(*mesh.values())
    return {"mesh": jax.sharding.Mesh(along, tuple(mesh))}


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW; its rate warms up, then falls along a cosine to a tenth of its peak.

    Gradients are clipped by their norm over all stages.
    """
    warmup = math.ceil(options.steps / 10)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=options.learning_rate / warmup,
        peak_value=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=options.steps + 1,
        end_value=options.learning_rate / 10,
    )
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all bytes, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(
    step: Step, state: State, batches: Iterator[Batch], options: Options
) -> State:
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
        self._task = self._bar.add_task("training", total=steps, news="")
        self._steps = steps
        self._tokens = tokens
        self._done = 0
        self._start = time.perf_counter()
        self._loss = 0.0

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, loss: float) -> None:
        """Shows one more step, its loss averaged with those before."""
        self._done += 1
        self._loss += (loss - self._loss) / min(self._done, 20)
        speed = self._done * self._tokens / (time.perf_counter() - self._start)
        news = f"{self._loss / math.log(2):.2f} bits per byte, {speed:,.0f} tokens/s"
        self._bar.update(self._task, advance=1, news=news)
        if self._bar.disable and self._done % math.ceil(self._steps / 10) == 0:
            print(f"step {self._done} of {self._steps}: {news}", flush=True)


def model_bits(pipe: jpipe.Pipeline, state: State, batches: Sequence[Batch]) -> float:
    """Bits per byte of the model, from forward passes through the pipeline."""
    loss = pipe.jit(cross_entropy)
    losses = [loss(pipe.apply(state.variables, x), targets) for x, targets in batches]
    return float(np.mean(losses)) / math.log(2)


def write(pipe: jpipe.Pipeline, variables: Any, options: Options) -> str:
    """Goes on after the prompt, byte by byte, with what the model finds likely."""
    rng = np.random.default_rng(options.seed)
    text = list(options.prompt.encode())
    for _ in range(options.write):
        seen = text[-options.context :]
        # Always a whole window, so that nothing is compiled again; what fills it does
        # not matter, since no byte reads what follows it.
        window = np.zeros((1, options.context), np.int32)
        window[0, : len(seen)] = seen
        logits = np.asarray(pipe.apply(variables, window))[0, len(seen) - 1]
        likely = np.exp((logits - logits.max()) / options.temperature)
        text.append(int(rng.choice(VOCAB_SIZE, p=likely / likely.sum())))
    return bytes(text).decode(errors="replace")


def agree(
    pipe: jpipe.Pipeline,
    one_device: jpipe.Pipeline,
    state: State,
    batch: Batch,
    tx: optax.GradientTransformation,
    slack: float,
) -> bool:
    """Whether a step in stages is the same step on one device, up to rounding.

    Parameters may differ by ``slack`` beside their own rounding. Adam divides a
    gradient by its usual size; where that is as small as rounding, a weight may move
    otherwise by a part of the learning rate. A wrong update differs by all of it.
    """
    print(
        "\none more step, from the same state: the pipeline and one device (compiling)",
        flush=True,
    )
    moved = one_device.place(state)
    grads, params = _gradients_and_parameters(pipe, state, batch, tx)
    expected_grads, expected = _gradients_and_parameters(one_device, moved, batch, tx)
    parts = [
        _compare("gradients ", grads, expected_grads, 1e-5, 0.0),
        _compare("parameters", params, expected, 1e-6, slack),
    ]
    # Unlike Python's max, NumPy's keeps a NaN, which is not below 1.
    worst = np.max(parts)
    print(
        "Each program adds in its own order, and float32 has 7 digits: ten times what\n"
        f"that explains would be an error; this is {worst:.0%} of that."
    )
    return bool(worst <= 1)


def _gradients_and_parameters(
    pipe: jpipe.Pipeline, state: State, batch: Batch, tx: optax.GradientTransformation
) -> tuple[Any, Any]:
    # No layer draws random numbers. The key is given since the step has one too: then
    # both are the same compiled program.
    gradients = pipe.value_and_grad(cross_entropy)
    _, grads = gradients(state.variables, *batch, rngs=state.rng)
    # Without donation: the same memory may be part of the other pipeline's state.
    new, _ = pipe.train_step(cross_entropy, tx, donate=False)(state, *batch)
    return grads, new.params


def _compare(
    name: str, values: Any, expected: Any, relative: float, absolute: float
) -> float:
    """Prints the largest difference; returns the largest part of what is allowed.

    That is ``relative`` of an array's largest value, and ``absolute`` beside.
    """
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True)
    arrays = [(np.asarray(value), np.asarray(other)) for value, other in pairs]
    tiny = np.finfo(np.float32).tiny
    differences = [np.abs(value - other).max() for value, other in arrays]
    allowed = [relative * np.abs(other).max() + absolute + tiny for _, other in arrays]
    print(f"  {name}  differ by at most {np.max(differences):.1e}", flush=True)
    return float(np.max(np.divide(differences, allowed)))


def parse_options() -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a language model on the Python standard library, in "
        "stages on many devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    schedules = sorted(jpipe.schedules.BY_NAME)
    remats = ["min_cut", "dots", "none", "except_last", "full"]
    whole = _at_least(1)
    add("--stages", type=whole, default=4, help="groups of layers, each on its device")
    add("--mesh", type=_mesh, default={}, help="such as stage=2,data=2")
    add(
        "--processes", type=whole, default=1, help="started here, with some stages each"
    )
    add("--microbatches", type=whole, default=4, help="parts that a batch is cut in")
    add("--schedule", choices=schedules, default="1f1b", help="the order of the parts")
    add("--remat", choices=remats, default="min_cut", help="what is kept for B")
    add("--steps", type=whole, default=300, help="training steps")
    add("--evaluation-batches", type=whole, default=64, help="batches held back")
    add("--batch-size", type=whole, default=8, help="windows of text in a batch")
    add("--context", type=whole, default=64, help="bytes in a window")
    add("--width", type=whole, default=256, help="numbers that stand for a byte")
    add("--depth", type=whole, default=4, help="blocks of the Transformer")
    add("--heads", type=whole, default=4, help="attention heads of a block")
    add("--learning-rate", type=_positive, default=2e-3, help="the highest rate")
    add("--prompt", default="def ", help="what the model goes on from")
    add("--write", type=whole, default=300, help="bytes that the model writes")
    add("--temperature", type=_positive, default=0.7, help="how daringly it writes")
    add("--seed", type=_at_least(0), default=0, help="of weights, batches and writing")
    options = parser.parse_args()
    options.stages = options.mesh.get("stage", options.stages)
    if faults := list(_faults(options)):
        parser.error("; ".join(faults))
    return options


def _faults(options: Options) -> Iterator[str]:
    """What is wrong with options that are fine one by one."""
    if options.depth < options.stages:
        yield f"--depth {options.depth} is less than --stages {options.stages}"
    if options.mesh and "stage" not in options.mesh:
        yield "--mesh has no axis called stage"
    if options.batch_size < options.microbatches:
        yield (
            f"--batch-size {options.batch_size} is less than "
            f"--microbatches {options.microbatches}"
        )
    if options.width % options.heads:
        yield f"--heads {options.heads} does not divide --width {options.width}"
    if not options.prompt:
        yield "--prompt is empty"


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {name: _at_least(1)(size) for name, _, size in pairs}
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} on"
            )
        return int(text)

    return convert


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
