"""What accelerators show, in nine minutes: run it with ``make bench-gpu``.

Parts run in order of worth, those first that end from an empty cache of compiled
programs, each in processes of its own. After each part all that is there is written as
JSON: of one that is not done in time its rows that are.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .published import BY_NAME
from .result import SCALES

_TABLE = ("benchmarks", "run")
_BFLOAT16 = ("--dtype", "bfloat16")
# Without these a step has the settings that were published: GPipe's.
_DEFAULTS = ("--schedule", "1f1b", "--remat", "min_cut")
_ONE_STAGE = ("--experiment", "pipeline-1", "--experiment", "baseline")
_RESNET = (*_TABLE, "resnet101-speed")
# name of a part -> what is typed after `python -m`
PARTS: dict[str, tuple[str, ...]] = {
    "dispatch": ("benchmarks.overhead.dispatch", "--one-device"),
    "memory-amoebanetd": (*_TABLE, "amoebanetd-memory", *_ONE_STAGE),
    "step-resnet101-one-stage": (*_RESNET, *_BFLOAT16, *_ONE_STAGE),
    "step-resnet101-one-stage-1f1b": (*_RESNET, *_BFLOAT16, *_DEFAULTS, *_ONE_STAGE),
    "step-resnet101-bfloat16": (*_RESNET, *_BFLOAT16),
    "step-resnet101-bfloat16-1f1b": (*_RESNET, *_BFLOAT16, *_DEFAULTS),
    "predict-resnet101-bfloat16": (*_RESNET, *_BFLOAT16, "--predict"),
    "memory-unet": (*_TABLE, "unet-memory", *_ONE_STAGE),
    "step-resnet101-float32": _RESNET,
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
    names = options.part or list(PARTS)
    parts: dict[str, Any] = {}
    for number, name in enumerate(names, start=1):
        left = deadline - time.monotonic()
        # One that hangs leaves time for what follows.
        limit = left if number == len(names) else 2 / 3 * left
        told = f"{max(left, 0):.0f} s left, {max(limit, 0):.0f} of them for this"
        print(f"[{number}/{len(names)}] {name}: {told}", flush=True)
        parts[name] = run_part(name, options, limit)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(parts, indent=1) + "\n")
    left = deadline - time.monotonic()
    print(f"written: {options.json}; {max(left, 0):.0f} s left")
    missing = missing_parts(parts, options.scale)
    if missing:
        print("missing:\n  " + "\n  ".join(missing))
        typed = " ".join(f"--part {name}" for name in parts if is_missing(parts[name]))
        raise SystemExit(
            "what was compiled is kept: type the same again, or for these alone\n"
            f'make bench-gpu ARGS="{typed}"'
        )


def is_missing(part: dict[str, Any]) -> bool:
    """Whether a part is not there as a whole."""
    return part["ended"] != "done"


def missing_parts(parts: dict[str, Any], scale: str) -> list[str]:
    """Lines of parts that did not end, with the rows that they lack."""
    lines = []
    for name, part in parts.items():
        if not is_missing(part):
            continue
        ran = {row for result in part.get("results", ()) for row in result["rows"]}
        rows = [row for row in rows_of(name, scale) if row not in ran]
        lines.append(": ".join(filter(None, (name, part["ended"], ", ".join(rows)))))
    return lines


def rows_of(name: str, scale: str) -> list[str]:
    """The rows of the table that a part runs; none if it runs no table."""
    words = PARTS[name]
    if words[:2] != _TABLE:
        return []
    typed = [
        word for option, word in itertools.pairwise(words) if option == "--experiment"
    ]
    return typed or BY_NAME[words[2]].default_rows(scale, measured=True)


def run_part(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Runs a part, for so many seconds at most.

    Args:
      name: a key of `PARTS`.
      options: what was typed.
      limit: after so many seconds it is ended.

    Returns:
      How it ended and in how many seconds, and what it has given by then.
    """
    if limit < 1:
        return {"ended": "not begun, no time left"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *PARTS[name]]
        if PARTS[name][:2] == _TABLE:
            command += ["--measured", "--scale", options.scale, "--folder", folder]
            command += ["--steps", str(options.steps)] if options.steps else []
        output = Path(folder, "output.txt")
        code = _run(command, output, limit)
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        lines = output.read_text().splitlines()
    ended = {0: "done", None: f"not done after {limit:.0f} s"}
    return {
        "ended": ended.get(code, f"failed with exit status {code}"),
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
