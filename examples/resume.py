"""Trains on digits and goes on where an earlier run stopped, as if it had not.

A checkpoint holds the train state and the position in the data. One is written every
50 steps, one at the end, and one after SIGTERM, which Slurm and cloud machines send
before they take a machine away. The exit status is 75 if the run was
stopped early: start the same command again, and the losses are those of one run.

    python examples/resume.py                       # stop it, start it again
    python examples/resume.py --preempt-after 30    # sends itself SIGTERM
    python -m jpipe launch --processes 2 examples/resume.py --distributed
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from digits import convolutional_network, cross_entropy, read_digits

import jpipe

BATCH_SIZE, SAVE_EVERY, KEEP, STOPPED_EARLY = 64, 50, 2, 75


def read_batch(
    x: np.ndarray, labels: np.ndarray, position: int
) -> tuple[np.ndarray, np.ndarray]:
    """A batch by the number of those before it; each epoch has an order of its own."""
    epoch, batch = divmod(position, len(x) // BATCH_SIZE)
    order = np.random.default_rng(epoch).permutation(len(x))
    rows = order[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE]
    return x[rows], labels[rows]


def main() -> int:
    """Trains from the last checkpoint on; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=200, help="steps of all runs together")
    add("--folder", type=Path, default=Path("build/resume"), help="of checkpoints")
    add("--preempt-after", type=int, help="the step after which SIGTERM arrives")
    add("--distributed", action="store_true", help="one of several processes")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2 if options.distributed else 4)
    if options.distributed:
        jpipe.distributed()

    stride = max(jax.device_count() // 4, 1)  # some of each process
    devices = (4 * jax.devices()[::stride])[:4]  # with fewer, stages share them
    layers = convolutional_network()
    pipe = jpipe.pipeline(layers, 8, balance=[2, 3, 2, 2], devices=devices)
    x, _, labels, _ = read_digits()
    tx = optax.adamw(1e-3)
    state = pipe.init_train_state(jax.random.key(0), x[:BATCH_SIZE], tx)
    # The position in the data is the number of batches before.
    tree = {"state": state, "position": 0}
    tree = jpipe.checkpoint.restore_latest(options.folder, tree)
    state = tree["state"]
    position = tree["position"]
    if position:
        print(f"restored {options.folder / str(position)}", flush=True)

    step = pipe.train_step(cross_entropy, tx)
    stops = False
    while position < options.steps and not stops:
        state, metrics = step(state, *read_batch(x, labels, position))
        position += 1
        if position % 10 == 0 or options.steps <= 10:
            print(f"step {position}: loss {float(metrics['loss']):.9f}", flush=True)
        if position == options.preempt_after:
            os.kill(os.getpid(), signal.SIGTERM)
        stops = jpipe.preempted()  # in all processes after the same step
        if stops or position % SAVE_EVERY == 0 or position == options.steps:
            tree = {"state": state, "position": position}
            jpipe.checkpoint.save(  # in all processes; one writes
                options.folder, tree, step=position, keep=KEEP, background=True
            )
    jpipe.checkpoint.wait()
    if jax.process_index() == 0:
        print(f"saved {options.folder / str(position)}", flush=True)
    return STOPPED_EARLY if position < options.steps else 0


if __name__ == "__main__":
    sys.exit(main())
