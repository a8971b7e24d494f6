"""One of several processes: trains pipelines and writes what it has of the results."""

import sys
from functools import partial
from pathlib import Path

import jax


def main(folder: str, names: str, feeds: str, *devices: str) -> None:
    """Runs some pipelines by their names.

    Args:
      folder: where to write.
      names: of the pipelines, with commas between them.
      feeds: ``"all"`` or ``"own"``: whether a process is given what others read.
      *devices: how many each process has, and by which it is known.
    """
    import jpipe

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", int(devices[0]))
    jpipe.distributed()
    import numpy as np

    from tests.processes import work

    me = jax.process_index()

    def fed(pipe, x, targets):
        if feeds == "all":
            return x, targets
        ends = (
            getattr(pipe.devices[at], "devices", pipe.devices[at]) for at in (0, -1)
        )
        first, last = (np.ravel(device)[0].process_index == me for device in ends)
        return x if first else None, targets if last else None

    for name in names.split(","):
        pipe = work.pipelines()[name]()
        found = work.results(pipe, name in work.WHOLE, partial(fed, pipe))
        np.savez(Path(folder) / f"{name}-{me}.npz", **found)
    pipe = work.pipelines()["1f1b"]()
    path = Path(folder) / "state"
    if not path.exists():
        state, _ = work.go_on(pipe, work.start(pipe), 2)
        jpipe.checkpoint.save(path, state)
    else:
        state = jpipe.checkpoint.restore(path, work.start(pipe))
        state, told = work.go_on(pipe, state, 4)
        own = work.here(state.params)
        np.savez(Path(folder) / f"restored-{me}.npz", loss=told[0], **own)


if __name__ == "__main__":
    main(*sys.argv[1:])
