"""One of several processes that train, save and go on, of which one may fail.

    python -m jpipe launch --processes 3 tests/faults/program.py FOLDER [FAILURE]

A failure is ``process:moment:act``, such as ``1:step:kill``: see `fail`.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

STEPS, SAVE_EVERY, FAILING_STEP = 8, 3, 5
STOPPED_EARLY = 75
# The seconds for which a process that is late waits before it joins the others.
SECONDS_LATE = 3.0
# The seconds for which a process is stopped that goes on then.
SECONDS_PAUSED = 5
# The seconds for which a worker outlives a process that is killed.
SECONDS_OF_ORPHAN = 25
_stops = threading.Event()


def fail(act: str) -> None:
    """Fails in the way that has this name, and prints when."""
    print(f"fails at {time.time()}", flush=True)
    match act:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "orphan":  # its worker has copies of its connections
            if os.fork() == 0:
                os.closerange(0, 3)
                time.sleep(SECONDS_OF_ORPHAN)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pause":
            wake = f"sleep {SECONDS_PAUSED}; kill -CONT {os.getpid()}"
            with subprocess.Popen(["sh", "-c", wake]):
                os.kill(os.getpid(), signal.SIGSTOP)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "raise":
            raise ZeroDivisionError("by a test")
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case "leave":
            _stops.set()
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "hangup":
            os.kill(os.getpid(), signal.SIGHUP)
        case "pass":
            pass
        case _:
            raise ValueError(act)


def main(folder: str, failure: str = "none:none:none", *_job: str) -> None:
    """Trains until the end, or until it is told to end.

    Args:
      folder: where the state and the results are.
      failure: the failure.
      _job: by which its processes are known.
    """
    process, moment, act = failure.split(":")
    fails = os.environ.get("JPIPE_PROCESS", "0") == process

    def come_to(reached: str) -> None:
        print(f"comes to {reached} in {os.getpid()}", flush=True)
        if fails and reached == moment:
            fail(act)

    def fail_soon(reached: str, seconds: float) -> None:
        """Fails while the main thread goes on."""
        print(f"comes to {reached} in {os.getpid()}", flush=True)
        if fails and reached == moment:
            threading.Timer(seconds, fail, [act]).start()

    come_to("start")
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    if moment == "join":  # in all others the wait for one that is late
        num_processes = int(os.environ["JPIPE_PROCESSES"])
        if os.environ["JPIPE_PROCESS"] == str(num_processes - 1):
            time.sleep(SECONDS_LATE)
        fail_soon("join", SECONDS_LATE / 2)
    atexit.register(come_to, "exit")
    jpipe.distributed()
    atexit.register(come_to, "end")
    come_to("joined")

    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn

    num_stages = max(jax.device_count(), 2)
    layers = [nn.Dense(4) for _ in range(num_stages - 1)]
    layers = [*layers, nn.Sequential([jnp.sin, nn.Dense(3)])]
    devices = jax.devices() * (num_stages // jax.device_count())
    pipe = jpipe.pipeline(layers, 2, devices=devices)
    tx = optax.adam(1e-2)
    x, _ = batch(0)
    state: Any = pipe.init_train_state(jax.random.key(0), x, tx)
    checkpoints = Path(folder) / "states"
    state = jpipe.checkpoint.restore_latest(checkpoints, state)
    step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx)

    fail_soon("compile", 0.3)
    for number in range(int(state.step), STEPS):
        if _stops.is_set():
            break
        if number == FAILING_STEP:
            come_to("step")
        state, metrics = step(state, *batch(number))
        print(f"loss {number} {float(metrics['loss']).hex()}", flush=True)
        is_preempted = jpipe.preempted()
        if is_preempted or (number + 1) % SAVE_EVERY == 0:
            fail_soon("save", 0.02)
            jpipe.checkpoint.save(checkpoints, state, step=number + 1)
            print(f"saved {number + 1}", flush=True)
        if is_preempted:
            sys.exit(STOPPED_EARLY)
    if not _stops.is_set():
        own: dict[str, Any] = {
            f"{i}": np.asarray(leaf)
            for i, leaf in enumerate(jax.tree.leaves(state))
            if leaf.is_fully_addressable and leaf.addressable_shards
        }
        np.savez(Path(folder) / f"params-{jax.process_index()}.npz", **own)


def batch(number: int) -> Any:
    """The mini-batch of a step."""
    import numpy as np

    rng = np.random.default_rng(number)
    x = rng.normal(size=(4, 4)).astype(np.float32)
    return x, rng.normal(size=(4, 3)).astype(np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
