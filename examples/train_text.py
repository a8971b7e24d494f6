"""Trains a language model on the Python standard library, in four stages.

The text is the source of the modules that come with Python, byte by byte: nothing is
downloaded. The model is a Transformer of three million parameters. Its stages run on
GPUs where there are any, else on four devices made of the host's CPU; the defaults take
some 80 seconds of processor time.

    python examples/train_text.py
    python examples/train_text.py --schedule gpipe --microbatches 8 --remat full
    python examples/train_text.py --processes 2

At the end one gradient is computed in stages and on one device. The exit status is 1 if
the two differ by more than rounding explains.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

import jax
import numpy as np
import optax
from arrays import largest_difference
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

STAGES, DEPTH, HEADS = 4, 4, 4
BATCH_SIZE, CONTEXT, LEARNING_RATE = 8, 64, 2e-3
STEPS_IN_FLIGHT = 2
ROUNDING = 1e-4  # float32 has 7 digits, and each program adds in its own order


def main() -> int:
    """Trains, evaluates and compares; returns the exit status."""
    begin = time.perf_counter()
    options = parse_options()
    if options.processes > 1 and "JPIPE_PROCESS" not in os.environ:
        launch = ["-m", "jpipe", "launch", "--processes", str(options.processes)]
        return subprocess.call([sys.executable, *launch, *sys.argv])
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES // options.processes)
    if options.processes > 1:
        jpipe.distributed()
        if jax.process_index():  # one of them tells how it goes
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- until the end
    # GPUs else round what they multiply to 11 bits, which would blur the comparison.
    jax.config.update("jax_default_matmul_precision", "highest")

    print("1. reads the Python standard library", flush=True)
    corpus = read_corpus()
    batches = random_batches(corpus.training, BATCH_SIZE, CONTEXT, seed=0)
    first = next(batches)

    print("2. divides the model, and makes its parameters stage by stage", flush=True)
    layers = transformer(VOCAB_SIZE, options.width, DEPTH, HEADS)
    pipe = jpipe.pipeline(
        layers,
        options.microbatches,
        balance=balance(DEPTH, STAGES),
        devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share them
        schedule=options.schedule,
        remat=options.remat,
    )
    tx = make_optimizer(options.steps)
    state = pipe.init_train_state(jax.random.key(0), first.x, tx)
    print(f"\n{pipe}\n", flush=True)

    print("3. compiles the programs of the stages, once", flush=True)
    step = pipe.train_step(cross_entropy, tx)
    compiled = step.compile(state, *first)  # on a terminal it shows a bar
    print(f"   {len(compiled.programs)} programs in {compiled.seconds:.0f} s")

    print(f"4. trains for {options.steps} steps", flush=True)
    state = train(step, state, batches, options.steps)

    held_back = even_batches(corpus.held_back, BATCH_SIZE, CONTEXT, options.evaluations)
    loss = pipe.jit(cross_entropy)
    losses = [loss(pipe.apply(state.variables, x), t) for x, t in held_back]
    bits = np.mean([float(loss) for loss in losses]) / math.log(2)
    print("5. bits per byte, on files that were held back")
    print(f"   frequencies of bytes  {unigram_bits(corpus.training, held_back):.3f}")
    print(f"   this model            {bits:.3f}", flush=True)
    difference = 0.0
    if options.processes == 1:  # of several processes none has all parameters
        print("6. compares a gradient with one device (compiling)", flush=True)
        difference = compare(pipe, jpipe.sequential(layers), state, next(batches))
        print(f"   the largest difference is {difference:.1e} of an array's largest")
    print(f"it took {time.perf_counter() - begin:.0f} s")
    return 0 if difference <= ROUNDING else 1


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW, clipped by the norm over all stages; its rate warms up, then falls."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=LEARNING_RATE / 10,
        peak_value=LEARNING_RATE,
        warmup_steps=math.ceil(steps / 10),
        decay_steps=steps + 1,
        end_value=LEARNING_RATE / 10,
    )
    adamw = optax.adamw(rate, b2=0.98, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all bytes, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(
    step: jpipe.TrainStep, state: jpipe.TrainState, batches: Iterator[Batch], steps: int
) -> jpipe.TrainState:
    """Takes all steps; ten times on the way prints how they go."""
    # A loss is read when later steps are under way, so that no device waits for it.
    unread: deque[tuple[int, jax.Array]] = deque()
    begin = time.perf_counter()
    for number in range(1, steps + 1):
        state, metrics = step(state, *next(batches))
        unread.append((number, metrics["loss"]))
        while len(unread) > (STEPS_IN_FLIGHT if number < steps else 0):
            done, loss = unread.popleft()
            if done % math.ceil(steps / 10) == 0 or done == steps:
                bits = float(loss) / math.log(2)
                speed = done * BATCH_SIZE * CONTEXT / (time.perf_counter() - begin)
                print(f"   step {done} of {steps}: {bits:.2f} bits per byte, ", end="")
                print(f"{speed:,.0f} bytes/s", flush=True)
    return state


def compare(
    pipe: jpipe.Pipeline, one: jpipe.Pipeline, state: jpipe.TrainState, batch: Batch
) -> float:
    """The largest difference between gradients in stages and on one device."""
    _, grads = pipe.value_and_grad(cross_entropy)(state.variables, *batch)
    variables = one.place(state.variables)
    _, expected = one.value_and_grad(cross_entropy)(variables, *batch)
    return largest_difference(grads, expected)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    schedules = sorted(jpipe.schedules.BY_NAME)
    remats = ["min_cut", "dots", "none", "except_last", "full"]
    add("--processes", type=int, choices=[1, 2, 4], default=1, help="with some stages")
    add("--microbatches", type=int, default=4, help="parts that a batch is cut in")
    add("--schedule", choices=schedules, default="1f1b", help="the order of the parts")
    add("--remat", choices=remats, default="min_cut", help="what is kept for B")
    add("--steps", type=int, default=300, help="training steps")
    add("--evaluations", type=int, default=64, help="batches held back")
    add("--width", type=int, default=256, help="numbers that stand for a byte")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
