"""The commands ``draw``, ``compare`` and ``check``."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import draw, schedules
from ..schedules import Costs, Schedule, ScheduleError, Timeline
from ..schedules._catalogue import TRAINING
from ..schedules._compare import scale_costs
from ._parsers import CommandError, parse_count, parse_output_path, parse_schedule_name

# The most cells of a picture that is printed.
_MAX_CELLS = 1_000_000
# The most turns of a micro-batch on a rank, idle ones included: a schedule of so many
# takes half a minute and 2 GB.
_MAX_TURNS = 300_000


def add_draw(commands: Any) -> None:
    """Adds the command ``draw``."""
    purpose = "draw a schedule, as text or into files"
    command = _add_command(commands, "draw", purpose=purpose, run=_draw)
    names = ", ".join(schedules.BY_NAME)
    command.add_argument("name", type=parse_schedule_name, help=f"one of {names}")
    _add_numbers(command)
    command.add_argument(
        "--svg", type=parse_output_path, metavar="FILE", help="write a picture as SVG"
    )
    command.add_argument(
        "--trace",
        type=parse_output_path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev; a unit of time is shown as a second",
    )


def add_compare(commands: Any) -> None:
    """Adds the command ``compare``."""
    purpose = "a table of schedules: time, bubble and memory for the same work"
    command = _add_command(commands, "compare", purpose=purpose, run=_compare)
    command.add_argument(
        "names",
        type=parse_schedule_name,
        nargs="*",
        metavar="NAME",
        help="some of those that draw takes; default: all but forward_only",
    )
    _add_numbers(command)


def add_check(commands: Any) -> None:
    """Adds the command ``check``."""
    purpose = "show whether a schedule of your own can run, and if not, why"
    command = _add_command(commands, "check", purpose=purpose, run=_check)
    command.add_argument(
        "file",
        help="one line of cells such as 2F0 for each rank, or what Schedule.to_json "
        "wrote; - reads standard input",
    )


def _add_command(
    commands: Any,
    name: str,
    *,
    purpose: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a command without arguments.

    Args:
      commands: the commands of the parser.
      name: its name.
      purpose: its help.
      run: the function that runs it, and returns the exit status.
    """
    command = commands.add_parser(name, help=purpose, description=purpose.capitalize())
    command.set_defaults(run=run)
    return command


def _draw(arguments: argparse.Namespace) -> int:
    _check_turns(arguments)
    builder = schedules.named(arguments.name)
    schedule = builder(arguments.ranks, arguments.microbatches)
    timeline = schedule.simulate(scale_costs(_costs(arguments), schedule))
    print(timeline)
    if arguments.svg is None and arguments.trace is None:
        _print_grid(timeline)
    if arguments.svg is not None:
        _write(arguments.svg, draw.svg(timeline))
    if arguments.trace is not None:
        _write(arguments.trace, draw.trace(timeline))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    _check_turns(arguments)
    names = arguments.names
    if not names:
        names = TRAINING

    comparable: list[Schedule] = []
    refusals: list[str] = []
    for name in names:
        builder = schedules.named(name)
        try:
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
    _print_grid(timeline)
    return 0


def _check_turns(arguments: argparse.Namespace) -> None:
    """Refuses schedules that would take more time and memory than anybody has."""
    turns = arguments.ranks * (arguments.ranks + arguments.microbatches)
    if turns > _MAX_TURNS:
        raise CommandError(
            f"--ranks {arguments.ranks} --microbatches {arguments.microbatches}: what "
            f"is drawn or compared has ranks * (ranks + microbatches) of at most "
            f"{_MAX_TURNS:,}; take fewer, such as --ranks 4 --microbatches 8"
        )


def _print_grid(timeline: Timeline) -> None:
    """Prints the picture of a timeline, unless it is wider than anybody reads."""
    num_cells = len(timeline.rows) * timeline.num_columns
    if num_cells <= _MAX_CELLS:
        print(timeline.to_text())
    else:
        print(
            f"the grid has more than {_MAX_CELLS:,} cells, and is not printed; "
            f"draw --svg FILE draws it to scale"
        )


def _read(file: str) -> tuple[str, str]:
    """Reads a file or standard input; returns the text and a name for its schedule."""
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
    """Adds the sizes and costs of schedules to the options of a command."""
    command.add_argument(
        "--ranks",
        type=parse_count,
        required=True,
        metavar="P",
        help="number of ranks",
    )
    command.add_argument(
        "--microbatches",
        type=parse_count,
        required=True,
        metavar="M",
        help="number of micro-batches of a step",
    )
    command.add_argument(
        "--costs",
        type=_parse_costs,
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


def _parse_costs(text: str) -> Costs:
    """Parses costs from ``F,I,W`` or ``F,B``."""
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
