"""Programs that are killed, or find the disk full, while they save over a state.

Each is a fork, with a folder of its own. One after the other is killed before one of
its changes to the disk: the first before its first one, the next before its second one,
until one comes to its end. The last finds the disk full.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import checkpoint

CHANGES = {"os.mkdir", "os.rename", "os.rmdir", "os.remove"}


def state(step: int) -> Any:
    """A state whose numbers follow from its step."""
    return {"w": np.random.default_rng(step).normal(size=(64, 64)), "step": step}


def save_and_be_killed(path: Path, num_changes: int) -> None:
    """Saves step 2 over a state; killed after some changes to the disk."""
    num_left = num_changes

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal num_left
        is_written = event == "open" and "w" in str(args[1])
        if event in CHANGES or (is_written and str(args[0]).startswith(str(path))):
            num_left -= 1
            if num_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    checkpoint.save(path, state(2), overwrite=True)


def save_on_full_disk(path: Path) -> None:
    """Saves step 2 over a state where files may have 20 kB; writes the error down."""
    report = (path.parent / "error").open("w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        checkpoint.save(path, state(2), overwrite=True)
    except OSError as error:
        print(error, file=report, flush=True)


def run_in_fork(function: Callable[..., None], *args: Any) -> bool:
    """Runs a function in a fork of this process; True if it came to its end."""
    process = os.fork()
    if not process:
        function(*args)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    return status == 0


def describe(path: Path) -> dict[str, Any]:
    """What is there after a save has ended, and after one more."""
    files = sorted(os.listdir(path.parent))
    is_there = path.exists()
    restored = checkpoint.restore(path, state(0))
    np.testing.assert_array_equal(restored["w"], state(restored["step"])["w"])
    checkpoint.save(path, state(3), overwrite=True)
    return {
        "files": files,
        "is_there": is_there,
        "step": restored["step"],
        "next_step": checkpoint.restore(path, state(0))["step"],
        "next_files": sorted(os.listdir(path.parent)),
    }


def main(folder: Path) -> None:
    """Prints what is left by those that are killed, and of the one without room."""
    import orbax.checkpoint  # noqa: F401  # here, not in each fork

    run_in_fork(checkpoint.save, folder / "first", state(1))
    paths = list[Path]()

    def copy_first() -> Path:
        path = folder / str(len(paths)) / "latest"
        shutil.copytree(folder / "first", path)
        paths.append(path)
        return path

    while not run_in_fork(save_and_be_killed, copy_first(), len(paths)):
        pass
    run_in_fork(save_on_full_disk, copy_first())
    *killed, full = map(describe, paths)
    full["error"] = (paths[-1].parent / "error").read_text()
    print(json.dumps({"killed": killed, "full": full}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
