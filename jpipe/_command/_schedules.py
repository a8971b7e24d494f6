"""Commands about schedules: draw one, compare several, check one's own."""

import argparse
import dataclasses
import functools
import sys
from typing import Any

from .. import draw, schedules
from ..schedules import Costs, Schedule, ScheduleError
from ..schedules._compare import fitting
from . import _files
from ._arguments import count, schedule_name, several
from ._refusal import CommandError

# A text grid of more cells than that is not printed: nobody would look at it.
_LARGEST = 1_000_000


def add_draw(commands: Any) -> None:
    """Adds ``draw`` to the commands."""
    text = "draw a schedule, as text or into files"
    command = commands.add_parser("draw", help=text, description=text.capitalize())
    names = ", ".join(schedules.BY_NAME)
    command.add_argument("name", type=schedule_name, help=f"one of {names}")
    _add_numbers(command)
    _files.add(command, "svg", "trace")
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
    timeline = schedule.simulate(fitting(_costs(arguments), schedule))
    print(timeline)
    pictures = {"svg": draw.svg, "trace": draw.trace}
    writers = {n: functools.partial(make, timeline) for n, make in pictures.items()}
    if not _files.write(arguments, **writers):
        print(timeline.to_text())
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
        raise CommandError("\n".join(refused))
    table = schedules.compare(found, _costs(arguments))
    print("\n".join([str(table), *refused]))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    text, name = _files.read(arguments.file)
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


def _add_numbers(command: argparse.ArgumentParser) -> None:
    for option, metavar, what in (
        ("--ranks", "P", "number of ranks"),
        ("--microbatches", "M", "number of micro-batches of a step"),
    ):
        command.add_argument(
            option, type=count, required=True, metavar=metavar, help=what
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
    message = f"{text!r}: write F, I and W, such as 1,1,1, or F and B: 1,2"
    try:
        forward, *back = several(float)(text)
    except ValueError:
        raise argparse.ArgumentTypeError(message) from None
    if len(back) not in (1, 2):
        raise argparse.ArgumentTypeError(message)
    return Costs(forward, sum(back), *(back if len(back) == 2 else ()))
