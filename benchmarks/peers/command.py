"""The comparison: what runs, in which order, and what comes out."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from ..provenance import commit, processor
from . import report
from .launch import REMATS, SCHEDULES, SIDES, Run, versions
from .measure import separate_cores
from .workload import SIZES, Case

SCALES = ("full", "small", "tiny")

# Where things are on one machine: nothing that a result should tell.
_PATHS = ("json", "torch_python")


def main(argv: list[str] | None = None) -> None:
    """Runs the comparison and prints it as Markdown.

    Args:
      argv: what was typed after the command; default: that of this process.

    Raises:
      SystemExit: with status 1 if the sides did not do the same work, or a run failed;
        with 2 if the options make no sense.
    """
    options = parse(argv)
    found, skipped = available(options)
    for reason in skipped.values():
        print(f"left out: {reason}", file=sys.stderr)
    if not found:
        raise SystemExit("nothing to run")
    made = provenance(found)
    rounds = measure(planned(options, list(found)), options.rounds)
    result = {
        "provenance": made | {"load_after": load()},
        "settings": {k: v for k, v in vars(options).items() if k not in _PATHS},
        "skipped": skipped,
        "rows": report.rows(rounds),
        "same_work": report.same_work(rounds),
        "runs": [
            {"title": run.title, "case": vars(run.case), "rounds": results}
            for run, results in rounds.items()
        ],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(report.shown(result))
    if not all(work["same"] for work in result["same_work"]):
        raise SystemExit(1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=(sys.modules[__package__ or ""].__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=4, help="fresh processes of each")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--scale", choices=SCALES, default="full")
    _add_list(parser, "--models", list(SIZES))
    _add_list(parser, "--sides", list(SIDES))
    _add_list(parser, "--schedules", list(SCHEDULES), default="gpipe,1f1b")
    _add_list(parser, "--remat", list(REMATS), default="none")
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        default=sys.executable,
        help="another interpreter for the sides that need PyTorch",
    )
    parser.add_argument("--json", metavar="PATH", help="write everything to a file")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json: no folder for {options.json}")
    for model in options.models:
        batch = SIZES[model][options.scale].batch
        if options.microbatches < 2 or batch % options.microbatches:
            parser.error(f"--microbatches: 2 or more, a divisor of {batch}")
    return options


def _add_list(
    parser: argparse.ArgumentParser, name: str, known: list[str], default: str = ""
) -> None:
    def some(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [word for word in asked if word not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: choose from {', '.join(known)}"
            )
        return list(dict.fromkeys(asked))

    default = default or ",".join(known)
    parser.add_argument(
        name, type=some, default=default, metavar="A,B", help=f"default: {default}"
    )


def available(
    options: argparse.Namespace,
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The versions of each side that can run, and why the others cannot."""
    found, skipped = {}, {}
    for name in options.sides:
        side = SIDES[name]
        try:
            found[name] = versions(_python(name, options), side.packages)
        except ImportError as error:
            skipped[name] = f"{side.title} ({error}); to have it: {side.install}"
    return found, skipped


def _python(side: str, options: argparse.Namespace) -> str:
    """The interpreter of a side."""
    if SIDES[side].framework == "PyTorch":
        return options.torch_python
    return sys.executable


def provenance(found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Versions, machine, date and commit."""
    together: dict[str, str] = {}
    for name, own in found.items():
        for package, version in own.items():
            if together.setdefault(package, version) != version:
                together[f"{package} of {SIDES[name].title}"] = version
    return {
        "versions": together,
        "processor": processor(),
        "cores": len(separate_cores()) or os.cpu_count(),
        "load_before": load(),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def load() -> float:
    """How many processes wanted to run in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def planned(options: argparse.Namespace, sides: Sequence[str]) -> list[Run]:
    """The runs of a round; each baseline once, before the first that needs it."""
    runs: dict[Run, None] = {}
    for run in _pipelines(options, sides):
        runs |= {run.baseline: None, run: None}
    return list(runs)


def _pipelines(options: argparse.Namespace, sides: Sequence[str]) -> Iterator[Run]:
    for model in options.models:
        for remat in options.remat:
            case = Case(model, options.scale, options.microbatches, remat=remat)
            for name in (side for side in sides if remat in SIDES[side].remats):
                for schedule in SIDES[name].schedules:
                    if schedule in options.schedules:
                        own = replace(case, schedule=schedule)
                        yield Run(name, own, _python(name, options))


def measure(runs: Sequence[Run], rounds: int) -> report.Rounds:
    """Runs everything in turns, every second round backwards; shows how far it is."""
    from rich.console import Console
    from rich.progress import track

    results: report.Rounds = {run: [] for run in runs}
    cores = separate_cores()
    if len(cores) == 1:
        print("only one core: stages share it", file=sys.stderr)
        cores = cores * 2
    order = [
        run for number in range(rounds) for run in runs[:: -1 if number % 2 else 1]
    ]
    for run in track(order, console=Console(stderr=True)):
        try:
            results[run].append(run.start(cores))
        except RuntimeError as error:
            raise SystemExit(f"{run.title} failed: {error}") from error
    return results
