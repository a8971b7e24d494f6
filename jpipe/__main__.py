"""Draws, compares and checks schedules; starts several processes of a program.

python -m jpipe draw zb_v --ranks 4 --microbatches 8 --svg zb_v.svg
python -m jpipe compare --ranks 4 --microbatches 16 --latency 0.25
python -m jpipe check my_schedule.txt
python -m jpipe launch --processes 2 train.py
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ._command import _launch, _schedules
from ._command._parsers import CommandError
from .schedules import ScheduleError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: the arguments of the command; default: those of this process.

    Returns:
      The exit status: 0; 1 if a schedule was checked and cannot run; 2 for arguments
      that do not fit. ``launch`` returns that of the first process that failed.

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
    except SystemExit as end:
        # `argparse` has printed help or an error.
        return int(end.code or 0)
    except (CommandError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: nothing is left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jpipe",
        description="Draws, compares and checks schedules of pipelines; starts several "
        "processes of a program.",
        epilog="Options of a command: python -m jpipe draw --help",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _schedules.add_draw(commands)
    _schedules.add_compare(commands)
    _schedules.add_check(commands)
    _launch.add_launch(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
