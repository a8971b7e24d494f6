"""One of several processes: trains pipelines and writes what it has of the results."""

import socket
import sys
from pathlib import Path

import jax


def can_put() -> None:
    """Lets `jax.device_put` of CPUs reach other processes, as accelerators' does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.config.update("jax_cross_host_transfer_socket_address", own)
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0")
    jax.config.update("jax_cross_host_transfer_transfer_size", 1 << 20)


def main(
    folder: str, names: str, feeds: str, devices: str, transport: str, _job: str
) -> None:
    """Runs some pipelines by their names.

    Args:
      folder: where to write.
      names: of the pipelines, with commas between them.
      feeds: ``"all"`` or ``"own"``: whether a process is given what others read.
      devices: how many each process has.
      transport: how arrays pass between them.
      _job: by which its processes are known.
    """
    import jpipe

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", int(devices))
    if transport == "device_put":
        can_put()
    jpipe.distributed(transport=transport)
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

    pipelines = names.split(",")
    for name in pipelines:
        found = work.run(name, fed)
        np.savez(Path(folder) / f"{name}-{me}.npz", **found)
    if jax.process_count() > 2:
        return
    if "model of 7" in pipelines:
        np.save(Path(folder) / f"refused-{me}.npy", work.refuse_pieces())
    for saved, restored, position in work.SAVED:
        if saved not in pipelines:
            continue
        pipe, path = work.pipelines()[saved](), Path(folder) / f"state of {saved}"
        state, _ = work.go_on(pipe, work.start(pipe), position)
        jpipe.checkpoint.save(path, {"state": state, "position": position})
        like = {"state": work.start(work.pipelines()[restored]()), "position": 0}
        found = jpipe.checkpoint.restore(path, like)
        assert found["position"] == position
        state = found["state"]
        own = work.here((state.step, state.params, state.opt_state))
        np.savez(Path(folder) / f"restored by {restored}-{me}.npz", **own)


if __name__ == "__main__":
    main(*sys.argv[1:])
