"""One of several processes that save what they cannot, or not alike."""

import sys
from pathlib import Path

import jax


def main(folder: str, _job: str) -> None:
    """Prints why each state is not saved.

    Args:
      folder: where there is a file named ``file``.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed()
    import numpy as np

    me, path = jax.process_index(), Path(folder)
    for name, position in (("state", me), ("file/state", 0), ("file", 0)):
        try:
            jpipe.checkpoint.save(path / name, {"position": np.int32(position)})
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
