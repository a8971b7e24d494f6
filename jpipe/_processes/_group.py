"""The processes of a job, and how they agree on what they are about to run.

They talk through the key-value store of `jax.distributed`, which is for words: what
programs compute passes from process to process by `_transport`. Every wait has an end,
and says who is late.
"""

import functools
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from .. import _compat
from .._faults import refuse
from ._elsewhere import own_copy
from ._environment import TRANSPORT, seconds
from ._keys import as_numbers

_SECONDS = 600.0  # how long one process waits for another, unless told
RUNS = "calls of the pipelines so far"
_SLICE = 1.0  # what waits longer could not be interrupted


@dataclass
class Group:
    """The processes of a job.

    Attributes:
      timeout: for how many seconds one process waits for another.
      transport: how arrays pass between them: see `_transport`.
      hard_exit: whether one ends at once when it has failed: see `distributed`.
      runs: how often this process has run what several share: as often as the others.
    """

    timeout: float = field(default_factory=lambda: seconds(_SECONDS))
    transport: str = field(default_factory=lambda: os.environ.get(TRANSPORT, ""))
    hard_exit: bool = True
    runs: int = 0
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def me(self) -> int:
        """The number of this process."""
        return _compat.own_process()[0]

    @property
    def size(self) -> int:
        """How many there are."""
        return _compat.own_process()[1]

    @functools.cached_property
    def _store(self) -> Any:
        return _compat.coordination()

    def next_number(self) -> int:
        """Of what they run, one after the other: the same in each of them."""
        return next(self._numbers)

    def tell(self, name: str, words: str) -> None:
        """Says something once to whoever asks for it."""
        self._store.key_value_set(f"jpipe/{name}", words)

    def forget(self, name: str) -> None:
        """Unsays it."""
        self._store.key_value_delete(f"jpipe/{name}")

    def ask(self, name: str, process: int, why: str) -> str:
        """What a process says, which is waited for.

        Raises:
          TimeoutError: if it does not say it.
        """
        found = self._get(name, time.monotonic() + self.timeout)
        if found is None:
            raise TimeoutError(
                f"process {process} has not come to {why} within {self.timeout:g} s"
            )
        return found

    def _get(self, name: str, until: float) -> str | None:
        while True:
            left = min(max(until - time.monotonic(), 0.001), _SLICE)
            try:
                return self._store.blocking_key_value_get(
                    f"jpipe/{name}", int(1000 * left) + 1
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() >= until:
                return None

    def leave(self, why: str) -> None:
        """Says that this process runs nothing more.

        Args:
          why: what ended it; nothing if it came to its end.
        """
        self.tell(f"left/{self.me}", json.dumps({"runs": self.runs, "why": why}))

    def left(self, process: int) -> dict[str, Any] | None:
        """What a process said when it left; ``None`` if it has not."""
        try:
            found = self._store.key_value_try_get(f"jpipe/left/{process}")
        except (AttributeError, jax.errors.JaxRuntimeError):
            return None
        return json.loads(found)

    def check_runs(self) -> None:
        """Waits until all have come to their end, and checks that they ran as much.

        Raises:
          ValueError: with how often each ran something, if that differs.
          TimeoutError: with the processes that have not come.
        """
        until = time.monotonic() + self.timeout
        found = [self._get(f"left/{p}", until) for p in range(self.size)]
        self._check_late(found, "the end of the program", self.timeout)
        runs = [{RUNS: str(json.loads(said or "{}").get("runs"))} for said in found]
        if faults := differing(runs):
            raise ValueError(
                f"what came after the first of these calls was wrong: {faults[0]}"
            )

    def meet(
        self, name: str, words: Mapping[str, str], why: str, seconds: float = 0.0
    ) -> list[Any]:
        """What all of them say, once all have come.

        Args:
          name: of the meeting, the same in all.
          words: what this one says.
          why: what it is about, for who is late.
          seconds: how long they may take; default: the timeout.

        Raises:
          TimeoutError: with the processes that have not come.
        """
        self.say(name, words)
        return self.hear(name, why, seconds)

    def say(self, name: str, words: Mapping[str, str]) -> None:
        """Comes to a meeting, and says how much this process has run."""
        words = {RUNS: str(self.runs), **words}
        self.tell(f"{name}/{self.me}", json.dumps(words))

    def hear(self, name: str, why: str, seconds: float = 0.0) -> list[Any]:
        """What all say at a meeting: see `meet`."""
        seconds = seconds or self.timeout
        until = time.monotonic() + seconds
        found = [self._get(f"{name}/{p}", until) for p in range(self.size)]
        self._check_late(found, why, seconds)
        return [json.loads(said) for said in found if said is not None]

    def _check_late(self, found: Sequence[str | None], why: str, limit: float) -> None:
        late = [str(p) for p, said in enumerate(found) if said is None]
        if late:
            several = "es" * (len(late) > 1)
            raise TimeoutError(
                f"process{several} {', '.join(late)} of {self.size} did not come to "
                f"{why} within {limit:g} s; process {self.me} waited. All run "
                f"the same calls of the pipeline in the same order, or one has failed"
            )

    def agree(self, name: str, facts: Mapping[str, str], why: str) -> None:
        """Checks that all processes are about to do the same.

        Args:
          name: of the meeting, the same in all.
          facts: what must be the same, by what to call it.
          why: what it is about.

        Raises:
          ValueError: with each fact that differs, and between whom.
          TimeoutError: with the processes that have not come.
        """
        self.refuse(differing(self.meet(name, facts, why)), why)

    def refuse(
        self, faults: Sequence[str], why: str, so: str = "nothing was sent"
    ) -> None:
        """Ends in all processes alike, if there is a fault that all have found.

        Args:
          faults: what differs.
          why: what it is about.
          so: what follows from it.

        Raises:
          ValueError: with all of them.
        """
        refuse(
            f"the processes do not run the same program: {why} differs, and {so}",
            faults,
        )


def differing(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Of what all processes say, what is not the same in all."""
    faults = []
    for fact in dict.fromkeys(fact for own in every for fact in own):
        said: dict[str, list[int]] = {}
        for process, own in enumerate(every):
            said.setdefault(own.get(fact, "nothing"), []).append(process)
        if len(said) > 1:
            listed = "; ".join(f"{_who(who)}: {it}" for it, who in said.items())
            faults.append(f"{fact}: {listed}")
    return faults


def _who(processes: list[int]) -> str:
    listed = ", ".join(map(str, processes))
    return f"process{'es' * (len(processes) > 1)} {listed}"


@functools.cache
def group() -> Group:
    """The processes of this job."""
    return Group()


def agree_on_key(key: jax.Array) -> None:
    """Checks that all processes have the same key: each makes layers of its own."""
    words = str(np.asarray(own_copy(as_numbers(key))).tolist())
    group().agree(f"init/{group().next_number()}", {"key": words}, "init")
