"""Compares the schedules of the catalogue and draws each of them.

It prints what a step takes on four ranks with eight micro-batches, over a fast link
and over a slow one, and writes a picture of every schedule.

    python examples/schedules.py
    python examples/schedules.py --out docs/gallery
"""

import argparse
from pathlib import Path

from jpipe import draw
from jpipe.schedules import BY_NAME, Costs, Schedule, compare, replicated, zb_v

RANKS, MICROBATCHES = 4, 8
# All the layers of a rank: a forward takes 1, and each half of a backward as long.
FAST = Costs(forward=1, backward=2)
SLOW = Costs(forward=1, backward=2, latency=0.5)
# Ranks take turns at stages, so many as a stage takes longer than the last one.
REPLICAS = 3, 2, 2, 1


def main() -> None:
    """Prints two tables and writes the pictures."""
    parser = argparse.ArgumentParser(description="Compares schedules and draws them.")
    parser.add_argument(
        "--out", type=Path, default="build/gallery", help="the folder for the pictures"
    )
    folder = parser.parse_args().out

    catalogue = {name: build(RANKS, MICROBATCHES) for name, build in BY_NAME.items()}
    trained = [schedule for schedule in catalogue.values() if not schedule.forward_only]
    print(f"{RANKS} ranks, {MICROBATCHES} micro-batches; F = I = W = 1 for a rank\n")
    print(compare(trained, FAST))
    print(f"\nthe same where a transfer takes {SLOW.latency}\n")
    print(compare(trained, SLOW))

    folder.mkdir(parents=True, exist_ok=True)
    pictures = {**catalogue, "zb_v_8x32": zb_v(8, 32)}
    for name, schedule in pictures.items():
        costs = FAST.per_chunk(schedule.num_stages // schedule.num_ranks)
        write(schedule, costs, folder / f"{name}.svg")
    in_turns = Costs(forward=REPLICAS, backward=[2 * many for many in REPLICAS])
    write(replicated(REPLICAS, 12), in_turns, folder / "replicas_3221.svg")
    print(f"\nwrote {len(pictures) + 1} pictures to {folder}")


def write(schedule: Schedule, costs: Costs, path: Path) -> None:
    """Draws what a schedule is predicted to do."""
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches"
    )
    path.write_text(draw.svg(schedule.simulate(costs), titles=[title]), "utf-8")


if __name__ == "__main__":
    main()
