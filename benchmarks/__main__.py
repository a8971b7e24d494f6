"""The published tables, run here: list, run, table, page, peers."""

import argparse
import os
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from .allocator import KEEP_MEMORY
from .processes import restart_with, xla_flags
from .result import DTYPES, FOLDER, SCALES, Result

if TYPE_CHECKING:  # JAX starts with the flags below, not before them
    from .tables.options import Options

# Before JAX starts: eight host devices of one thread each stand in for as many
# accelerators, and malloc keeps what is freed, as the allocators of GPUs do.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_multi_thread_eigen=false",
]
# At the tiny scale speed is not the subject, and compiling is most of the time.
_TINY = ["--xla_backend_optimization_level=0"]
if version("jax").startswith("0.10."):  # later ones do not know this
    _TINY.append("--xla_cpu_use_fusion_emitters=false")
# What was compiled stays for the next run. Plain steps of the published sizes need
# nearly all of an accelerator's memory.
_MEASURED = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / "build" / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
}


def main(argv: list[str] | None = None) -> None:
    """Does what was typed.

    Args:
      argv: what was typed after ``python -m benchmarks``; default: that of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["peers"]:
        from .peers.command import main as compare

        return compare(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_commands(commands)
    options = parser.parse_args(argv)
    options.do(options, parser)


def _add_commands(commands: "argparse._SubParsersAction") -> None:
    listed = commands.add_parser("list", help="the tables and their experiments")
    listed.set_defaults(do=_list)
    run = commands.add_parser("run", help="run experiments and save what came out")
    run.set_defaults(do=_run)
    table = commands.add_parser("table", help="print a saved result beside the paper's")
    table.set_defaults(do=_table)
    page = commands.add_parser("page", help="write kept results into the README")
    page.set_defaults(do=_page)
    # Only named here: it parses its own options.
    peers = "jpipe, torchgpipe and torch.distributed.pipelining"
    commands.add_parser("peers", help=peers, add_help=False)

    for command in (run, table):
        add = command.add_argument
        add("benchmark", nargs="*", help="names that `list` shows")
        add("--all", action="store_true", help="every table")
        add("--scale", choices=SCALES, help="default: small")
        add("--folder", type=Path, default=FOLDER, help="where results are kept")
    add = run.add_argument
    add("--experiment", action="append", default=[], help="one row; may be repeated")
    add(
        "--measured",
        action="store_true",
        help="nothing is predicted: all rows on the devices there are, stages sharing "
        "them where there are too few; at full scale unless another is given",
    )
    add("--dtype", choices=DTYPES, default="float32", help="of what is measured")
    add(
        "--schedule",
        default="",
        help="of what is measured, such as 1f1b (default: GPipe's, as published)",
    )
    add(
        "--remat",
        choices=("except_last", "full", "none", "dots", "min_cut"),
        default="",
        help="of what is measured (default: as published; jpipe's is min_cut)",
    )
    add(
        "--predict",
        action="store_true",
        help="with --measured: rows of more stages than devices are predicted from "
        "stage times of one device and --bandwidth",
    )
    add("--steps", type=int, default=0, help="timed steps")
    add(
        "--examples",
        type=int,
        default=0,
        help="largest micro-batch that is timed for a prediction; times of larger ones "
        "are scaled (default: 2 at full scale on a CPU, else no limit)",
    )
    add("--bandwidth", type=float, default=12.0, help="of predictions, in GB/s")
    add("--data", type=Path, help="an ImageNet folder")
    add("--seeds", type=int, default=0, help="of accuracy")


def _list(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from .published import BY_NAME

    for benchmark in BY_NAME.values():
        print(f"{benchmark.name}\n  {benchmark.title}")
        print(f"  {', '.join(row.name for row in benchmark.rows)}")


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.steps == 1:
        parser.error("--steps 1: needs at least 2, for a spread")
    for name in ("dtype", "schedule", "remat", "predict"):
        value = getattr(options, name)
        if value not in ("float32", "", False) and not options.measured:
            parser.error(f"--{name} {value}: needs --measured")
    is_tiny = options.scale == "tiny"
    options.scale = options.scale or ("full" if options.measured else "small")
    options.steps = options.steps or (2 if is_tiny else 10)
    options.seeds = options.seeds or (2 if is_tiny else 5)
    _check_clean(options.folder)
    _start_again_with_flags(options)
    import jax

    from .published import BY_NAME
    from .tables.options import Options
    from .tables.run import run

    if options.scale == "full" and jax.default_backend() == "cpu":
        options.examples = options.examples or 2

    names = [field.name for field in fields(Options)]
    how = Options(**{name: getattr(options, name) for name in names})
    parts = _parts(options, how)
    failed: list[str] = []
    for name, rows in parts:
        if how.measured and len(parts) > 1:
            if _run_apart(name, rows, how):
                failed.append(f"{name}: {rows}")
        else:
            failed += run(BY_NAME[name], rows, how)
    if failed:
        raise SystemExit("not run:\n" + "\n".join(failed))


def _parts(options: argparse.Namespace, how: "Options") -> list[tuple[str, list[str]]]:
    """The tables that were named, and of each the rows; all are checked."""
    import jpipe

    from .published import BY_NAME
    from .tables.measured import KINDS

    schedules = jpipe.schedules.BY_NAME
    if how.schedule and how.schedule not in schedules:
        names = ", ".join(schedules)
        raise SystemExit(f"--schedule {how.schedule}: choose from {names}")
    parts: list[tuple[str, list[str]]] = []
    for name in _names(options):
        benchmark = BY_NAME[name]
        known = benchmark.row_names(how.scale, how.measured)
        unknown = [row for row in options.experiment if row not in known]
        if unknown:
            raise SystemExit(
                f"{name} has no experiment {', '.join(unknown)} at {how.scale} "
                f"scale; it has {', '.join(known)}"
            )
        kinds = ("speed",) if how.predict else KINDS
        if how.measured and benchmark.kind not in kinds:
            option = "--predict" if how.predict else "--measured"
            listed = " and ".join(kinds)
            raise SystemExit(
                f"{name}: {option} is of tables of {listed}; not of {benchmark.kind}"
            )
        rows = options.experiment or benchmark.default_rows(how.scale, how.measured)
        if how.measured and benchmark.kind == "memory":
            # Allocators count from the start of their process.
            parts += [(name, [row]) for row in rows]
        else:
            parts.append((name, rows))
    return parts


def _run_apart(name: str, rows: list[str], how: "Options") -> int:
    """Runs rows in a process of their own; returns how it ended."""
    words = [sys.executable, "-m", "benchmarks", "run", name]
    for field in fields(how):
        value = getattr(how, field.name)
        if value is True:
            words.append(f"--{field.name}")
        elif value:
            words += [f"--{field.name}", str(value)]
    for row in rows:
        words += ["--experiment", row]
    return subprocess.run(words, check=False).returncode


def _table(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from .published import BY_NAME
    from .tables.report import whole

    scale = options.scale or "small"
    for name in _names(options):
        paths = [*options.folder.glob(f"{name}-{scale}.json")]
        paths += sorted(options.folder.glob(f"{name}-{scale}-*.json"))
        for path in paths:
            print(whole(BY_NAME[name], Result.load(path)))
        if not paths:
            print(
                f"{name}: no result at {scale} scale yet; type "
                f"python -m benchmarks run {name} --scale {scale}"
            )


def _page(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Writes the page, and the Markdown and pictures of kept results anew."""
    from .published import BY_NAME
    from .tables.page import PAGE, written
    from .tables.run import render

    for name in BY_NAME:
        for path in FOLDER.glob(f"{name}-*.json"):
            render(Result.load(path), path)
    PAGE.write_text(written(PAGE.read_text()))


def _names(options: argparse.Namespace) -> list[str]:
    from .published import BY_NAME

    names = list(BY_NAME) if options.all else options.benchmark
    unknown = [name for name in names if name not in BY_NAME]
    if unknown or not names:
        fault = f"unknown: {', '.join(unknown)}" if unknown else "no table was named"
        raise SystemExit(f"{fault}; choose from {', '.join(BY_NAME)}, or --all")
    return names


def _check_clean(folder: Path) -> None:
    """Refuses to keep beside published results what no commit can make again."""
    from .provenance import DIRTY, commit

    if folder.resolve() == FOLDER.resolve() and (commit() or "").endswith(DIRTY):
        raise SystemExit(
            "files were changed since the last commit, so nobody could make these "
            "results again: commit them first, or add --folder build/results"
        )


def _start_again_with_flags(options: argparse.Namespace) -> None:
    """Flags and variables are read when a process starts."""
    if options.measured:  # a single arena would hold up threads that compile
        variables = {
            name: os.environ.get(name, value) for name, value in _MEASURED.items()
        }
    else:
        variables = dict(KEEP_MEMORY)
    flags = [*_FLAGS, *_TINY] if options.scale == "tiny" else _FLAGS
    variables |= xla_flags(*flags)
    restart_with(variables, "benchmarks")


if __name__ == "__main__":
    main()
