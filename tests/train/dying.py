"""Programs that are killed, find the disk full, or are not alone, while they save.

Each is a fork, with a folder of its own, in which the state of step 1 is. First one is
killed before its first change to the disk, the next one before its second, until one
comes to its end. Others are killed at random moments of a training that saves each of
its steps. The last finds the disk full.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import checkpoint

CHANGES = {"os.mkdir", "os.rename", "os.rmdir", "os.remove"}


def state(step: int) -> Any:
    """A state whose numbers follow from its step."""
    return {"w": np.random.default_rng(step).normal(size=(64, 64)), "step": step}


def save(folder: Path, step: int, *, background: bool = False, keep: int = 3) -> None:
    """Saves the state of a step, and waits for the end."""
    checkpoint.save(folder, state(step), step=step, keep=keep, background=background)
    checkpoint.wait()


def save_and_be_killed(folder: Path, num_changes: int, *, background: bool) -> None:
    """Saves step 2 in place of step 1; killed after some changes to the disk."""
    num_left = num_changes

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal num_left
        is_written = event == "open" and "w" in str(args[1])
        if event in CHANGES or (is_written and str(args[0]).startswith(str(folder))):
            num_left -= 1
            if num_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(folder, 2, background=background, keep=1)


def save_on_full_disk(folder: Path, *, background: bool) -> None:
    """Saves step 2 where files may have 20 kB; writes the error down."""
    report = (folder.parent / "error").open("w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save(folder, 2, background=background, keep=1)
    except OSError as error:
        print(error, file=report, flush=True)


def save_each_step(folder: Path, *, background: bool) -> None:
    """Saves one step after the other; goes on where another program does so too."""
    for step in range(2, 1000):
        try:
            checkpoint.save(folder, state(step), step=step, background=background)
        except OSError:  # the other one was quicker, or has removed what was written
            time.sleep(0.01)


def start_fork(function: Callable[..., None], *args: Any, **kwargs: Any) -> int:
    """Starts a function in a fork of this process; returns its process id."""
    process = os.fork()
    if not process:
        function(*args, **kwargs)
        os._exit(0)
    return process


def run_in_fork(function: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Runs a function in a fork of this process; True if it came to its end."""
    _, status = os.waitpid(start_fork(function, *args, **kwargs), 0)
    return status == 0


def describe(folder: Path) -> dict[str, Any]:
    """What is there after a save has ended, and after one more."""
    files = sorted(os.listdir(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = checkpoint.restore_latest(folder, state(0))
    step = restored["step"]
    np.testing.assert_array_equal(restored["w"], state(step)["w"])
    save(folder, step + 1, keep=1)
    return {
        "files": files,
        "step": step,
        "warnings": [str(warning.message) for warning in caught],
        "next_step": checkpoint.restore_latest(folder, state(0))["step"],
        "next_files": sorted(os.listdir(folder)),
    }


def main(folder: Path, *, stride: int, num_random: int) -> None:
    """Prints what is left by those that are killed, and of the one without room.

    Args:
      folder: an empty folder.
      stride: one of so many changes is the last before a kill.
      num_random: how many are killed at random moments.
    """
    import orbax.checkpoint  # noqa: F401  # here, not in each fork

    run_in_fork(save, folder / "first", 1)
    folders = list[Path]()

    def copy_first() -> Path:
        copy = folder / str(len(folders)) / "run"
        shutil.copytree(folder / "first", copy)
        folders.append(copy)
        return copy

    names = list[str]()
    numbers = random.Random(7)
    for background in (False, True):
        ending = " in background" if background else ""
        is_killed = True
        num_changes = 0
        while is_killed:
            names.append(f"killed{ending}")
            is_killed = not run_in_fork(
                save_and_be_killed, copy_first(), num_changes, background=background
            )
            num_changes += stride
        names.append(f"full{ending}")
        run_in_fork(save_on_full_disk, copy_first(), background=background)
        for num_savers in (1, 2):
            for _ in range(num_random):
                names.append(f"{num_savers} at random{ending}")
                target = copy_first()
                processes = [
                    start_fork(save_each_step, target, background=background)
                    for _ in range(num_savers)
                ]
                time.sleep(numbers.uniform(0.0, 1.0))
                for process in processes:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
    report: dict[str, list[Any]] = {}
    for name, target in zip(names, folders, strict=True):
        report.setdefault(name, []).append(describe(target))
        if name.startswith("full"):
            report[name][-1]["error"] = (target.parent / "error").read_text()
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), stride=int(sys.argv[2]), num_random=int(sys.argv[3]))
