"""torchgpipe, in a process of its own.

It was made for GPUs. On CPU both stages are on the one device that PyTorch has there:
torchgpipe gives equal devices one worker thread, so forwards take turns, and autograd
runs the backward of everything on CPU in the thread that called it. Its stages cannot
overlap; the threads that were seen at work are part of the result.
"""

# pyright: reportMissingImports=false

import threading
from collections.abc import Callable
from typing import Any

import torchgpipe

from .measure import Training
from .torch_model import count, cross_entropy, data, half, optimizer, warm_up
from .workload import Case

__all__ = ["pipeline", "warm_up"]

CHECKPOINT = {"none": "never", "full": "always", "default": "except_last"}


def pipeline(case: Case) -> Training:
    """The model in two stages."""
    import torch

    layers = [layer for stage in range(2) for layer in half(case, stage)]
    model = torchgpipe.GPipe(
        torch.nn.Sequential(*layers),
        case.balance(),
        devices=["cpu", "cpu"],
        chunks=case.microbatches,
        checkpoint=CHECKPOINT[case.remat],
    )
    sgd = optimizer(model)
    x, targets = data(case)

    def step() -> float:
        loss = cross_entropy(model(x), targets)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return float(loss.detach())

    return Training(count(model), step, lambda: threads_at_work(model, step))


def threads_at_work(model: Any, step: Callable[[], float]) -> dict[str, int]:
    """Takes a step; counts the threads that ran forwards, and those of backwards."""
    seen: dict[str, set[int]] = {"forward_threads": set(), "backward_threads": set()}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen[name].add(threading.get_ident())

    handles = []
    for stage in model.partitions:
        handles.append(stage[-1].register_forward_hook(note("forward_threads")))
        for parameter in stage.parameters():
            handles.append(parameter.register_hook(note("backward_threads")))
    step()
    for handle in handles:
        handle.remove()
    return {name: len(threads) for name, threads in seen.items()}
