"""The published tables, run here: list, run, table, page, peers."""

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from .result import DTYPES, FOLDER, SCALES, Result

if TYPE_CHECKING:  # JAX starts with the flags below, not before them
    from rich.progress import Progress

    from .tables.run import Options, Runner

# Before JAX starts: eight host devices of one thread each stand in for as many
# accelerators, and malloc keeps what is freed, as the allocators of GPUs do.
DEVICES = 8
_FLAGS = f"--xla_force_host_platform_device_count={DEVICES} "
_FLAGS += "--xla_cpu_multi_thread_eigen=false"
# At the tiny scale speed is not the subject, and compiling is most of the time.
_TINY = "--xla_backend_optimization_level=0"
if version("jax").startswith("0.10."):  # later ones do not know this
    _TINY += " --xla_cpu_use_fusion_emitters=false"
# What was compiled stays for the next run. Plain steps of the published sizes need
# nearly all of an accelerator's memory.
PROGRAMS = Path(__file__).resolve().parents[1] / "build" / "programs"
_OF_MEASURED = {"dtype": "float32", "schedule": "", "remat": "", "predict": False}
_MEASURED = {
    "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
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
    parser = _parser()
    options = parser.parse_args(argv)
    if getattr(options, "steps", 0) == 1:
        parser.error("--steps 1: needs at least 2, for a spread")
    is_measured = getattr(options, "measured", False)
    for name, default in _OF_MEASURED.items():
        value = getattr(options, name, default)
        if value != default and not is_measured:
            parser.error(f"--{name} {value}: needs --measured")
    if getattr(options, "scale", "") is None:
        options.scale = "full" if is_measured else "small"
    options.do(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listed = commands.add_parser("list", help="the tables and their experiments")
    listed.set_defaults(do=_list)

    run = commands.add_parser("run", help="run experiments and save what came out")
    run.add_argument("benchmark", nargs="*", help="names that `list` shows")
    run.add_argument("--all", action="store_true", help="every table")
    run.add_argument(
        "--experiment", action="append", default=[], help="one row; may be repeated"
    )
    run.add_argument(
        "--measured",
        action="store_true",
        help="nothing is predicted: all rows on the devices there are, stages sharing "
        "them where there are too few; at full scale unless another is given",
    )
    run.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of what is measured"
    )
    run.add_argument(
        "--schedule",
        default="",
        help="of what is measured, such as 1f1b (default: GPipe's, as published)",
    )
    run.add_argument(
        "--remat",
        choices=("except_last", "full", "none", "dots", "min_cut"),
        default="",
        help="of what is measured (default: as published; jpipe's is min_cut)",
    )
    run.add_argument(
        "--predict",
        action="store_true",
        help="with --measured: rows of more stages than devices are predicted from "
        "stage times of one device and --bandwidth",
    )
    run.add_argument("--steps", type=int, default=0, help="timed steps")
    run.add_argument(
        "--examples",
        type=int,
        default=0,
        help="largest micro-batch that is timed for a prediction; times of larger ones "
        "are scaled (default: 2 at full scale on a CPU, else no limit)",
    )
    run.add_argument(
        "--bandwidth", type=float, default=12.0, help="of predictions, in GB/s"
    )
    run.add_argument("--data", type=Path, help="an ImageNet folder")
    run.add_argument("--seeds", type=int, default=0, help="of accuracy")
    run.set_defaults(do=_run)

    table = commands.add_parser("table", help="print a saved result beside the paper's")
    table.add_argument("benchmark", nargs="*", help="names that `list` shows")
    table.add_argument("--all", action="store_true", help="every table")
    table.set_defaults(do=_table)
    for command in (run, table):
        command.add_argument("--scale", choices=SCALES, help="default: small")
        command.add_argument(
            "--folder", type=Path, default=FOLDER, help="where results are kept"
        )

    page = commands.add_parser("page", help="write kept results into the README")
    page.set_defaults(do=_page)

    # Only named here: it parses its own options.
    commands.add_parser(
        "peers",
        help="jpipe, torchgpipe and torch.distributed.pipelining",
        add_help=False,
    )
    return parser


def _names(options: argparse.Namespace) -> list[str]:
    from .published import BY_NAME

    names = list(BY_NAME) if options.all else options.benchmark
    unknown = [name for name in names if name not in BY_NAME]
    if unknown or not names:
        given = f"unknown: {', '.join(unknown)}" if unknown else "no table was named"
        raise SystemExit(f"{given}; choose from {', '.join(BY_NAME)}, or --all")
    return names


def _list(options: argparse.Namespace) -> None:
    from .published import BY_NAME

    for benchmark in BY_NAME.values():
        print(f"{benchmark.name}\n  {benchmark.title}")
        print(f"  {', '.join(row.name for row in benchmark.rows)}")


def _run(options: argparse.Namespace) -> None:
    _check_clean(options.folder)
    _start_again_with_flags(options)
    if options.measured:
        return _measure(options)
    from rich.progress import Progress, TimeElapsedColumn

    from .tables.run import Runner

    chosen = _chosen_rows(options)
    failed: list[str] = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        runner = Runner(_how_to_run(options), progress)
        for name, rows in chosen.items():
            failed += _run_table(name, rows, runner, progress, options.folder)
            text = _kept(name, options.scale, options.folder)
            progress.console.print(text, markup=False, soft_wrap=True)
    if failed:
        raise SystemExit("not run:\n" + "\n".join(failed))


def _measure(options: argparse.Namespace) -> None:
    """Rows on the devices that are there: see `benchmarks.measured`."""
    import jpipe

    from . import measured
    from .published import BY_NAME
    from .tables.report import whole

    schedules = jpipe.schedules.BY_NAME
    if options.schedule and options.schedule not in schedules:
        names = ", ".join(schedules)
        raise SystemExit(f"--schedule {options.schedule}: choose from {names}")
    jobs: list[tuple[str, list[str]]] = []
    for name, rows in _chosen_rows(options).items():
        kind = BY_NAME[name].kind
        kinds = ("speed",) if options.predict else measured.KINDS
        if kind not in kinds:
            word = "--predict" if options.predict else "--measured"
            listed = " and ".join(kinds)
            raise SystemExit(f"{name}: {word} is of tables of {listed}; not of {kind}")
        # Allocators count from the start of their process.
        jobs += [(name, [row]) for row in rows] if kind == "memory" else [(name, rows)]
    if len(jobs) == 1:
        ((name, rows),) = jobs
        how = measured.Options(
            scale=options.scale,
            dtype=options.dtype,
            steps=_steps(options),
            folder=options.folder,
            schedule=options.schedule,
            remat=options.remat,
            bandwidth=options.bandwidth if options.predict else None,
            examples=options.examples or None,
        )
        result, failed = measured.run(BY_NAME[name], rows, how)
        if result.rows:
            _render(result, options.folder / f"{result.stem}.json")
            print(whole(BY_NAME[name], result))
    else:
        failed = [
            f"{name}: {rows}" for name, rows in jobs if _apart(name, rows, options)
        ]
    if failed:
        raise SystemExit("not run:\n" + "\n".join(failed))


def _apart(name: str, rows: list[str], options: argparse.Namespace) -> int:
    """Runs rows in a process of their own; returns how it ended."""
    words = [sys.executable, "-m", "benchmarks", "run", name, "--measured"]
    words += ["--scale", options.scale, "--dtype", options.dtype]
    words += ["--steps", str(_steps(options)), "--folder", str(options.folder)]
    words += ["--bandwidth", str(options.bandwidth)]
    words += ["--examples", str(options.examples)]
    for option in ("schedule", "remat"):
        value = getattr(options, option)
        words += [f"--{option}", value] if value else []
    if options.predict:
        words.append("--predict")
    words += [word for row in rows for word in ("--experiment", row)]
    return subprocess.run(words, check=False).returncode


def _steps(options: argparse.Namespace) -> int:
    return options.steps or {"tiny": 2}.get(options.scale, 10)


def _chosen_rows(options: argparse.Namespace) -> dict[str, list[str]]:
    """The experiments of each table that was named."""
    from .published import BY_NAME
    from .tables.rows import default_rows, row_names

    chosen = {}
    for name in _names(options):
        known = row_names(BY_NAME[name], options.scale, options.measured)
        unknown = [row for row in options.experiment if row not in known]
        if unknown:
            raise SystemExit(
                f"{name} has no experiment {', '.join(unknown)} at {options.scale} "
                f"scale; it has {', '.join(known)}"
            )
        chosen[name] = options.experiment or default_rows(
            BY_NAME[name], options.scale, options.measured
        )
    return chosen


def _how_to_run(options: argparse.Namespace) -> "Options":
    """What was typed, and what follows from the scale and the devices."""
    import jax

    from .tables.run import Options

    is_full_on_cpu = jax.default_backend() == "cpu" and options.scale == "full"
    return Options(
        scale=options.scale,
        steps=_steps(options),
        examples=options.examples or (2 if is_full_on_cpu else None),
        bandwidth=options.bandwidth,
        measured=_measured(options.scale),
        data=options.data,
        seeds=options.seeds or {"tiny": 2}.get(options.scale, 5),
    )


def _run_table(
    name: str, rows: list[str], runner: "Runner", progress: "Progress", folder: Path
) -> list[str]:
    """Runs and keeps experiments of one table; returns what failed, and why."""
    from .published import BY_NAME

    # Rows of accuracy are checked together before the first is trained.
    is_one_run = BY_NAME[name].kind == "accuracy"
    parts = [rows] if is_one_run else [[row] for row in rows]
    task = progress.add_task(name, total=len(parts))
    failed = []
    for part in parts:
        progress.update(task, description=f"{name}: {', '.join(part)[:40]}")
        try:
            _keep(runner.run(BY_NAME[name], part), folder)
        except Exception as error:
            # The others may still run: what fails is told at the end.
            failed.append(f"{name}: {', '.join(part)}: {error!r}")
        progress.advance(task)
    return failed


def _keep(result: Result, folder: Path) -> None:
    """Saves a result over an earlier one as JSON, Markdown and PNG."""
    _render(*result.keep(folder))


def _render(result: Result, path: Path) -> None:
    from .published import BY_NAME
    from .tables.plot import plot
    from .tables.report import whole

    benchmark = BY_NAME[result.benchmark]
    picture = path.with_suffix(".png")
    plot(benchmark, result, picture)
    path.with_suffix(".md").write_text(whole(benchmark, result, picture))


def _measured(scale: str) -> list:
    """The devices that are really there: accelerators, or as many as there are cores.

    At full scale a CPU is too slow to train these models: there only predictions.
    """
    import jax

    from .provenance import cores

    if jax.default_backend() != "cpu":
        return jax.devices()
    return [] if scale == "full" else jax.devices()[: min(cores(), DEVICES)]


def _table(options: argparse.Namespace) -> None:
    for name in _names(options):
        print(_kept(name, options.scale, options.folder))


def _page(options: argparse.Namespace) -> None:
    """Writes the page, and the Markdown and pictures of kept results anew."""
    from .published import BY_NAME
    from .tables.page import PAGE, written

    for name in BY_NAME:
        for path in FOLDER.glob(f"{name}-*.json"):
            _render(Result.load(path), path)
    PAGE.write_text(written(PAGE.read_text()))


def _kept(name: str, scale: str, folder: Path) -> str:
    """The table of a saved result, or what to type for one."""
    from .published import BY_NAME
    from .tables.report import whole

    paths = [*folder.glob(f"{name}-{scale}.json")]
    paths += sorted(folder.glob(f"{name}-{scale}-*.json"))
    if paths:
        return "\n".join(whole(BY_NAME[name], Result.load(path)) for path in paths)
    return (
        f"{name}: no result at {scale} scale yet; type "
        f"python -m benchmarks run {name} --scale {scale}"
    )


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
    from .allocator import KEEP_MEMORY

    if options.measured:  # a single arena would hold up threads that compile
        wanted = {
            name: os.environ.get(name, value) for name, value in _MEASURED.items()
        }
    else:
        wanted = dict(KEEP_MEMORY)
    given = os.environ.get("XLA_FLAGS", "")
    if _FLAGS not in given:
        tiny = _TINY if options.scale == "tiny" else ""
        wanted["XLA_FLAGS"] = f"{given} {_FLAGS} {tiny}"
    if not wanted.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted)


if __name__ == "__main__":
    main()
