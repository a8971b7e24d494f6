"""Commands about schedules: draw one, compare several, check one's own."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from .. import draw, schedules
from ..schedules import Costs, Schedule, ScheduleError
from ..schedules._compare import scale_costs
from ._arguments import CommandError, output_path, positive_int, schedule_name

# A text grid of more cells than that is not printed: nobody would look at it.
_LARGEST = 1_000_000


def add_draw(commands: Any) -> None:
    """Adds ``draw`` to the commands."""
    text = "draw a schedule, as text or into files"
    command = commands.add_parser("draw", help=text, description=text.capitalize())
    names = ", ".join(schedules.BY_NAME)
    command.add_argument("name", type=schedule_name, help=f"one of {names}")
    _add_numbers(command)
    command.add_argument(
        "--svg", type=output_path, metavar="FILE", help="write a picture as SVG"
    )
    command.add_argument(
        "--trace",
        type=output_path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev; a unit of time is shown as a second",
    )
    command.set_defaults(run=_draw)


def add_compare(commands: Any) -> None:
    """Adds ``compare`` to the commands."""
    text = "a table of schedules: time, bubble and memory for the same work"
    command = commands.add_parser("compare", help=text, description=text.capitalize())
    command.add_argument(
        "names",
        type=schedule_name,
        nargs="*",
        metavar="NAME",
        help="some of those that draw takes; default: all but forward_only",
    )
    _add_numbers(command)
    command.set_defaults(run=_compare)


def add_check(commands: Any) -> None:
    """Adds ``check`` to the commands."""
    text = "show whether a schedule of your own can run, and if not, why"
    command = commands.add_parser("check", help=text, description=text.capitalize())
    command.add_argument(
        "file",
        help="one line of cells such as 2F0 for each rank, or what Schedule.to_json "
        "wrote; - reads standard input",
    )
    command.set_defaults(run=_check)


def _draw(arguments: argparse.Namespace) -> int:
    builder = schedules.named(arguments.name)
    schedule = builder(arguments.ranks, arguments.microbatches)
    timeline = schedule.simulate(scale_costs(_costs(arguments), schedule))
    print(timeline)
    if arguments.svg is None and arguments.trace is None:
        print(timeline.to_text())
    if arguments.svg is not None:
        _write(arguments.svg, draw.svg(timeline))
    if arguments.trace is not None:
        _write(arguments.trace, draw.trace(timeline))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    names = arguments.names or [n for n in schedules.BY_NAME if n != "forward_only"]
    comparable = []
    refusals = []
    for name in names:
        try:
            builder = schedules.named(name)
            comparable.append(builder(arguments.ranks, arguments.microbatches))
        except ScheduleError as error:
            refusals.append(f"no order of {error}")
    if not comparable:
        raise CommandError("\n".join(refusals))
    table = schedules.compare(comparable, _costs(arguments))
    print("\n".join([str(table), *refusals]))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    text, name = _read(arguments.file)
    try:
        if text.lstrip().startswith(("{", "[")):
            schedule = Schedule.from_json(text)
        else:
            schedule = Schedule.from_text(text, name)
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    timeline = schedule.simulate()
    print(timeline)
    if len(timeline.rows) * timeline.makespan <= _LARGEST:
        print(timeline.to_text())
    return 0


def _read(file: str) -> tuple[str, str]:
    """The text of a file or of standard input, and a name for the schedule in it."""
    if file == "-":
        return sys.stdin.read(), "stdin"
    try:
        return Path(file).read_text("utf-8"), Path(file).stem
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file}: {error}") from None


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    print(f"wrote {path}")


def _add_numbers(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ranks",
        type=positive_int,
        required=True,
        metavar="P",
        help="number of ranks",
    )
    command.add_argument(
        "--microbatches",
        type=positive_int,
        required=True,
        metavar="M",
        help="number of micro-batches of a step",
    )
    command.add_argument(
        "--costs",
        type=_times,
        default=Costs(),
        metavar="F,I,W",
        help="times of the forward and the two halves of the backward of all the "
        "layers of a rank, or F,B; several stages per rank share them; default: 1,1,1",
    )
    command.add_argument(
        "--latency",
        type=float,
        default=0.0,
        metavar="C",
        help="time of a transfer between two ranks, in the same unit; default: 0",
    )


def _costs(arguments: argparse.Namespace) -> Costs:
    return dataclasses.replace(arguments.costs, latency=arguments.latency)


def _times(text: str) -> Costs:
    """Costs from ``F,I,W`` or ``F,B``."""
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if len(times) == 2:
        forward, backward = times
        return Costs(forward, backward)
    if len(times) == 3:
        forward, input_grad, weight_grad = times
        return Costs(
            forward,
            input_grad + weight_grad,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )
    raise argparse.ArgumentTypeError(
        f"{text!r}: write F, I and W, such as 1,1,1, or F and B: 1,2"
    )
