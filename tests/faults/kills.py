"""Processes killed at random moments, in runs that start again and go on."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .by_hand import PROGRAM, ROOT, environment

NUM_PROCESSES = 3
# The longest seconds after a moment at which a process is killed.
MOMENTS = {
    "start": 2.0,
    "joined": 1.0,
    "compile": 2.0,
    "step": 0.1,
    "save": 0.1,
    "end": 0.1,
}


def find_breaches(num_kills: int, seed: int) -> list[str]:
    """Kills as often as is asked for; returns what is not as in a run without kills."""
    rng = random.Random(seed)
    breaches = []
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "undisturbed"
        expected.mkdir()
        status, _ = _run(expected, iter(()), restarts=0)
        if status != 0:
            return [f"the run without kills has status {status}"]

        remaining = num_kills
        for index in range(num_kills + 1):
            if remaining == 0:
                break
            results = Path(folder) / str(index)
            results.mkdir()
            status, num_killed = _run(results, _plan(rng), restarts=remaining)
            remaining -= num_killed
            if status != 0:
                breaches.append(f"run {index}, {num_killed} kills: status {status}")
                break
            breaches += _compare(results, expected)
    return breaches


def _plan(rng: random.Random) -> Iterator[tuple[int, str, float]]:
    """Who is killed in each attempt, how long after which moment."""
    while True:
        moment = rng.choice(list(MOMENTS))
        yield rng.randrange(NUM_PROCESSES), moment, rng.uniform(0, MOMENTS[moment])


def _run(
    folder: Path, plan: Iterator[tuple[int, str, float]], *, restarts: int
) -> tuple[int, int]:
    """Runs the program, kills a process in each attempt, as long as restarts are left.

    Args:
      folder: the folder of states and results.
      plan: the kills.
      restarts: the number of restarts.

    Returns:
      The status of the launch, and the number of processes that were killed.
    """
    launch = f"-m jpipe launch --processes {NUM_PROCESSES} --max-restarts {restarts}"
    job = subprocess.Popen(
        [sys.executable, *launch.split(), str(PROGRAM), str(folder)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    killed = list[int]()

    def kill(process_id: int) -> None:
        try:
            os.kill(process_id, signal.SIGKILL)
        except ProcessLookupError:
            return
        killed.append(process_id)

    seen = set[str]()  # the processes of this attempt
    victim = next(plan, None)
    for line in job.stdout:
        match = re.match(r"\[(\d+)\] comes to (\w+) in (\d+)", line)
        if "starts all again" in line:
            victim = next(plan, None) if len(killed) < restarts else None
        if match is None or victim is None:
            continue
        process, moment, delay = victim
        if (int(match[1]), match[2]) == (process, moment) and match[3] not in seen:
            seen.add(match[3])
            threading.Timer(delay, kill, [int(match[3])]).start()
    job.stdout.close()
    return job.wait(), len(killed)


def _compare(results: Path, expected: Path) -> list[str]:
    """The leaves that differ in a bit from those of the run without kills."""
    breaches = []
    for process in range(NUM_PROCESSES):
        name = f"params-{process}.npz"
        actual_leaves = np.load(results / name)
        expected_leaves = np.load(expected / name)
        if {*actual_leaves} != {*expected_leaves} or not expected_leaves:
            breaches.append(f"{results / name}: other leaves")
            continue
        for leaf in expected_leaves:
            if not np.array_equal(actual_leaves[leaf], expected_leaves[leaf]):
                breaches.append(f"{results / name}: leaf {leaf} differs")
    return breaches
