"""Plans of ten models for two processes of one core each, against their rivals.

Each model is profiled and planned in one process. Then two tune it, and time all ways
to run it in turns: see `ways` and `pair`. On a machine with two cores and nothing else
to do type

    python -m benchmarks.planning --json build/planning.json
    python -m benchmarks.planning --json build/planning.json --models "equal blocks"
    python -m benchmarks.planning --json build/planning.json --again

The file is written after each model, and models that it has already stay there: the
second line measures one of them again, the third one times the ways in the file again,
with its plans. The tables are those of all models in the file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..peers.launch import ENVIRONMENT, ROOT
from ..peers.measure import separate_cores
from ..provenance import provenance
from .comparison import format_page
from .models import MODELS
from .ways import Link

# The last lines of a process that are told if it fails.
NUM_LAST_LINES = 40


def _run(command: Sequence[str]) -> None:
    """Runs a module in the environment of all processes that are measured.

    What it prints shows how far it is.

    Raises:
      RuntimeError: if it fails; with its last words.
    """
    # What an earlier run compiled would be read in one of the processes alone.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    last_lines = deque[str](maxlen=NUM_LAST_LINES)
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=kept | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            last_lines.append(text)
            _say(text.rstrip())
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{''.join(last_lines).strip()}")


def _say(text: str) -> None:
    """Shows how far the command is, beside its output."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run_pair(folder: Path, cores: list[int], *words: str) -> list[Any]:
    """What two processes of `pair` write, the first one first.

    Args:
      folder: where they write.
      cores: one for each.
      *words: further options.
    """
    launch = ["jpipe", "launch", "--processes", "2", "-m", f"{__package__}.pair"]
    _run([*launch, "--cores", json.dumps(cores), "--out", str(folder), *words])
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def measure_model(
    name: str,
    link: Link,
    rounds: int,
    cores: list[int],
    earlier: dict[str, Any] | None,
) -> dict[str, Any]:
    """Plans and tunes a model, and times all ways to run it.

    Args:
      name: of the model.
      link: how arrays pass between the processes.
      rounds: how many count.
      cores: one for each process.
      earlier: a result whose ways are timed again, if this is wanted.

    Returns:
      What `ways.find_ways` returns; ``"tuned"`` and all ``"ways"`` of `pair`; and
      ``"measured"``: what each of its processes measured.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        path = folder / "ways.json"
        if earlier is None:
            words = ["--latency", str(link.latency), "--bandwidth", str(link.bandwidth)]
            words += ["--out", str(path)]
            words += ["--core", str(cores[0])] if cores else []
            _run([f"{__package__}.ways", name, *words])
        else:
            path.write_text(json.dumps(earlier))
        words = ["--model", name, "--ways", str(path), "--rounds", str(rounds)]
        first, second = run_pair(folder, cores, *words)
        result = json.loads(path.read_text())
        result |= {"tuned": first["tuned"], "ways": first["ways"]}
        return result | {"measured": [first["measured"], second["measured"]]}


def measure_models(
    names: Sequence[str],
    results: dict[str, Any],
    path: Path | None,
    *,
    rounds: int,
    cores: list[int],
    again: bool,
) -> list[str]:
    """Measures models, and writes all results after each of them.

    Args:
      names: of the models.
      results: the name of each model and what was measured, which is filled.
      path: the file; ``None``: nothing is written.
      rounds: how many count.
      cores: one for each process.
      again: True to time the ways of results that are there.

    Returns:
      The errors of models that could not be measured.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    where = provenance()
    with tempfile.TemporaryDirectory() as folder:
        link, _ = run_pair(Path(folder), cores)
    failures: list[str] = []
    for name in names:
        begin = time.monotonic()
        try:
            earlier = results[name] if again else None
            result = measure_model(name, Link(**link), rounds, cores, earlier)
            result |= {"provenance": where, "link": link}
            page = format_page({name: result})
        except (RuntimeError, ValueError) as error:  # the others are measured
            failures.append(f"{name}: {error}")
            continue
        results[name] = result
        if path:
            path.write_text(json.dumps(results, indent=1) + "\n")
        _say(f"{name}: {time.monotonic() - begin:.0f} s in all\n\n{page}\n")
    return failures


def main() -> None:
    """Measures models, and prints the tables of all in the file."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="*",
        choices=list(MODELS),
        default=[*MODELS],
        help="without a name nothing is measured, and the file is printed",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write everything to a file")
    parser.add_argument(
        "--again", action="store_true", help="only time the ways in the file"
    )
    options = parser.parse_args()
    cores = separate_cores()
    if len(cores) == 1:
        parser.error("needs two cores")
    if options.rounds < 2:
        parser.error("--rounds: at least 2")

    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    if missing := [x for x in options.models if options.again and x not in results]:
        parser.error(f"--again: {missing} are not in the file")
    failures: list[str] = []
    if options.models:
        failures = measure_models(
            options.models,
            results,
            options.json,
            rounds=options.rounds,
            cores=cores,
            again=options.again,
        )
    in_order = {name: results[name] for name in MODELS if name in results}
    if in_order:
        print(format_page(in_order))
    if failures:
        raise SystemExit("\n\n".join(failures))


if __name__ == "__main__":
    main()
