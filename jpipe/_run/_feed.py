"""Mini-batches of which each process has what it needs: ``None`` elsewhere.

The processes of the first stage read the input, those of the last the targets. Who has
neither has to know shapes and dtypes all the same, since all write the same list of
instructions: it is told them, in each call, by who reads them.
"""

import base64
import itertools
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._instructions._agreed import digest, in_letters
from .._jaxprs import _jaxpr
from .._layers._stage import shapes
from .._processes._elsewhere import is_elsewhere
from .._processes._group import group
from ._pipe import Pipe

PyTree = Any
# So many calls a process may be behind those that tell it what they were given, and
# how often it says how far it is.
_BEHIND, _SAYS = 64, 16
_OF_VALUES = " of "  # between shapes and a digest


class _Kind(NamedTuple):
    """What an array is like, in words that pass between processes."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool


class Feed:
    """What a function of mini-batches is given, in this process and in others.

    Args:
      pipe: the stages, and where they run.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
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
        stages = {"x": 0, "targets": len(self._pipe.stages) - 1}
        given = {"x": x, "targets": targets}
        if self._lacking is None:
            self._lacking = self._first(given, stages, rngs)
        call = next(self._calls)
        found = [self._known(name, stages[name], given[name], call) for name in given]
        return found[0], found[1]

    def _reader(self, stage: int) -> int:
        return self._pipe.processes[self._pipe.place(stage)]

    def _first(
        self, given: dict[str, PyTree], stages: dict[str, int], rngs: PyTree
    ) -> dict[str, list[int]]:
        """Who is not given what; each says so in its first call."""
        own = group()
        self._name, why = f"feed/{own.next_number()}", "the first call of a step"
        said = own.meet(
            self._name,
            {n: _in_letters(tree) for n, tree in [*given.items(), ("rngs", rngs)]},
            why,
        )
        faults = [
            f"rngs are others in process {process} than in process 0; give the same "
            f"keys in all"
            for process, own in enumerate(said)
            if own["rngs"] != said[0]["rngs"]
        ]
        for name, stage in stages.items():
            reader = self._reader(stage)
            if _OF_VALUES not in said[reader][name]:
                is_none = "has no values" if said[reader][name] else "is None"
                faults.append(
                    f"{name} {is_none} in process {reader}, which runs stage {stage} "
                    f"and reads it; give it there, and None elsewhere"
                )
                continue
            for process in range(len(said)):
                if _differ(said, name, reader, process):
                    faults.append(
                        f"{name} has other values in process {process} than in "
                        f"process {reader}, which alone reads it. Let all read the "
                        f"same mini-batches, as from one seed, or give {name}=None "
                        f"where it is not read"
                    )
        own.refuse(faults, why)
        return {
            name: [process for process, own in enumerate(said) if not own[name]]
            for name in given
        }

    def _known(self, name: str, stage: int, tree: PyTree, call: int) -> PyTree:
        reader = self._reader(stage)
        is_reader = reader == group().me
        assert self._lacking is not None
        if is_reader:
            _check_values(name, stage, tree)
        key, lacking = f"{self._name}/{name}", self._lacking[name]
        if is_reader and lacking:
            group().tell(f"{key}/{call}", _told(tree))
            if call >= _BEHIND:
                self._let_come(key, call - _BEHIND, lacking)
        if group().me in lacking and call % _SAYS == 0:
            group().tell(f"{key}/{call} came to/{group().me}", "yes")
        if tree is not None:
            return tree
        if group().me not in lacking:
            raise ValueError(
                f"{name}=None, which was given in the first call; give it, or its "
                f"jax.ShapeDtypeStruct leaves"
            )
        words = group().ask(
            f"{key}/{call}", reader, f"call {call}, of which it has {name}"
        )
        kinds = pickle.loads(base64.b64decode(words))
        return jax.tree.map(_spec, kinds, is_leaf=lambda node: isinstance(node, _Kind))

    def _let_come(self, key: str, call: int, lacking: Sequence[int]) -> None:
        """Waits until all have been told of a call, which is then forgotten."""
        if call % _SAYS == 0:
            for process in lacking:
                came = f"{key}/{call} came to/{process}"
                group().ask(came, process, f"call {call}")
                group().forget(came)
            for old in range(max(call - _SAYS, 0), call):
                group().forget(f"{key}/{old}")


def _in_letters(tree: PyTree) -> str:
    """Whether a process is given something, and which values."""
    leaves = jax.tree.leaves(tree)
    if tree is None:
        return ""
    like = shapes(tree)
    if any(map(_has_no_values, leaves)):
        return like
    return f"{like}{_OF_VALUES}{digest(map(in_letters, leaves))}"


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


def _told(tree: PyTree) -> str:
    """Shapes and dtypes in words."""

    def kind(leaf: Any) -> _Kind:
        spec = _jaxpr.spec(jax.typeof(leaf))
        return _Kind(spec.shape, str(spec.dtype), bool(spec.weak_type))

    return base64.b64encode(pickle.dumps(jax.tree.map(kind, tree))).decode()


def _spec(kind: _Kind) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
