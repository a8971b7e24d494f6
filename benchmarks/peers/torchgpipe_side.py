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

from .measure import measured, report, resident
from .torch_model import count, cross_entropy, data, half, optimizer, prepare
from .workload import Case

CHECKPOINT = {"none": "never", "full": "always", "default": "except_last"}


def pipeline(case: Case) -> tuple[Any, Callable[[], float]]:
    """The model in two stages, and what takes a step and returns its loss."""
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

    return model, step


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


def main() -> None:
    """Runs one case in this process."""
    case, _ = prepare()
    start = resident("VmRSS")
    model, step = pipeline(case)
    result = measured(case, step, count(model))
    threads = threads_at_work(model, step)
    report(result, start_bytes=start, **threads)


if __name__ == "__main__":
    main()
