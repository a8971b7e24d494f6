"""What holds the Transformer's pipeline back, and what its memory is: our side alone.

Run it with ``python -m benchmarks.peers.apart``. Each line is of a process of its own:
the plain step on one core; two of them side by side on two devices of one process; both
stages on one device and one core; each on its own. Then what a step of each schedule
holds: arrays, as the list of instructions says, and the temporary memory of programs,
as XLA says.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .launch import ENVIRONMENT, ROOT
from .measure import forget_peak, pin, resident, separate_cores
from .ours import baseline, training
from .workload import Case

MIB = 2**20
STEPS = 8


def rate(case: Case, steps: list[Callable[[], float]]) -> float:
    """Samples per second of steps that run side by side, a thread for each."""
    for step in steps:
        for _ in range(2):
            step()
    threads = [
        threading.Thread(target=lambda step=step: [step() for _ in range(STEPS)])
        for step in steps
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    return len(steps) * STEPS * case.size.batch / seconds


def plain(count: int) -> str:
    """So many plain steps side by side, each on a device of its own."""
    case = Case("transformer", "full", 8)
    steps = []
    for device in jax.devices()[:count]:
        with jax.default_device(device):
            steps.append(baseline(case)[1])
    return f"{rate(case, steps):.1f} samples/s"


def piped(devices: int) -> str:
    """The pipeline as it comes, on so many devices."""
    case = Case("transformer", "full", 8, schedule="1f1b", remat="default")
    made = training(case, [jax.devices()[i % devices] for i in range(2)])
    return f"{rate(case, [made.step]):.1f} samples/s"


def held(schedule: str, remat: str) -> str:
    """Memory of a step: resident, in arrays, and beside them in programs."""
    # Starts the runtime and the compiler, which are not part of the model.
    jax.block_until_ready(jax.jit(jax.grad(jnp.square))(1.0))
    start = resident("VmRSS")
    made = training(Case("transformer", "full", 8, schedule=schedule, remat=remat))
    for _ in range(3):
        made.step()
    forget_peak()
    idle = resident("VmRSS")
    weights = sum(array.nbytes for array in jax.live_arrays())
    for _ in range(3):
        made.step()
    peak, plan = resident("VmHWM"), made.pipe.plan
    arrays = sum(size for _, size in plan.peak_bytes) - weights
    kept = sum(stage.residual_bytes or 0 for stage in plan.stages)
    report = made.pipe.compile(made.take, made.state, *made.batch)
    spaces = sorted(((p.workspace_bytes or 0), p.name) for p in report.programs)
    largest = ", ".join(f"{size / MIB:.1f} ({name})" for size, name in spaces[-2:])
    return (
        f"between steps {(idle - start) / MIB:.0f} MiB above start, weights "
        f"{weights / MIB:.0f} of them; a step {(peak - idle) / MIB:.0f}: arrays "
        f"{arrays / MIB:.0f}, residuals {kept / MIB:.0f} of them; largest temporaries "
        f"of programs {largest}"
    )


ROWS: dict[str, tuple[int, Callable[[], str]]] = {
    "plain step, one core": (1, lambda: plain(1)),
    "two plain steps, two cores": (2, lambda: plain(2)),
    "jpipe, one device, one core": (1, lambda: piped(1)),
    "jpipe, two devices, two cores": (2, lambda: piped(2)),
    "jpipe, 1f1b, min_cut": (2, lambda: held("1f1b", "default")),
    "jpipe, 1f1b, none": (2, lambda: held("1f1b", "none")),
    "jpipe, gpipe, min_cut": (2, lambda: held("gpipe", "default")),
}


def main() -> None:
    """Runs one row in this process, or all in processes of their own."""
    if len(sys.argv) > 1:
        cores, run = ROWS[sys.argv[1]]
        pin(separate_cores()[:cores])
        jax.config.update("jax_num_cpu_devices", 2)
        return print(run())
    for name in ROWS:
        command = [sys.executable, "-m", __spec__.name, name]
        found = subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        print(f"{name}: {found.stdout.strip()}", flush=True)
    return None


if __name__ == "__main__":
    main()
