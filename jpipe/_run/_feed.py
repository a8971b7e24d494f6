"""Mini-batches of which each process has what it needs: ``None`` elsewhere.

The processes of the first stage read the input, those of the last the targets. Who has
neither has to know shapes and dtypes all the same, since all write the same list of
instructions: who reads them sends them, in each call.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._layers._stage import shapes
from .._processes._digest import digest, fingerprint
from .._processes._elsewhere import is_elsewhere
from .._processes._group import RUNS, differing, group, refuse_differences
from .._processes._specs import from_text, to_text
from ._pipe import Pipe

PyTree = Any
# So many calls a process may be behind those that send it what they were given, and
# how often it reports how far it is.
_BEHIND, _REPORTS = 64, 16
_OF_VALUES = " of "  # between shapes and a digest


class Feed:
    """What a function of mini-batches is given, in this process and in others.

    Args:
      pipe: gives the stages, and where they run; ``None`` before that is known.
      is_local: whether the first stage alone reads the input and the last the targets;
        else each process is given all, which is compared.
    """

    def __init__(self, pipe: Callable[[], Pipe | None], is_local: bool) -> None:
        self._pipe, self._is_local = pipe, is_local
        # The stage that reads each, and its process.
        self._at: dict[str, int] = {}
        self._readers: dict[str, int] = {}
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
        pipe = self._pipe()
        if pipe is None or pipe.copies is None:
            return x, targets
        given = {"x": x, "targets": targets} if self._is_local else {"x": (x, targets)}
        if self._lacking is None:
            last = len(pipe.stages) - 1
            self._at = dict(zip(given, (0, last), strict=False))
            self._readers = {
                name: pipe.processes[pipe.place(at)] for name, at in self._at.items()
            }
            self._lacking = self._first(given, rngs)
        call = next(self._calls)
        # Now and then, for what it costs: a shuffle may part ways in a later epoch.
        if call and call & (call - 1) == 0:
            self._compare(given, rngs, call)
        found = [self._known(name, given[name], call) for name in given]
        return (found[0], found[1]) if self._is_local else found[0]

    def _first(self, given: dict[str, PyTree], rngs: PyTree) -> dict[str, list[int]]:
        """Who is not given what; each reports this in its first call."""
        peers = group()
        self._name, why = f"feed/{peers.next_number()}", "the first call of a step"
        texts = peers.gather(_texts(given, rngs), why)
        faults = []
        for name, reader in self._readers.items():
            if _OF_VALUES not in texts[reader][name]:
                is_none = "has no values" if texts[reader][name] else "is None"
                faults.append(
                    f"{name} {is_none} in process {reader}, which runs stage "
                    f"{self._at[name]} and reads it; give it there, and None elsewhere"
                )
        refuse_differences([*faults, *_others(texts, self._readers)], why)
        return {
            name: [process for process, each in enumerate(texts) if not each[name]]
            for name in given
        }

    def _compare(self, given: dict[str, PyTree], rngs: PyTree, call: int) -> None:
        """Posts what this call is given, and compares the call half as many calls ago.

        So nobody waits for who is a little behind.
        """
        peers, last = group(), call // 2
        peers.post(f"{self._name}/values/{call}", _texts(given, rngs))
        if last == 0:
            return
        why = f"call {last} of a step"
        texts = peers.collect(f"{self._name}/values/{last}", why)
        so = f"what this function has returned since call {last // 2} is wrong"
        refuse_differences(_others(texts, self._readers), why, so)
        # All have come to that call, where some may yet read the one half as many
        # calls ago: of the one before it nobody does any more.
        if old := last // 4:
            peers.remove(f"{self._name}/values/{old}/{peers.me}")

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
        if group().me in lacking and call % _REPORTS == 0:
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
        """Waits until all have received a call, which is then forgotten."""
        if call % _REPORTS == 0:
            came = {process: f"{key}/{call} came to/{process}" for process in lacking}
            group().receive(came, f"call {call}")
            for each in came.values():
                group().remove(each)
            for old in range(max(call - _REPORTS, 0), call):
                group().remove(f"{key}/{old}")


def _texts(given: dict[str, PyTree], rngs: PyTree) -> dict[str, str]:
    """What a process is given, as texts to be compared."""
    return {name: _text(tree) for name, tree in [*given.items(), ("rngs", rngs)]}


def _others(texts: Sequence[dict[str, str]], readers: dict[str, int]) -> list[str]:
    """What some processes are given that is not what others are given."""
    faults = differing([{RUNS: each[RUNS]} for each in texts])
    faults += [
        f"rngs are others in process {process} than in process 0; give the same keys "
        f"in all"
        for process, each in enumerate(texts)
        if each["rngs"] != texts[0]["rngs"]
    ]
    for name, reader in readers.items():
        faults += [
            f"{name} has other values in process {process} than in process {reader}, "
            f"which alone reads it. Let all read the same mini-batches, as from one "
            f"seed, or give {name}=None where it is not read"
            for process in range(len(texts))
            if _differ(texts, name, reader, process)
        ]
    return faults


def _text(tree: PyTree) -> str:
    """Whether a process is given something, and which values."""
    leaves = jax.tree.leaves(tree)
    if tree is None:
        return ""
    like = shapes(tree)
    if any(map(_has_no_values, leaves)):
        return like
    return f"{like}{_OF_VALUES}{digest(map(fingerprint, leaves))}"


def _differ(
    texts: Sequence[dict[str, str]], name: str, reader: int, process: int
) -> bool:
    """Whether two processes were given other values of one shape.

    Other shapes raise when the program is compared.
    """
    like, is_given, values = texts[process][name].partition(_OF_VALUES)
    expected = texts[reader][name].partition(_OF_VALUES)
    return bool(is_given) and like == expected[0] and values != expected[2]


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
