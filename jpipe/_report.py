"""What is known of programs once they are compiled."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ._instructions._bytes import peaks
from ._instructions._program import Program
from .schedules._units import columns, size


@dataclass(frozen=True)
class CompiledProgram:
    """One compiled program.

    Attributes:
      name: how profiles call it.
      device: where it runs.
      calls: how often a call of the whole runs it.
      flops: of one of these calls; ``None`` if XLA does not report it.
      workspace_bytes: what it needs while it runs, besides arguments and results;
        ``None`` if XLA does not report it.
      seconds: how long XLA took; zero if it was compiled before.
    """

    name: str
    device: str
    calls: int
    flops: float | None
    workspace_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """What `Pipeline.compile` knows; prints as a table.

    Attributes:
      programs: one entry for each compiled program.
      peak_bytes: the most that each device holds between programs, arguments included.
      seconds: how long it took to trace and to compile all of them, side by side.
    """

    programs: tuple[CompiledProgram, ...]
    peak_bytes: tuple[tuple[str, int], ...]
    seconds: float

    @property
    def flops(self) -> float:
        """Of all calls, as far as XLA reports it."""
        return sum((p.flops or 0.0) * p.calls for p in self.programs)

    def __str__(self) -> str:
        header = ["program", "device", "calls", "flops", "workspace", "compiled in"]
        rows = [header]
        for p in self.programs:
            flops = "" if p.flops is None else f"{p.flops:,.0f}"
            space = "" if p.workspace_bytes is None else size(p.workspace_bytes)
            rows.append(
                [p.name, p.device, str(p.calls), flops, space, f"{p.seconds:.2f} s"]
            )
        peak = ", ".join(f"{name} {size(n)}" for name, n in self.peak_bytes)
        return "\n".join(
            [
                columns(rows, left=range(2)),
                f"peak: {peak}",
                f"{self.flops:,.0f} flops; {len(self.programs)} programs in "
                f"{self.seconds:.1f} s",
            ]
        )


def compiled(lower: Callable[[], Program]) -> Report:
    """What is known of a list of instructions, which is lowered and compiled."""
    begin = time.perf_counter()
    program = lower()
    program.compile()
    calls = Counter(id(each.compiled) for each in program.instructions)
    found = [
        CompiledProgram(
            each.name,
            str(each.device),
            calls[id(each)],
            each.flops,
            each.workspace_bytes,
            each.seconds,
        )
        for each in program.programs
    ]
    peak = zip(map(str, program.devices), peaks(program), strict=True)
    return Report(tuple(found), tuple(peak), time.perf_counter() - begin)
