"""The sides, and how a run of one is started: fresh processes, one environment."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..allocator import KEEP_MEMORY
from .workload import Case

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # seconds for one run
REMATS = ("none", "full", "default", "compiled")
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b")

# The same for all sides: malloc keeps what it has, arithmetic has one thread per stage.
ENVIRONMENT = KEEP_MEMORY | {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "LOGGING_LEVEL_ED": "WARNING",  # SpectraX else prints all it did in a step
}
if sys.platform == "linux":
    # Gloo else asks for the address of the host's name, which need not have one.
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


@dataclass(frozen=True)
class Side:
    """A library that runs pipelines.

    Attributes:
      title: its name in tables.
      framework: of its baseline: ``"JAX"`` or ``"PyTorch"``.
      module: of this package, which runs one process of it.
      packages: that it imports.
      install: what to type where they are missing.
      schedules: that it has.
      processes: of a pipeline.
      stages: what a stage is, for the table.
      recomputed: the stages whose forward it computes twice with remat ``"full"``.
      remats: that it has.
    """

    title: str
    framework: str
    module: str
    packages: tuple[str, ...]
    install: str
    schedules: tuple[str, ...]
    processes: int
    stages: str
    recomputed: tuple[int, ...]
    remats: tuple[str, ...] = REMATS


SIDES = {
    "jpipe": Side(
        title="jpipe",
        framework="JAX",
        module="ours",
        packages=("jax", "jaxlib", "flax", "jpipe"),
        install="pip install .",
        schedules=("gpipe", "1f1b"),
        processes=1,
        stages="two CPU devices, 1 process",
        recomputed=(0,),
    ),
    "jpipe-apart": Side(
        title="jpipe, two processes",
        framework="JAX",
        module="ours_apart",
        packages=("jax", "jaxlib", "flax", "jpipe"),
        install="pip install .",
        schedules=("gpipe", "1f1b", "eager_1f1b"),
        processes=2,
        stages="two processes, sockets",
        recomputed=(0,),
    ),
    "spectrax": Side(
        title="SpectraX",
        framework="JAX",
        module="spectrax_side",
        packages=("jax", "jaxlib", "flax", "jpipe", "spectrax"),
        install="pip install spectrax-lib",
        schedules=("gpipe", "1f1b"),
        processes=1,
        stages="two CPU devices, 1 process",
        recomputed=(0,),
        remats=("full", "default"),
    ),
    "torchgpipe": Side(
        title="torchgpipe",
        framework="PyTorch",
        module="torchgpipe_side",
        packages=("torch", "torchgpipe"),
        install="pip install torch setuptools wheel && "
        "pip install --no-build-isolation torchgpipe==0.0.7",
        schedules=("gpipe",),
        processes=1,
        stages="one CPU device twice, 1 process",
        recomputed=(0, 1),
    ),
    "pipelining": Side(
        title="torch.distributed.pipelining",
        framework="PyTorch",
        module="torch_pipelining",
        packages=("torch", "torch.distributed.pipelining"),
        install="pip install torch",
        schedules=("gpipe", "1f1b"),
        processes=2,
        stages="two processes, gloo",
        recomputed=(0, 1),
    ),
}
BASELINES = {"JAX": "ours", "PyTorch": "torch_model"}


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages, imported by an interpreter.

    Raises:
      ImportError: if one of them cannot be imported there.
    """
    program = (
        "import importlib, json, platform, sys\n"
        "made = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    version = getattr(importlib.import_module(name), '__version__', None)\n"
        "    made |= {name: str(version)} if version else {}\n"
        "print(json.dumps(made))"
    )
    try:
        result = subprocess.run(
            [python, "-c", program, *packages],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
        )
    except OSError as error:
        raise ImportError(f"{python} does not run: {error}") from error
    if result.returncode:
        raise ImportError(result.stderr.strip().split("\n")[-1])
    return json.loads(result.stdout.strip().split("\n")[-1])


@dataclass(frozen=True)
class Run:
    """One row of a table.

    Attributes:
      side: a key of `SIDES`; of a baseline, one with that framework.
      case: what it does.
      python: the interpreter.
    """

    side: str
    case: Case
    python: str

    @property
    def baseline(self) -> "Run":
        """What this run is compared with."""
        of = SIDES[self.side]
        recomputed = of.recomputed if self.case.remat == "full" else ()
        case = replace(self.case, schedule="baseline", recomputed=recomputed)
        first = next(k for k, s in SIDES.items() if s.framework == of.framework)
        return Run(first, case, self.python)

    @property
    def title(self) -> str:
        """For tables and the progress bar."""
        side = SIDES[self.side]
        if self.case.schedule == "baseline":
            return f"{side.framework}, no pipeline"
        return f"{side.title}, {self.case.schedule}"

    def start(self, cores: list[int]) -> dict[str, Any]:
        """Runs it in fresh processes and puts together what they found.

        Args:
          cores: to run on; one process of two has one of them.

        Returns:
          The seconds of the steps as the first process saw them, the losses that the
          last one has, sums over processes of the rest.

        Raises:
          RuntimeError: if a process failed; with its last words.
        """
        side, case = SIDES[self.side], str(self.case)
        with tempfile.TemporaryDirectory() as folder:
            extra: list[list[str]] = [[]]
            if self.case.schedule == "baseline":
                module, shares = BASELINES[side.framework], [cores[:1]]
            elif side.processes == 1:
                module, shares = side.module, [cores[:2]]
            else:
                module = side.module
                shares = [cores[r : r + 1] for r in range(side.processes)]
                meeting_place = str(Path(folder) / "meeting")
                extra = [[str(r), meeting_place] for r in range(side.processes)]
            process = [self.python, "-m", f"{__package__}.measure", module, case]
            commands = [
                [*process, share, *more]
                for share, more in zip(map(json.dumps, shares), extra, strict=True)
            ]
            outputs = _together(commands, Path(folder))
        return _summed([json.loads(text.strip().split("\n")[-1]) for text in outputs])


def _summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of those of its processes."""
    result = parts[0] | {"losses": parts[-1]["losses"], "processes": len(parts)}
    for name in (
        "parameters",
        "busy_seconds",
        "idle_bytes",
        "peak_bytes",
        "ever_bytes",
        "start_bytes",
    ):
        result[name] = sum(part[name] for part in parts)
    return result


def _together(commands: list[list[str]], folder: Path) -> list[str]:
    """What processes print that run side by side; none outlives the failure of one."""
    outputs = [folder / f"{number}.out" for number in range(len(commands))]
    processes: list[subprocess.Popen] = []
    deadline = time.monotonic() + PATIENCE
    try:
        for command, output in zip(commands, outputs, strict=True):
            with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdout=out,
                        stderr=err,
                        env=os.environ | ENVIRONMENT,
                    )
                )
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) or None in codes:
        words = [
            output.with_suffix(".err").read_text().strip()[-2000:]
            for output, code in zip(outputs, codes, strict=True)
            if code  # the others were ended with it
        ]
        reason = "\n".join(words) or f"no end after {PATIENCE} s"
        raise RuntimeError(f"{' '.join(commands[0])}\n{reason}")
    return [output.read_text() for output in outputs]
