"""Schedules on the command line: draw one, compare several, check your own.

python -m jpipe draw zb_v --ranks 4 --microbatches 8 --svg zb_v.svg
python -m jpipe compare --ranks 4 --microbatches 16 --latency 0.25
python -m jpipe check my_schedule.txt
"""

import argparse
import dataclasses
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from . import draw, schedules
from .schedules import Costs, Schedule, ScheduleError, Timeline

# Into so many columns the text grid cuts the shortest action at most.
_FINEST = 8
# A text grid of more cells than that is not printed: nobody would look at it.
_LARGEST = 1_000_000


class _Unfit(ValueError):
    """Arguments that are well formed and still do not fit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: its arguments; default: those of this process.

    Returns:
      The exit status: 0; 1 if a schedule was checked and cannot run; 2 for arguments
      that do not fit.

    Example:
      >>> main(["compare", "--ranks", "4", "--microbatches", "8", "gpipe", "zb_v"])
      | schedule | stages | time | bubble | peak bytes per rank |
      | -------- | ------ | ---- | ------ | ------------------- |
      | gpipe    | 4      | 33   | 27.3 % | 8, 8, 8, 8          |
      | zb_v     | 8      | 25.5 | 5.9 %  | 4, 4, 4, 4          |
      0
    """
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except SystemExit as end:  # argparse has printed help, or what was wrong
        return int(end.code or 0)
    except (_Unfit, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


# ------------------------------------------------------------------ the commands


def _draw(arguments: argparse.Namespace) -> int:
    schedule = _built(arguments)
    timeline = schedule.simulate(arguments.costs.per_chunk(_num_chunks(schedule)))
    print(_summary(timeline, schedule.num_microbatches))
    files: list[tuple[Path | None, Callable[[Path], object]]] = [
        (arguments.svg, lambda path: path.write_text(draw.svg(timeline), "utf-8")),
        (arguments.png, lambda path: draw.png(timeline, path)),
        (arguments.trace, lambda path: path.write_text(draw.trace(timeline), "utf-8")),
    ]
    wanted = [(path, write) for path, write in files if path is not None]
    for path, write in wanted:
        write(path)
        print(f"wrote {path}")
    if not wanted:
        print(_grid(timeline))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    names = arguments.names or [n for n in schedules.BY_NAME if n != "forward_only"]
    found, refused = [], []
    for name in names:
        try:
            builder = schedules.named(name)
            found.append(builder(arguments.ranks, arguments.microbatches))
        except ScheduleError as error:
            refused.append(f"no order of {error}")
    if not found:
        raise _Unfit("\n".join(refused))
    print("\n".join([str(schedules.compare(found, arguments.costs)), *refused]))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    text, name = _read(arguments.file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if text.lstrip().startswith(("{", "[")):
                schedule = Schedule.from_json(text)
            else:
                schedule = Schedule.from_text(text, name)
        except ScheduleError as error:
            print(error, file=sys.stderr)
            return 1
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    timeline = schedule.simulate()
    if len(timeline.rows) * timeline.makespan > _LARGEST:
        print(_summary(timeline, schedule.num_microbatches))
    else:
        print(schedule)
        print(f"peak per rank, in micro-batches of a stage: {_peaks(timeline)}")
    return 0


# ------------------------------------------------------------ what they are made of


def _built(arguments: argparse.Namespace) -> Schedule:
    builder, options = schedules.named(arguments.name), {}
    if arguments.chunks is not None:
        if not _takes_chunks(builder):
            able = [n for n, b in schedules.BY_NAME.items() if _takes_chunks(b)]
            raise _Unfit(
                f"--chunks {arguments.chunks}: {arguments.name} has no such choice; "
                f"leave it out, or draw {' or '.join(able)}"
            )
        options["num_chunks"] = arguments.chunks
    try:
        return builder(arguments.ranks, arguments.microbatches, **options)
    except ScheduleError as error:
        raise _Unfit(str(error)) from None


def _takes_chunks(builder: schedules.ScheduleBuilder) -> bool:
    return "num_chunks" in inspect.signature(builder).parameters


def _num_chunks(schedule: Schedule) -> int:
    return schedule.num_stages // schedule.num_ranks


def _read(file: str) -> tuple[str, str]:
    """The text of a file or of standard input, and what to call the schedule."""
    try:
        if file == "-":
            return sys.stdin.read(), "stdin"
        return Path(file).read_text("utf-8"), Path(file).stem
    except UnicodeDecodeError:
        raise _Unfit(f"{file}: is not a text in UTF-8") from None


def _summary(timeline: Timeline, num_microbatches: int) -> str:
    bubble = f"{timeline.bubble_fraction:.1%}".replace("%", " %")
    sizes = (
        (len(timeline.rows), "rank", "s"),
        (timeline.num_stages, "stage", "s"),
        (num_microbatches, "micro-batch", "es"),
    )
    counts = (f"{n} {noun}{'' if n == 1 else plural}" for n, noun, plural in sizes)
    return (
        f"{timeline.name}: {', '.join(counts)}, time {timeline.makespan:.4g}, "
        f"bubble {bubble}, peak per rank {_peaks(timeline)}"
    )


def _peaks(timeline: Timeline) -> str:
    return ", ".join(f"{peak:.4g}" for peak in timeline.peak_bytes)


def _grid(timeline: Timeline) -> str:
    """The text grid, in columns so fine that actions begin and end with one."""
    column = _column(timeline)
    if not column:
        return timeline.to_text()
    scaled = dataclasses.replace(
        timeline,
        start={action: time / column for action, time in timeline.start.items()},
        end={action: time / column for action, time in timeline.end.items()},
    )
    note = f"a column is {float(column):.4g} units of time\n" if column != 1 else ""
    return note + scaled.to_text()


def _column(timeline: Timeline) -> Fraction:
    """The greatest time of which all times are multiples, if that is not too fine."""
    times = [
        Fraction(time).limit_denominator(10_000)
        for time in (*timeline.start.values(), *timeline.end.values())
    ]
    common = math.lcm(*(time.denominator for time in times))
    exact = Fraction(math.gcd(*(int(time * common) for time in times)), common)
    taken = [timeline.end[action] - start for action, start in timeline.start.items()]
    shortest = min((time for time in taken if time > 0), default=0.0)
    # Rather rounded times than a grid that is wider than any screen.
    return max(exact, Fraction(shortest) / _FINEST) if exact else exact


# ------------------------------------------------------------------ the arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jpipe",
        description="Draws, compares and checks schedules of pipelines.",
        epilog="Options of a command: python -m jpipe draw --help",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_draw, _add_compare, _add_check):
        add(commands)
    return parser


def _add_draw(commands) -> None:
    says = "draw a schedule, as text or into files"
    command = commands.add_parser("draw", help=says, description=says.capitalize())
    command.add_argument("name", type=_name, help=f"one of {_known()}")
    _add_numbers(command)
    command.add_argument(
        "--chunks",
        type=_count,
        metavar="V",
        help="stages per rank, where it is a choice",
    )
    for option, read, what in (
        ("--svg", Path, "a picture as SVG"),
        (
            "--png",
            _png_path,
            "a picture as PNG, or PDF by its ending; needs matplotlib",
        ),
        (
            "--trace",
            Path,
            "a trace for ui.perfetto.dev; a unit of time is shown as a second",
        ),
    ):
        command.add_argument(option, type=read, metavar="FILE", help=f"write {what}")
    command.set_defaults(run=_draw)


def _add_compare(commands) -> None:
    says = "a table of schedules: time, bubble and memory for the same work"
    command = commands.add_parser("compare", help=says, description=says.capitalize())
    command.add_argument(
        "names",
        type=_name,
        nargs="*",
        metavar="NAME",
        help=f"some of {_known()}; default: all but forward_only",
    )
    _add_numbers(command)
    command.set_defaults(run=_compare)


def _add_check(commands) -> None:
    says = "say whether a schedule of your own can run, and if not, why"
    command = commands.add_parser("check", help=says, description=says.capitalize())
    command.add_argument(
        "file",
        help="one line of cells such as 2F0 for each rank, or what Schedule.to_json "
        "wrote; - reads standard input",
    )
    command.set_defaults(run=_check)


def _add_numbers(command: argparse.ArgumentParser) -> None:
    for option, metavar, what in (
        ("--ranks", "P", "ranks"),
        ("--microbatches", "M", "micro-batches of a step"),
    ):
        command.add_argument(
            option,
            type=_count,
            required=True,
            metavar=metavar,
            help=f"number of {what}",
        )
    command.add_argument(
        "--costs",
        action=_SetCosts,
        default=Costs(),
        metavar="F,I,W",
        help="times of the forward and the two halves of the backward of all the "
        "layers of a rank, or F,B; several stages per rank share them; default: 1,1,1",
    )
    command.add_argument(
        "--latency",
        action=_SetCosts,
        metavar="C",
        help="time of a transfer between two ranks, in the same unit; default: 0",
    )


class _SetCosts(argparse.Action):
    """Two options that fill one `Costs`, in whichever order they come."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        read = _latency if self.dest == "latency" else _costs
        try:
            fields = read(str(values))
        except ValueError as error:
            parser.error(f"{option_string} {values}: {error}")
        namespace.costs = dataclasses.replace(namespace.costs, **fields)


def _costs(text: str) -> dict[str, float | None]:
    says = "write the times of F, I and W, such as 1,1,1, or of F and B, such as 1,2"
    times = [_time(part, says) for part in text.split(",")]
    if len(times) not in (2, 3):
        raise ValueError(says)
    half, rest = times[1:] if len(times) == 3 else (None, None)
    return {
        "forward": times[0],
        "backward": sum(times[1:]),
        "input_grad": half,
        "weight_grad": rest,
    }


def _latency(text: str) -> dict[str, float | None]:
    return {"latency": _time(text, "write a time, such as 0.25")}


def _time(text: str, says: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise ValueError(says)
    return time


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number of at least 1, such as 4"
        )
    return int(text)


def _png_path(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .png or .pdf")
    return Path(text)


def _name(text: str) -> str:
    try:
        schedules.named(text)
    except ValueError:
        says = f"unknown schedule {text!r}: choose {_known()}"
        raise argparse.ArgumentTypeError(says) from None
    return text


def _known() -> str:
    return ", ".join(schedules.BY_NAME)


if __name__ == "__main__":
    sys.exit(main())
