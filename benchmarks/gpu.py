"""What accelerators show, in nine minutes: run it with ``make bench-gpu``.

Parts run in order of worth, each in processes of its own. After each part all that is
there is written as JSON: of one that is not done in time its rows that are.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .result import SCALES

_TABLE = ("benchmarks", "run")
_BFLOAT16 = ("--dtype", "bfloat16")
_ONE_STAGE = ("--experiment", "pipeline-1", "--experiment", "baseline")
# What is typed after `python -m`.
PARTS: dict[str, tuple[str, ...]] = {
    "step-resnet101-bfloat16": (*_TABLE, "resnet101-speed", *_BFLOAT16),
    "memory-amoebanetd": (*_TABLE, "amoebanetd-memory", *_ONE_STAGE),
    "dispatch": ("benchmarks.overhead.dispatch", "--one-device"),
    "step-resnet101-float32": (*_TABLE, "resnet101-speed"),
    "memory-unet": (*_TABLE, "unet-memory", *_ONE_STAGE),
    "step-amoebanetd-bfloat16": (*_TABLE, "amoebanetd-speed", *_BFLOAT16),
    "step-unet-bfloat16": (*_TABLE, "unet-speed", *_BFLOAT16),
    "step-amoebanetd-float32": (*_TABLE, "amoebanetd-speed"),
    "step-unet-float32": (*_TABLE, "unet-speed"),
}


def main() -> None:
    """Runs parts until they are done or the time is over."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--scale", default="full", choices=SCALES)
    parser.add_argument("--steps", type=int, help="timed steps of a row")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts")
    parser.add_argument("--json", type=Path, default=Path("build/bench-gpu.json"))
    parser.add_argument("--part", choices=PARTS, action="append")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    parts = options.part or list(PARTS)
    found: dict[str, Any] = {}
    for number, part in enumerate(parts, start=1):
        left = deadline - time.monotonic()
        # One that hangs leaves time for what follows.
        limit = left if number == len(parts) else 2 / 3 * left
        print(f"[{number}/{len(parts)}] {part}: {limit:.0f} s at most", flush=True)
        found[part] = run_part(part, options, limit)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {options.json}")
    failed = [part for part in parts if found[part]["ended"] != "done"]
    for part in failed:
        print(f"{part}: {found[part]['ended']}")
    if failed:
        raise SystemExit("type the same again: what was compiled is kept")


def run_part(part: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Runs a part, for so many seconds at most.

    Args:
      part: a key of `PARTS`.
      options: what was typed.
      limit: after so many seconds it is ended.

    Returns:
      How it ended and in how many seconds, and what it has given by then.
    """
    if limit < 1:
        return {"ended": "not begun: no time left"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *PARTS[part]]
        if PARTS[part][:2] == _TABLE:
            command += ["--measured", "--scale", options.scale, "--folder", folder]
            command += ["--steps", str(options.steps)] if options.steps else []
        output = Path(folder, "output.txt")
        code = _run(command, output, limit)
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        lines = output.read_text().splitlines()
    ended = {0: "done", None: f"not done after {limit:.0f} s"}
    return {
        "ended": ended.get(code, f"failed: exit status {code}"),
        "seconds": round(time.monotonic() - start, 1),
        "results": results,
        "output": lines,
    }


def _run(command: list[str], output: Path, limit: float) -> int | None:
    """Runs a command and shows what it prints, which a file keeps.

    Returns:
      Its exit status; ``None`` if it was ended, with all that it had started.
    """
    deadline = time.monotonic() + limit
    with output.open("w") as out, output.open() as shown:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                print(shown.read(), end="", flush=True)
        finally:
            if (code := process.poll()) is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print(shown.read(), end="", flush=True)
    return code


if __name__ == "__main__":
    main()
