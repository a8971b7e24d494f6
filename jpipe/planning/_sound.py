"""What of a plan that was read from a file cannot be."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

# Fields of a stage that are a whole number, or nobody knows it.
_COUNTS = ("num_params", "param_bytes", "held_bytes", "num_trained", "again")
_SHARES = ("seconds", "bound", "bubble")


def faults(plan: Any) -> Iterator[str]:
    """What is wrong with the fields of a `Plan`, a line for each."""
    for i, stage in enumerate(plan.stages):
        where = f"stages[{i}]"
        if stage.index != i:
            yield f"{where}: index={stage.index!r}; needs {i}"
        rank = plan.schedule.placement[i]
        if stage.rank != rank:
            yield f"{where}: rank={stage.rank!r}; its schedule has it on {rank}"
        texts = (stage.device, stage.remat, *stage.layers)
        if not stage.layers or not all(isinstance(text, str) for text in texts):
            yield f"{where}: needs texts for device and remat, and a list of layers"
        for name in _COUNTS:
            if (value := getattr(stage, name)) is not None:
                yield from _no_count(f"{where}: {name}", value)
        for name in ("kept", "cut"):
            if not isinstance(numbers := getattr(stage, name), dict):
                yield f"{where}: {name}={numbers!r}; needs an object of numbers"
            else:
                for key, value in numbers.items():
                    yield from _no_count(f"{where}: {name}[{key!r}]", value)
    if plan.forecast:
        yield from _of_forecast(plan.forecast, plan.schedule.num_ranks)


def _of_forecast(forecast: Any, num_ranks: int) -> Iterator[str]:
    for name in _SHARES:
        yield from _no_number(f"forecast: {name}", getattr(forecast, name))
    for name in ("busy", "memory"):
        if (count := len(getattr(forecast, name))) != num_ranks:
            yield f"forecast: {name} is of {count} ranks, there are {num_ranks}"
    for rank, seconds in enumerate(forecast.busy):
        yield from _no_number(f"forecast: busy[{rank}]", seconds)
    for rank, memory in enumerate(forecast.memory):
        for name, value in dataclasses.asdict(memory).items():
            yield from _no_count(f"forecast: memory[{rank}]: {name}", value)
    if forecast.memory_limit is not None:
        yield from _no_count("forecast: memory_limit", forecast.memory_limit)
    yield from _no_count("forecast: sent_bytes", forecast.sent_bytes)
    if not all(isinstance(line, str) for line in forecast.reasons):
        yield "forecast: reasons: needs a list of texts"


def _no_count(what: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        yield f"{what}={value!r}; needs an int, not negative"


def _no_number(what: str, value: Any) -> Iterator[str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        yield f"{what}={value!r}; needs a number, finite and not negative"
