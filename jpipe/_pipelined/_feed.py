"""Mini-batches in several processes: ``None`` for what a process does not read.

The process of the first stage reads the input, that of the last the targets. The others
need shapes and dtypes all the same, since all write the same list of instructions: the
reader sends them, in each call.

    process 0 (stage 0)    x          targets=None   <- specs of targets
    process 1              x=None     targets=None   <- specs of x and targets
    process 2 (stage 2)    x=None     targets        <- specs of x
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._layers._text import shape_text
from .._partition._stage_placement import StagePlacement
from .._processes._arrays import is_non_addressable
from .._processes._digest import array_digest, digest, specs_from_text, specs_to_text
from .._processes._group import RUNS, find_differences, group, raise_differences

PyTree = Any
# The number of calls that a process may be behind the readers that send it specs: so
# many texts, of a line for each array, are kept for it at most.
_MAX_CALLS_BEHIND = 64
# The number of calls between two reports of how far it is.
_CALLS_PER_REPORT = 16
_OF_VALUES = " of "  # between shapes and a digest
_FUNCTION = "the call"


class Feed:
    """The arguments of a function of mini-batches, in this process and in others.

    Args:
      get_placement: returns the stages and their devices; ``None`` before they are
        decided.
      function: the function as users call it, such as ``pipe.apply``.
      is_local: True if the first stage alone reads the input and the last the targets;
        else each process passes all of the batch, which is compared.
    """

    def __init__(
        self,
        get_placement: Callable[[], StagePlacement | None],
        function: str,
        *,
        is_local: bool,
    ) -> None:
        self._get_placement = get_placement
        self._function = function
        self._is_local = is_local
        # name of an argument -> the stage that reads it, and the process of that stage
        self._reader_stages: dict[str, int] = {}
        self._readers: dict[str, int] = {}
        # name of an argument -> the processes that lack it; set in the first call
        self._lacking: dict[str, list[int]] | None = None
        self._key = ""
        self._calls = itertools.count()

    def __call__(
        self, x: PyTree, targets: PyTree = (), rngs: PyTree = ()
    ) -> tuple[PyTree, PyTree]:
        """The input and the targets, with specs for ``None``.

        Args:
          x: the input, if this process reads it.
          targets: the targets, likewise.
          rngs: keys, equal in all processes.

        Raises:
          ValueError: if a process lacks what it reads.
          TimeoutError: if a process does not come.
        """
        placement = self._get_placement()
        if placement is None or placement.is_one_process:
            return x, targets
        if self._is_local:
            args = {"x": x, "targets": targets}
            stages = {"x": 0, "targets": len(placement.stages) - 1}
        else:
            # One argument, which is compared as a whole and is x in errors.
            args = {"x": (x, targets)}
            stages = {"x": 0}
        if self._lacking is None:
            self._reader_stages = stages
            self._readers = {
                name: placement.processes[placement.place_of(stage)]
                for name, stage in stages.items()
            }
            self._lacking = self._compare_first(args, rngs)

        call = next(self._calls)
        # Comparisons cost time, so there are few; but shuffles may differ in a later
        # epoch, so there are some in all of training.
        is_power_of_two = call > 0 and call & (call - 1) == 0
        if is_power_of_two:
            self._compare(args, rngs, call)
        completed = [self._with_specs(name, args[name], call) for name in args]
        return (completed[0], completed[1]) if self._is_local else completed[0]

    def _compare_first(
        self, args: dict[str, PyTree], rngs: PyTree
    ) -> dict[str, list[int]]:
        """Compares the first call; returns the processes that lack each argument."""
        peers = group()
        self._key = f"feed/{peers.next_number()}"
        purpose = "the first call of a step"
        texts = peers.gather({_FUNCTION: self._function, **_texts(args, rngs)}, purpose)
        calls = find_differences([{_FUNCTION: text[_FUNCTION]} for text in texts])
        raise_differences(calls, "the order of calls")

        faults: list[str] = []
        for name, reader in self._readers.items():
            if _OF_VALUES not in texts[reader][name]:
                state = "has no values" if texts[reader][name] else "is None"
                stage = self._reader_stages[name]
                faults.append(
                    f"{name} {state} in process {reader}, which runs stage {stage} "
                    f"and reads it; give it there, and None elsewhere"
                )
        faults += _differences(texts, self._readers)
        raise_differences(faults, purpose)

        lacking: dict[str, list[int]] = {name: [] for name in args}
        for process, text in enumerate(texts):
            for name in args:
                if not text[name]:
                    lacking[name].append(process)
        return lacking

    def _compare(self, args: dict[str, PyTree], rngs: PyTree, call: int) -> None:
        """Posts the arguments of this call, and compares those of call ``call // 2``.

        So nobody waits for a process that is a little behind.
        """
        peers = group()
        compared = call // 2
        peers.post(f"{self._key}/values/{call}", _texts(args, rngs))
        if compared == 0:
            return
        purpose = f"call {compared} of a step"
        texts = peers.collect(f"{self._key}/values/{compared}", purpose)
        consequence = (
            f"what this function has returned since call {compared // 2} is wrong"
        )
        raise_differences(
            _differences(texts, self._readers), purpose, consequence=consequence
        )
        # All have posted call `compared`, so all have read call `compared // 4`; some
        # may still read call `compared // 2`.
        if obsolete := compared // 4:
            peers.remove(f"{self._key}/values/{obsolete}/{peers.process_index}")

    def _with_specs(self, name: str, tree: PyTree, call: int) -> PyTree:
        """An argument of a call, or its specs, which the reader sends, for ``None``."""
        assert self._lacking is not None
        peers = group()
        key = f"{self._key}/{name}"
        lacking = self._lacking[name]
        reader = self._readers[name]
        if reader == peers.process_index:
            _check_values(name, self._reader_stages[name], tree)
            if lacking:
                peers.publish(f"{key}/{call}", specs_to_text(tree, name))
                if call >= _MAX_CALLS_BEHIND:
                    _wait_for_call(key, call - _MAX_CALLS_BEHIND, lacking)
        if peers.process_index in lacking and call % _CALLS_PER_REPORT == 0:
            peers.publish(f"{key}/{call} came to/{peers.process_index}", "yes")
        if tree is not None:
            return tree

        if peers.process_index not in lacking:
            raise ValueError(
                f"{name}=None, which was given in the first call; give it, or its "
                f"jax.ShapeDtypeStruct leaves"
            )
        purpose = f"call {call}, of which it has {name}"
        (message,) = peers.receive({reader: f"{key}/{call}"}, purpose)
        return specs_from_text(message)


def _wait_for_call(key: str, call: int, processes: Sequence[int]) -> None:
    """Waits until processes have come to a call; removes the specs of earlier calls."""
    if call % _CALLS_PER_REPORT != 0:
        return
    reports = {process: f"{key}/{call} came to/{process}" for process in processes}
    group().receive(reports, f"call {call}")
    for report in reports.values():
        group().remove(report)
    for earlier_call in range(max(call - _CALLS_PER_REPORT, 0), call):
        group().remove(f"{key}/{earlier_call}")


def _texts(args: dict[str, PyTree], rngs: PyTree) -> dict[str, str]:
    """The arguments of a call as texts that processes compare, by name."""
    return {name: _text(tree) for name, tree in [*args.items(), ("rngs", rngs)]}


def _differences(texts: Sequence[dict[str, str]], readers: dict[str, int]) -> list[str]:
    """One sentence for each argument that differs between processes.

    Args:
      texts: the arguments of each process, as `_texts` returns them.
      readers: name of an argument -> the process that reads it.
    """
    faults = find_differences([{RUNS: text[RUNS]} for text in texts])
    for process, text in enumerate(texts):
        if text["rngs"] != texts[0]["rngs"]:
            faults.append(
                f"rngs are others in process {process} than in process 0; give the "
                f"same keys in all"
            )
    for name, reader in readers.items():
        for process, text in enumerate(texts):
            if _has_other_values(text[name], texts[reader][name]):
                faults.append(
                    f"{name} has other values in process {process} than in process "
                    f"{reader}, which alone reads it. Let all read the same "
                    f"mini-batches, as from one seed, or give {name}=None where it is "
                    f"not read"
                )
    return faults


def _text(tree: PyTree) -> str:
    """The shapes and a digest of the values of an argument; empty for ``None``."""
    if tree is None:
        return ""
    leaves = jax.tree.leaves(tree)
    if any(map(_has_no_values, leaves)):
        return shape_text(tree)
    return f"{shape_text(tree)}{_OF_VALUES}{digest(map(array_digest, leaves))}"


def _has_other_values(text: str, expected: str) -> bool:
    """True if two texts tell of other values of the same shapes.

    Other shapes raise when the program is compared.
    """
    text_shapes, has_values, values = text.partition(_OF_VALUES)
    expected_shapes, _, expected_values = expected.partition(_OF_VALUES)
    if not has_values or text_shapes != expected_shapes:
        return False
    return values != expected_values


def _check_values(name: str, stage: int, tree: PyTree) -> None:
    """Checks that the argument which a stage reads has values."""
    leaves = jax.tree.leaves(tree)
    if tree is None or any(map(_has_no_values, leaves)):
        raise ValueError(
            f"{name} has no values in process {group().process_index}, which runs "
            f"stage {stage} and reads it"
        )


def _has_no_values(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_non_addressable(leaf)
