"""Mini-batches of which each process has what it needs: ``None`` elsewhere.

The processes of the first stage read the input, those of the last the targets. Who has
neither has to know shapes and dtypes all the same, since all write the same list of
instructions: it is told them, in each call, by who reads them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from .._layers._stage import shapes
from .._processes._digest import digest, fingerprint
from .._processes._elsewhere import is_elsewhere
from .._processes._group import RUNS, differing, group, refuse_differences
from .._processes._specs import from_text, to_text
from ._pipe import Pipe

PyTree = Any
# So many calls a process may be behind those that tell it what they were given, and
# how often it says how far it is.
_BEHIND, _SAYS = 64, 16
_OF_VALUES = " of "  # between shapes and a digest


class Feed:
    """What a function of mini-batches is given, in this process and in others.

    Args:
      pipe: the stages, and where they run.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        # The stage that reads each.
        self._at = {"x": 0, "targets": len(pipe.stages) - 1}
        # Of each name the processes that are not given it; known after the first call.
        self._lacking: dict[str, list[int]] | None = None
        self._name = ""
        self._calls = itertools.count()

    def __call__(
        self, x: PyTree, targets: PyTree = (), rngs: PyTree = ()
    ) -> tuple[PyTree, PyTree]:
        """The input and the targets; of what is given elsewhere, specs.

        Args:
          x: the input, where this process reads it.
          targets: the targets, likewise.
          rngs: keys, which all have.

        Raises:
          ValueError: if a process lacks what it reads.
          TimeoutError: if a process does not come.
        """
        if self._pipe.copies is None:
            return x, targets
        given = {"x": x, "targets": targets}
        if self._lacking is None:
            self._lacking = self._first(given, rngs)
        call = next(self._calls)
        # Now and then, for what it costs: a shuffle may part ways in a later epoch.
        if call and call & (call - 1) == 0:
            self._compare(given, rngs, call)
        found = [self._known(name, given[name], call) for name in given]
        return found[0], found[1]

    @functools.cached_property
    def _readers(self) -> dict[str, int]:
        """The process that reads each."""
        pipe = self._pipe
        return {name: pipe.processes[pipe.place(at)] for name, at in self._at.items()}

    def _first(self, given: dict[str, PyTree], rngs: PyTree) -> dict[str, list[int]]:
        """Who is not given what; each says so in its first call."""
        own = group()
        self._name, why = f"feed/{own.next_number()}", "the first call of a step"
        said = own.gather(_words(given, rngs), why)
        faults = []
        for name, reader in self._readers.items():
            if _OF_VALUES not in said[reader][name]:
                is_none = "has no values" if said[reader][name] else "is None"
                faults.append(
                    f"{name} {is_none} in process {reader}, which runs stage "
                    f"{self._at[name]} and reads it; give it there, and None elsewhere"
                )
        refuse_differences([*faults, *_others(said, self._readers)], why)
        return {
            name: [process for process, own in enumerate(said) if not own[name]]
            for name in given
        }

    def _compare(self, given: dict[str, PyTree], rngs: PyTree, call: int) -> None:
        """Says what this call is given, and compares half as many calls ago.

        So nobody waits for who is a little behind.
        """
        own, last = group(), call // 2
        own.post(f"{self._name}/values/{call}", _words(given, rngs))
        if last == 0:
            return
        why = f"call {last} of a step"
        said = own.collect(f"{self._name}/values/{last}", why)
        so = f"what this function has returned since call {last // 2} is wrong"
        refuse_differences(_others(said, self._readers), why, so)
        # All have come to that call, where some may yet ask for the one half as many
        # calls ago: of the one before it nobody does any more.
        if old := last // 4:
            own.remove(f"{self._name}/values/{old}/{own.me}")

    def _known(self, name: str, tree: PyTree, call: int) -> PyTree:
        reader = self._readers[name]
        is_reader = reader == group().me
        assert self._lacking is not None
        if is_reader:
            _check_values(name, self._at[name], tree)
        key, lacking = f"{self._name}/{name}", self._lacking[name]
        if is_reader and lacking:
            group().publish(f"{key}/{call}", to_text(tree, name))
            if call >= _BEHIND:
                self._let_come(key, call - _BEHIND, lacking)
        if group().me in lacking and call % _SAYS == 0:
            group().publish(f"{key}/{call} came to/{group().me}", "yes")
        if tree is not None:
            return tree
        if group().me not in lacking:
            raise ValueError(
                f"{name}=None, which was given in the first call; give it, or its "
                f"jax.ShapeDtypeStruct leaves"
            )
        why = f"call {call}, of which it has {name}"
        (message,) = group().receive({reader: f"{key}/{call}"}, why)
        return from_text(message)

    def _let_come(self, key: str, call: int, lacking: Sequence[int]) -> None:
        """Waits until all have been told of a call, which is then forgotten."""
        if call % _SAYS == 0:
            came = {process: f"{key}/{call} came to/{process}" for process in lacking}
            group().receive(came, f"call {call}")
            for each in came.values():
                group().remove(each)
            for old in range(max(call - _SAYS, 0), call):
                group().remove(f"{key}/{old}")


def _words(given: dict[str, PyTree], rngs: PyTree) -> dict[str, str]:
    """What a process is given, to be compared."""
    return {name: _in_letters(tree) for name, tree in [*given.items(), ("rngs", rngs)]}


def _others(said: Sequence[dict[str, str]], readers: dict[str, int]) -> list[str]:
    """What some processes are given that is not what others are given."""
    faults = differing([{RUNS: own[RUNS]} for own in said])
    faults += [
        f"rngs are others in process {process} than in process 0; give the same keys "
        f"in all"
        for process, own in enumerate(said)
        if own["rngs"] != said[0]["rngs"]
    ]
    for name, reader in readers.items():
        faults += [
            f"{name} has other values in process {process} than in process {reader}, "
            f"which alone reads it. Let all read the same mini-batches, as from one "
            f"seed, or give {name}=None where it is not read"
            for process in range(len(said))
            if _differ(said, name, reader, process)
        ]
    return faults


def _in_letters(tree: PyTree) -> str:
    """Whether a process is given something, and which values."""
    leaves = jax.tree.leaves(tree)
    if tree is None:
        return ""
    like = shapes(tree)
    if any(map(_has_no_values, leaves)):
        return like
    return f"{like}{_OF_VALUES}{digest(map(fingerprint, leaves))}"


def _differ(
    said: Sequence[dict[str, str]], name: str, reader: int, process: int
) -> bool:
    """Whether two processes were given other values of one shape.

    Other shapes are told when the program is compared.
    """
    like, own, values = said[process][name].partition(_OF_VALUES)
    expected = said[reader][name].partition(_OF_VALUES)
    return bool(own) and like == expected[0] and values != expected[2]


def _check_values(name: str, stage: int, tree: PyTree) -> None:
    """Checks that what is read has values."""
    leaves = jax.tree.leaves(tree)
    if tree is None or any(map(_has_no_values, leaves)):
        raise ValueError(
            f"{name} has no values in process {group().me}, which runs stage {stage} "
            f"and reads it"
        )


def _has_no_values(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_elsewhere(leaf)
