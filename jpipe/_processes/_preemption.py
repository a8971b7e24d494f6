"""The question of a training loop whether it shall save and end."""

import functools
import signal
from typing import Any

from ._group import group
from ._start import check_joined


def preempted() -> bool:
    """True if this program was told to end, by SIGTERM or SIGHUP.

    Clusters send SIGTERM before they end a job or take its machines, and so does
    ``python -m jpipe launch``; a terminal that is closed sends SIGHUP. A loop that asks
    this after each step may save then. The first call catches the signals: a program
    that never asks is ended by them. A second signal ends a program at once.

    In several processes a signal to any of them ends all, after the same step: all call
    this after each step. While there was no signal, nothing is sent and nobody waits.

    Returns:
      True from the first call on that comes after the signal in all processes.

    Raises:
      RuntimeError: if another process has failed.
      TimeoutError: if another process does not answer.
      ValueError: if the first call is not in the main thread.

    Example:
      >>> import jpipe
      >>> if jpipe.preempted():  # doctest: +SKIP
      ...     jpipe.checkpoint.save(folder, state, step=number + 1)
      ...     sys.exit(75)
    """
    check_joined()
    _catch_signals()
    lines = group().lines
    if not lines.last_call.count():
        return False
    group().wait_until(
        lambda: [*lines.peers - lines.last_call.counts.keys() - lines.gone],
        "the number of its last step",
    )
    return lines.last_call.is_reached


@functools.cache
def _catch_signals() -> None:
    """Catches SIGTERM and SIGHUP; SIGHUP stays ignored where it is, as by ``nohup``."""

    def note(number: int, _frame: Any) -> None:
        group().lines.last_call.is_told = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)
