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
from ._digest import array_digest
from ._environment import TIMEOUT, TRANSPORT, check_transport, parse_seconds

_DEFAULT_TIMEOUT = 600.0
RUNS = "calls of the pipelines so far"
_LONGEST_WAIT = 1.0  # Ctrl-C does not end a longer one


@dataclass
class Group:
    """The processes of a job.

    Attributes:
      timeout: the seconds for which one process waits for another.
      transport: the name of what moves arrays between them: see `_transport`.
      runs: the number of shared programs that this process has run, as the others have.
    """

    timeout: float
    transport: str
    runs: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return _compat.process_index_and_count()[0]

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return _compat.process_index_and_count()[1]

    def next_number(self) -> int:
        """A number for what all processes do next: the same in each of them."""
        return next(self._numbers)

    def publish(self, key: str, message: str) -> None:
        """Stores a message, once for each key."""
        _compat.coordination_client().key_value_set(f"jpipe/{key}", message)

    def remove(self, key: str) -> None:
        """Removes a message."""
        _compat.coordination_client().key_value_delete(f"jpipe/{key}")

    def receive(
        self, keys: Mapping[int, str], purpose: str, limit: float = 0.0
    ) -> list[str]:
        """Waits for a message of each of some processes.

        Args:
          keys: process -> key of its message.
          purpose: the name of what they are for, in the error.
          limit: the seconds that they may take; 0: the timeout.

        Returns:
          The messages, in the order of the keys.

        Raises:
          TimeoutError: with the processes that are late.
        """
        if limit == 0.0:
            limit = self.timeout
        until = time.monotonic() + limit
        messages: list[str] = []
        late: list[int] = []
        for process, key in keys.items():
            message = self._wait(key, until)
            if message is None:
                late.append(process)
            else:
                messages.append(message)
        if late:
            raise TimeoutError(
                f"{_listed(late)} of {self.num_processes} did not come to {purpose} "
                f"within {limit:g} s; process {self.process_index} waited. All run the "
                f"same calls of the pipeline in the same order, or one has failed"
            )
        return messages

    def _wait(self, key: str, until: float) -> str | None:
        """Waits for a message until a time; returns ``None`` if it does not come."""
        while True:
            left = min(max(until - time.monotonic(), 0.001), _LONGEST_WAIT)
            try:
                return _compat.coordination_client().blocking_key_value_get(
                    f"jpipe/{key}", int(1000 * left) + 1
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() >= until:
                return None

    def post(self, key: str, facts: Mapping[str, Any]) -> None:
        """Publishes facts of this process, and the number of programs it has run."""
        message = json.dumps({RUNS: str(self.runs), **facts})
        self.publish(f"{key}/{self.process_index}", message)

    def collect(self, key: str, purpose: str, limit: float = 0.0) -> list[Any]:
        """Waits for the facts that each process posts: see `receive`."""
        keys = {process: f"{key}/{process}" for process in range(self.num_processes)}
        return [*map(json.loads, self.receive(keys, purpose, limit))]

    def gather(
        self, facts: Mapping[str, Any], purpose: str, limit: float = 0.0
    ) -> list[Any]:
        """Exchanges facts; all processes call this: see `receive`."""
        key = f"{purpose}/{self.next_number()}"
        self.post(key, facts)
        return self.collect(key, purpose, limit)

    def agree(self, facts: Mapping[str, str], purpose: str) -> None:
        """Checks that all processes have the same facts.

        Args:
          facts: name -> text that must be the same in all.
          purpose: the name of what they are about to do.

        Raises:
          ValueError: with each fact that differs, and between whom.
          TimeoutError: with the processes that are late.
        """
        raise_differences(find_differences(self.gather(facts, purpose)), purpose)

    def leave(self, why: str) -> None:
        """Posts that this process runs nothing more, and the error that ended it."""
        self.post("left", {"why": why})

    def departure(self, process: int) -> dict[str, str] | None:
        """The facts that a process has posted when it left; ``None`` if it has not."""
        try:
            message = _compat.coordination_client().key_value_try_get(
                f"jpipe/left/{process}"
            )
        except jax.errors.JaxRuntimeError:
            return None
        return json.loads(message)

    def check_runs(self) -> None:
        """Waits until all have left, and checks that they ran as many programs.

        Raises:
          ValueError: with how many each ran, if that differs.
          TimeoutError: with the processes that are late.
        """
        facts_by_process = self.collect("left", "the end of the program")
        runs = [{RUNS: facts[RUNS]} for facts in facts_by_process]
        if differences := find_differences(runs):
            raise ValueError(
                f"what came after the first of these calls was wrong: {differences[0]}"
            )


def raise_differences(
    differences: Sequence[str], purpose: str, *, consequence: str = "nothing was sent"
) -> None:
    """Raises if there are differences, in all processes, which know the same ones.

    Args:
      differences: a sentence for each.
      purpose: the name of what differs.
      consequence: the end of the sentence that begins with the purpose.

    Raises:
      ValueError: with all of them.
    """
    raise_all(
        f"the processes do not run the same program: {purpose} differs, and "
        f"{consequence}",
        differences,
    )


def find_differences(facts_by_process: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each fact that is not the same in all processes."""
    differences = []
    for name in dict.fromkeys(name for facts in facts_by_process for name in facts):
        processes: dict[str, list[int]] = {}  # value -> the processes that have it
        for process, facts in enumerate(facts_by_process):
            processes.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(processes) > 1:
            values = (f"{_listed(who)}: {value}" for value, who in processes.items())
            differences.append(f"{name}: {'; '.join(values)}")
    return differences


def _listed(processes: Sequence[int]) -> str:
    numbers = ", ".join(map(str, processes))
    return f"processes {numbers}" if len(processes) > 1 else f"process {numbers}"


@functools.cache
def group() -> Group:
    """The processes of this job."""
    return Group(
        parse_seconds(TIMEOUT, os.environ.get(TIMEOUT, _DEFAULT_TIMEOUT)),
        check_transport(TRANSPORT, os.environ.get(TRANSPORT, "")),
    )


def agree_on_keys(keys: Any) -> None:
    """Checks that all processes have the same keys: each makes its own layers.

    Args:
      keys: a pytree of keys.
    """
    digests = map(array_digest, jax.tree.leaves(keys))
    group().agree({"key": " ".join(digests)}, "init")
