"""The report of `compile`: bytes, flops and seconds of compiled programs."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .._instructions._memory import peak_bytes
from .._instructions._program import Program
from ..schedules._formats import format_bytes, format_table


@dataclass(frozen=True)
class CompiledExecutable:
    """One compiled program.

    Attributes:
      name: its name in profiles.
      device: the device on which it runs.
      calls: the number of times that a call of the whole runs it.
      flops: the operations of one of these calls; ``None`` if XLA does not report them.
      workspace_bytes: the memory that it needs while it runs, besides arguments and
        results; ``None`` if XLA does not report it.
      seconds: the time that XLA took; zero if it was compiled before.
    """

    name: str
    device: str
    calls: int
    flops: float | None
    workspace_bytes: int | None
    seconds: float

    def row(self) -> list[str]:
        """The cells of its row in the table; empty where XLA reports nothing."""
        flops = ""
        workspace = ""
        if self.flops is not None:
            flops = f"{self.flops:,.0f}"
        if self.workspace_bytes is not None:
            workspace = format_bytes(self.workspace_bytes)
        seconds = f"{self.seconds:.2f} s"
        return [self.name, self.device, str(self.calls), flops, workspace, seconds]


@dataclass(frozen=True)
class Report:
    """The result of ``compile``, such as `TrainStep.compile`; prints as a table.

    Attributes:
      programs: one entry for each compiled program.
      peak_bytes: the name of each device, and the largest number of bytes that it
        holds between programs, arguments included.
      seconds: the time to trace and to compile all of them, side by side.
    """

    programs: tuple[CompiledExecutable, ...]
    peak_bytes: tuple[tuple[str, int], ...]
    seconds: float

    @property
    def flops(self) -> float:
        """The operations of all calls, as far as XLA reports them."""
        return sum((program.flops or 0.0) * program.calls for program in self.programs)

    def __str__(self) -> str:
        rows = [["program", "device", "calls", "flops", "workspace", "compiled in"]]
        rows += [program.row() for program in self.programs]
        peak = ", ".join(
            f"{name} {format_bytes(nbytes)}" for name, nbytes in self.peak_bytes
        )
        lines = [
            format_table(rows, left=range(2)),
            f"peak: {peak}",
            f"{self.flops:,.0f} flops; {len(self.programs)} programs in "
            f"{self.seconds:.1f} s",
        ]
        return "\n".join(lines)


def compile_report(lower: Callable[[], Program]) -> Report:
    """Lowers and compiles a list of instructions, and reports on its programs."""
    begin = time.perf_counter()
    program = lower()
    program.compile()

    calls = Counter(id(instruction.executable) for instruction in program.instructions)
    programs = tuple(
        CompiledExecutable(
            name=executable.name,
            device=str(executable.device),
            calls=calls[id(executable)],
            flops=executable.flops,
            workspace_bytes=executable.workspace_bytes,
            seconds=executable.seconds,
        )
        for executable in program.executables
    )
    device_names = map(str, program.devices)
    return Report(
        programs,
        peak_bytes=tuple(zip(device_names, peak_bytes(program), strict=True)),
        seconds=time.perf_counter() - begin,
    )
