"""`torch.distributed.pipelining`: one process of two, each with one stage on one core.

The processes meet at a file and talk by gloo.
"""

# pyright: reportMissingImports=false

import datetime
from typing import Any

import torch
import torch.distributed
from torch.distributed import pipelining

from . import torch_model
from .measure import Training
from .torch_model import (
    Recomputed,
    count,
    cross_entropy,
    data,
    half,
    optimizer,
)
from .workload import Case

RANKS = 2
# Longer than any step, shorter than the patience of whoever waits for an error.
TIMEOUT = datetime.timedelta(minutes=2)
SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def warm_up(case: Case, number: str, meeting_place: str) -> None:
    """Starts PyTorch, and waits for the other process.

    Args:
      case: the run.
      number: of this process.
      meeting_place: a file.
    """
    torch_model.warm_up(case)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_place}",
        rank=int(number),
        world_size=RANKS,
        timeout=TIMEOUT,
    )


def pipeline(case: Case, number: str, _: str) -> Training:
    """The stage of this process.

    A step ends when both processes have ended it. The last one knows the loss.
    """
    rank = int(number)
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

    def finish() -> dict[str, Any]:
        torch.distributed.destroy_process_group()
        return {}

    return Training(count(own), step, finish)
