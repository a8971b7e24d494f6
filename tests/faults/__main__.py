"""Runs all faults of several processes; kills some at random, and compares the results.

python -m tests.faults                  # all, a quarter of an hour on two cores
python -m tests.faults --only 1:step    # those with this text
python -m tests.faults --kills 20       # only so many kills, of runs that restart
"""

import argparse
import sys
import time

from . import kills, table


def main() -> int:
    """Prints a line for each fault; returns 1 if one was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="rows whose failure has this text")
    parser.add_argument("--kills", type=int, help="only so many random kills")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    options = parser.parse_args()
    num_failures = 0

    def report(name: str, breaches: list[str], begin: float) -> None:
        result = "\n    ".join(["failed", *breaches]) if breaches else "held"
        print(f"{name:28} {time.monotonic() - begin:5.0f} s  {result}", flush=True)

    if options.kills is None:
        for row in table.ROWS:
            if options.only and options.only not in row.failure:
                continue
            begin = time.monotonic()
            breaches = table.find_breaches(row)
            num_failures += bool(breaches)
            report(f"{row.num_processes} processes, {row.failure}", breaches, begin)
    if not options.only:
        begin = time.monotonic()
        num_kills = 20 if options.kills is None else options.kills
        breaches = kills.find_breaches(num_kills, options.seed)
        num_failures += bool(breaches)
        report(f"{num_kills} random kills", breaches, begin)
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
