"""The processes of a job, and how they compare what they are about to run.

They exchange messages through the key-value store of `jax.distributed`; what programs
compute passes from process to process by `_transport`. Every wait has an end, and its
error names the processes that are late.
"""

import functools
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from .. import _compat
from .._messages import raise_all
from ._digest import fingerprint
from ._environment import TIMEOUT, TRANSPORT, known_transport, seconds

_SECONDS = 600.0  # the default timeout
RUNS = "calls of the pipelines so far"
_SLICE = 1.0  # Ctrl-C does not end a longer wait


@dataclass
class Group:
    """The processes of a job.

    Attributes:
      timeout: for how many seconds one process waits for another.
      transport: how arrays pass between them: see `_transport`.
      runs: how many shared programs this process has run: as many as the others.
    """

    timeout: float
    transport: str
    runs: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def me(self) -> int:
        """The number of this process."""
        return _compat.own_process()[0]

    @property
    def size(self) -> int:
        """How many there are."""
        return _compat.own_process()[1]

    def next_number(self) -> int:
        """A number for what all processes do next: the same in each of them."""
        return next(self._numbers)

    def publish(self, key: str, message: str) -> None:
        """Stores a message, once for each key."""
        _compat.coordination().key_value_set(f"jpipe/{key}", message)

    def remove(self, key: str) -> None:
        """Removes a message."""
        _compat.coordination().key_value_delete(f"jpipe/{key}")

    def receive(
        self, keys: Mapping[int, str], purpose: str, limit: float = 0.0
    ) -> list[str]:
        """The messages of some processes, once all are there.

        Args:
          keys: the key of each, by its process.
          purpose: what they are for, which the error names.
          limit: how many seconds they may take; default: the timeout.

        Raises:
          TimeoutError: with the processes that are late.
        """
        limit = limit or self.timeout
        until = time.monotonic() + limit
        found = {process: self._wait(key, until) for process, key in keys.items()}
        late = [process for process, message in found.items() if message is None]
        if late:
            raise TimeoutError(
                f"{_listed(late)} of {self.size} did not come to {purpose} within "
                f"{limit:g} s; process {self.me} waited. All run the same calls of the "
                f"pipeline in the same order, or one has failed"
            )
        return [message for message in found.values() if message is not None]

    def _wait(self, key: str, until: float) -> str | None:
        while True:
            left = min(max(until - time.monotonic(), 0.001), _SLICE)
            try:
                return _compat.coordination().blocking_key_value_get(
                    f"jpipe/{key}", int(1000 * left) + 1
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() >= until:
                return None

    def post(self, key: str, facts: Mapping[str, Any]) -> None:
        """Publishes facts of this process, and how many programs it has run."""
        self.publish(f"{key}/{self.me}", json.dumps({RUNS: str(self.runs), **facts}))

    def collect(self, key: str, purpose: str, limit: float = 0.0) -> list[Any]:
        """The facts that each process has posted: see `receive`."""
        keys = {process: f"{key}/{process}" for process in range(self.size)}
        return [*map(json.loads, self.receive(keys, purpose, limit))]

    def gather(
        self, facts: Mapping[str, Any], purpose: str, limit: float = 0.0
    ) -> list[Any]:
        """The facts of all processes, each of which calls this: see `receive`."""
        key = f"{purpose}/{self.next_number()}"
        self.post(key, facts)
        return self.collect(key, purpose, limit)

    def agree(self, facts: Mapping[str, str], purpose: str) -> None:
        """Checks that all processes have the same facts.

        Args:
          facts: what must be the same, by name.
          purpose: what they are about to do.

        Raises:
          ValueError: with each fact that differs, and between whom.
          TimeoutError: with the processes that are late.
        """
        refuse_differences(differing(self.gather(facts, purpose)), purpose)

    def leave(self, why: str) -> None:
        """Posts that this process runs nothing more, and the error that ended it."""
        self.post("left", {"why": why})

    def departure(self, process: int) -> dict[str, str] | None:
        """What a process has posted when it left; ``None`` if it has not."""
        try:
            found = _compat.coordination().key_value_try_get(f"jpipe/left/{process}")
        except jax.errors.JaxRuntimeError:
            return None
        return json.loads(found)

    def check_runs(self) -> None:
        """Waits until all have left, and checks that they ran as many programs.

        Raises:
          ValueError: with how many each ran, if that differs.
          TimeoutError: with the processes that are late.
        """
        every = self.collect("left", "the end of the program")
        if faults := differing([{RUNS: facts[RUNS]} for facts in every]):
            raise ValueError(
                f"what came after the first of these calls was wrong: {faults[0]}"
            )


def refuse_differences(
    faults: Sequence[str], purpose: str, so: str = "nothing was sent"
) -> None:
    """Raises in all processes alike, if there are faults that all have found.

    Args:
      faults: what differs.
      purpose: what it is about.
      so: what follows from it.

    Raises:
      ValueError: with all of them.
    """
    raise_all(
        f"the processes do not run the same program: {purpose} differs, and {so}",
        faults,
    )


def differing(every: Sequence[Mapping[str, str]]) -> list[str]:
    """The facts of all processes that are not the same in each."""
    faults = []
    for name in dict.fromkeys(name for facts in every for name in facts):
        found: dict[str, list[int]] = {}
        for process, facts in enumerate(every):
            found.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(found) > 1:
            values = (f"{_listed(who)}: {value}" for value, who in found.items())
            faults.append(f"{name}: {'; '.join(values)}")
    return faults


def _listed(processes: Sequence[int]) -> str:
    listed = ", ".join(map(str, processes))
    return f"process{'es' * (len(processes) > 1)} {listed}"


@functools.cache
def group() -> Group:
    """The processes of this job."""
    return Group(
        seconds(TIMEOUT, os.environ.get(TIMEOUT, _SECONDS)),
        known_transport(TRANSPORT, os.environ.get(TRANSPORT, "")),
    )


def agree_on_key(key: jax.Array) -> None:
    """Checks that all processes have the same key: each makes its own layers."""
    group().agree({"key": fingerprint(key)}, "init")
