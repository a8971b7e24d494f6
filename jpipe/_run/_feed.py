"""Mini-batches of which each process has what it needs: ``None`` elsewhere.

The processes of the first stage read the input, those of the last the targets. Who has
neither has to know shapes and dtypes all the same, since all write the same list of
instructions: it is told them, in each call, by who reads them.
"""

import base64
import itertools
import pickle
from typing import Any, NamedTuple

import jax

from .._jaxprs import _jaxpr
from .._processes._group import group
from ._pipe import Pipe

PyTree = Any
# So many calls a process may be behind those that tell it what they were given.
_BEHIND = 64


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
        self._lacking: frozenset[str] | None = None
        self._name = ""
        self._calls = itertools.count()

    def __call__(self, x: PyTree, targets: PyTree = ()) -> tuple[PyTree, PyTree]:
        """The input and the targets; of what is given elsewhere, specs.

        Raises:
          ValueError: if a process lacks what it reads.
          TimeoutError: if a process does not come.
        """
        if self._pipe.copies is None:
            return x, targets
        stages = {"x": 0, "targets": len(self._pipe.stages) - 1}
        given = {"x": x, "targets": targets}
        if self._lacking is None:
            self._lacking = self._first(given, stages)
        call = next(self._calls)
        found = [self._known(name, stages[name], given[name], call) for name in given]
        return found[0], found[1]

    def _reader(self, stage: int) -> int:
        return self._pipe.processes[self._pipe.place(stage)]

    def _first(
        self, given: dict[str, PyTree], stages: dict[str, int]
    ) -> frozenset[str]:
        """What some process is not given; each says so in its first call."""
        own = group()
        self._name = f"feed/{own.next_number()}"
        said = own.meet(
            self._name,
            {name: "" if tree is None else "given" for name, tree in given.items()},
            "the first call of a step",
        )
        for name, stage in stages.items():
            if not said[self._reader(stage)][name]:
                raise ValueError(
                    f"{name}=None in process {self._reader(stage)}, which runs stage "
                    f"{stage} and reads it; give it there, and None elsewhere"
                )
        return frozenset(name for name in given if not all(s[name] for s in said))

    def _known(self, name: str, stage: int, tree: PyTree, call: int) -> PyTree:
        reader = self._reader(stage)
        is_reader = reader == group().me
        assert self._lacking is not None
        if is_reader:
            _check_values(name, stage, tree)
        if name in self._lacking and is_reader:
            group().tell(f"{self._name}/{name}/{call}", _told(tree))
            if call >= _BEHIND:
                group().forget(f"{self._name}/{name}/{call - _BEHIND}")
        if tree is not None:
            return tree
        if name not in self._lacking:
            raise ValueError(
                f"{name}=None, which was given in the first call; give it, or its "
                f"jax.ShapeDtypeStruct leaves"
            )
        words = group().ask(
            f"{self._name}/{name}/{call}",
            reader,
            f"call {call}, of which it has {name}",
        )
        kinds = pickle.loads(base64.b64decode(words))
        return jax.tree.map(_spec, kinds, is_leaf=lambda node: isinstance(node, _Kind))


def _check_values(name: str, stage: int, tree: PyTree) -> None:
    """Checks that what is read has values."""
    leaves = jax.tree.leaves(tree)
    if tree is None or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(
            f"{name} has no values in process {group().me}, which runs stage {stage} "
            f"and reads it"
        )


def _told(tree: PyTree) -> str:
    """Shapes and dtypes in words."""

    def kind(leaf: Any) -> _Kind:
        spec = _jaxpr.spec(jax.typeof(leaf))
        return _Kind(spec.shape, str(spec.dtype), bool(spec.weak_type))

    return base64.b64encode(pickle.dumps(jax.tree.map(kind, tree))).decode()


def _spec(kind: _Kind) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
