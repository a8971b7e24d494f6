"""Commands about schedules: draw one, compare several, check one's own."""

import argparse
import contextlib
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import draw, schedules
from ..schedules import Costs, Schedule, ScheduleError
from ..schedules._compare import fitting
from . import _files
from ._arguments import count, known, picture_path, schedule_name, time
from ._refusal import Unfit

# A text grid of more cells than that is not printed: nobody would look at it.
_LARGEST = 1_000_000


def add_draw(commands: Any) -> None:
    """Adds ``draw`` to the commands."""
    says = "draw a schedule, as text or into files"
    command = commands.add_parser("draw", help=says, description=says.capitalize())
    command.add_argument("name", type=schedule_name, help=f"one of {known()}")
    _add_numbers(command)
    command.add_argument(
        "--chunks",
        type=count,
        metavar="V",
        help="stages per rank, where it is a choice",
    )
    for option, read, what in (
        ("--svg", Path, "a picture as SVG"),
        (
            "--png",
            picture_path,
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


def add_compare(commands: Any) -> None:
    """Adds ``compare`` to the commands."""
    says = "a table of schedules: time, bubble and memory for the same work"
    command = commands.add_parser("compare", help=says, description=says.capitalize())
    command.add_argument(
        "names",
        type=schedule_name,
        nargs="*",
        metavar="NAME",
        help=f"some of {known()}; default: all but forward_only",
    )
    _add_numbers(command)
    command.set_defaults(run=_compare)


def add_check(commands: Any) -> None:
    """Adds ``check`` to the commands."""
    says = "say whether a schedule of your own can run, and if not, why"
    command = commands.add_parser("check", help=says, description=says.capitalize())
    command.add_argument(
        "file",
        help="one line of cells such as 2F0 for each rank, or what Schedule.to_json "
        "wrote; - reads standard input",
    )
    command.set_defaults(run=_check)


def _draw(arguments: argparse.Namespace) -> int:
    schedule = _built(arguments)
    with _refused():
        timeline = schedule.simulate(fitting(_costs(arguments), schedule))
    print(timeline)
    wrote = _files.write(
        [
            (arguments.svg, _files.text(lambda: draw.svg(timeline))),
            (arguments.png, lambda path: draw.png(timeline, path)),
            (arguments.trace, _files.text(lambda: draw.trace(timeline))),
        ]
    )
    if not wrote:
        print(timeline.to_text())
    return 0


def _built(arguments: argparse.Namespace) -> Schedule:
    builder, chunks = schedules.named(arguments.name), arguments.chunks
    options = {} if chunks is None else {"num_chunks": chunks}
    if chunks is not None and "num_chunks" not in inspect.signature(builder).parameters:
        raise Unfit(f"--chunks {chunks}: {arguments.name} has no such choice")
    with _refused():
        return builder(arguments.ranks, arguments.microbatches, **options)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turns what no schedule can be into what the command prints."""
    try:
        yield
    except ScheduleError as error:
        raise Unfit(str(error)) from None


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
        raise Unfit("\n".join(refused))
    with _refused():
        table = schedules.compare(found, _costs(arguments))
    print("\n".join([str(table), *refused]))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    text, name = _files.read(arguments.file)
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
    print(timeline)
    if len(timeline.rows) * timeline.makespan <= _LARGEST:
        print(timeline.to_text())
    return 0


def _add_numbers(command: argparse.ArgumentParser) -> None:
    for option, metavar, what in (
        ("--ranks", "P", "ranks"),
        ("--microbatches", "M", "micro-batches of a step"),
    ):
        command.add_argument(
            option,
            type=count,
            required=True,
            metavar=metavar,
            help=f"number of {what}",
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
        type=_latency,
        default=0.0,
        metavar="C",
        help="time of a transfer between two ranks, in the same unit; default: 0",
    )


def _costs(arguments: argparse.Namespace) -> Costs:
    return dataclasses.replace(arguments.costs, latency=arguments.latency)


def _times(text: str) -> Costs:
    says = f"{text}: write the times of F, I and W, such as 1,1,1, or of F and B: 1,2"
    try:
        forward, *back = (time(part, says) for part in text.split(","))
        half, rest = back if len(back) == 2 else (None, None)
        if len(back) not in (1, 2):
            raise ValueError(says)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Costs(forward, sum(back), half, rest)


def _latency(text: str) -> float:
    try:
        return time(text, f"{text}: write a time, such as 0.25")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
