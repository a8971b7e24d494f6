"""`torch.distributed.pipelining`: one process of two, each with one stage on one core.

The processes meet at a file and talk by gloo.
"""

# pyright: reportMissingImports=false

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed import pipelining

from .measure import measured, report, resident
from .torch_model import (
    Recomputed,
    count,
    cross_entropy,
    data,
    half,
    optimizer,
    prepare,
)
from .workload import Case

RANKS = 2
# Longer than any step, shorter than the patience of whoever waits for an error.
TIMEOUT = datetime.timedelta(minutes=2)
SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def pipeline(case: Case, rank: int) -> tuple[Any, Callable[[], float | None]]:
    """The stage of this process, and what takes a step of it.

    A step ends when both processes have ended it. The last one knows the loss.
    """
    own = half(case, rank)
    if case.remat == "full":
        own = Recomputed(own)
    stage = pipelining.PipelineStage(own, rank, RANKS, torch.device("cpu"))
    schedule = SCHEDULES[case.schedule](stage, case.microbatches, cross_entropy)
    sgd = optimizer(own)
    x, targets = data(case)

    def step() -> float | None:
        losses: list[Any] = []
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        sgd.step()
        sgd.zero_grad()
        torch.distributed.barrier()
        if rank == 0:
            return None
        return float(torch.stack([loss.detach() for loss in losses]).mean())

    return own, step


def main() -> None:
    """Runs one stage of one case in this process."""
    case, (rank, meeting_place) = prepare()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_place}",
        rank=int(rank),
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    start = resident("VmRSS")
    stage, step = pipeline(case, int(rank))
    report(measured(case, step, count(stage)), start_bytes=start)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
