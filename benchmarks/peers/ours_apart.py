"""jpipe in two processes, each with one stage on one core, as PyTorch's stages are."""

import socket
import time
from pathlib import Path

import jax

import jpipe

from .measure import arguments, measured, pin, report, resident
from .ours import training

_PATIENCE = 60.0  # seconds for the first process to say where it listens


def _meet(place: Path, rank: int) -> str:
    """Where the first process listens, which it writes to a file."""
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        place.with_suffix(".new").write_text(address)
        place.with_suffix(".new").rename(place)
        return address
    until = time.monotonic() + _PATIENCE
    while not place.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return place.read_text()


def main() -> None:
    """Runs one stage of one case in this process."""
    case, cores, (rank, meeting_place) = arguments()
    pin(cores)
    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed(_meet(Path(meeting_place), int(rank)), 2, int(rank))
    # Starts the runtime and the compiler, which are not part of the model.
    jax.block_until_ready(jax.jit(jax.grad(jax.numpy.square))(1.0))
    start = resident("VmRSS")
    made = training(case)
    leaves = jax.tree.leaves(made.state.params)
    count = sum(leaf.size for leaf in leaves if leaf.addressable_shards)
    report(measured(case, made.step, count), start_bytes=start)


if __name__ == "__main__":
    main()
