"""One of several processes that save what they cannot, or not alike, or too much."""

import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


def main(folder: str, _job: str) -> None:
    """Prints why each state is not saved.

    Args:
      folder: where there is a file named ``file``.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed()
    me, path = jax.process_index(), Path(folder)
    for name, position in (("state", me), ("file/state", 0), ("file", 0)):
        try:
            jpipe.checkpoint.save(path / name, {"position": np.int32(position)})
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {error}")
    save_over(path / "over")


def save_over(path: Path) -> None:
    """Saves the next state: on a full disk, and then on one with room."""
    import jpipe

    def state(step: int) -> Any:
        w = np.random.default_rng(step).normal(size=(64, 64))
        return {"w": w, "step": np.int32(step)}

    jpipe.checkpoint.save(path, state(1), step=1)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, limit in ((2, 20_000), (3, hard_limit)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
        try:
            jpipe.checkpoint.save(path, state(step), step=step)
        except (OSError, RuntimeError) as error:
            print(f"over: {type(error).__name__}: {error}")
        restored = jpipe.checkpoint.restore_latest(path, state(0))
        found = int(restored["step"])
        np.testing.assert_array_equal(restored["w"], state(found)["w"])
        print(f"step {found} is there")
    restore_damaged(path)


def restore_damaged(path: Path) -> None:
    """Restores a copy of the states, whose last one is damaged in process 1."""
    import jpipe

    copy = path.parent / f"copy {jax.process_index()}"
    shutil.copytree(path, copy)
    if jax.process_index() == 1:
        (copy / "3" / "default" / "manifest.ocdbt").write_bytes(b"")
    restored = jpipe.checkpoint.restore_latest(
        copy, {"w": np.ones((64, 64)), "step": np.int32(0)}
    )
    print(f"in all processes step {restored['step']}")
    shutil.rmtree(copy)


if __name__ == "__main__":
    main(*sys.argv[1:])
