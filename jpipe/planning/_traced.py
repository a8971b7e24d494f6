"""Layers, or pieces of a model, on abstract values: what each computes and reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from .._arguments import _variables
from .._arguments._batch import Batch
from .._pipelined._specialization import Specialization
from .._stage._stage import Stage
from .._stage._stages import Stages

PyTree = Any


@dataclass(frozen=True)
class TracedLayer:
    """Layers, or pieces of a model, each a stage; nothing is compiled.

    Attributes:
      names: what they are called.
      divided: what each computes.
      specs_of_variables: the variables, as specs.
      skips: by what a layer makes for a later one than the next, what that is called.
    """

    names: tuple[str, ...]
    divided: Specialization
    specs_of_variables: PyTree
    skips: Mapping[Any, str]

    @property
    def stages(self) -> Stages:
        """What each computes."""
        return self.divided.stages

    @property
    def batch(self) -> Batch:
        """The mini-batch, all that is given of it as one tree."""
        return self.divided.batch

    @cached_property
    def paths(self) -> list[str]:
        """Where each leaf of the variables stands among them."""
        flat = jax.tree_util.tree_leaves_with_path(self.specs_of_variables)
        return [jax.tree_util.keystr(path) for path, _ in flat]

    @cached_property
    def params(self) -> PyTree:
        """The numbers of the parameters among these leaves, as `tx.init` takes them."""
        tree = jax.tree.structure(self.specs_of_variables)
        return _variables.params(tree.unflatten(range(tree.num_leaves)))

    @property
    def outputs(self) -> list[Any]:
        """Specs of what the last returns, besides the loss if it makes one."""
        return jax.tree.leaves(self.stages.first.aux[0])

    def functions(self, layer: int, mode: str = "none") -> Stage:
        """What a layer computes; of equal layers one."""
        return self.stages.functions(self.first_alike[layer], 0, mode)

    @cached_property
    def first_alike(self) -> list[int]:
        """Of each layer the first one whose operations are the same."""
        known: dict[Any, int] = {}
        count = range(len(self.names))
        return [known.setdefault(self.stages.kind(i), i) for i in count]

    def alike(self) -> Mapping[Stage, list[int]]:
        """The numbers of the layers that have the same functions."""
        found: dict[Stage, list[int]] = {}
        for i in range(len(self.names)):
            found.setdefault(self.functions(i), []).append(i)
        return found

    def variables(self, layer: int, are_params: bool) -> list[int]:
        """The numbers of the parameters that a layer owns, or of its other state."""
        params = set(self.divided.layout.params)
        pairs = enumerate(self.divided.layout.owner_stages)
        return [i for i, at in pairs if at == layer and (i in params) == are_params]

    def specs(self, numbers: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """What variables are like."""
        return [self.stages.spec_of(i) for i in numbers]

    def ties(self) -> Iterator[tuple[int, ...]]:
        """The layers that use parameters of the same layer, that one first."""
        read = [set(self.stages.weights(i)) for i in range(len(self.names))]
        groups: dict[int, set[int]] = {}
        for param in self.divided.layout.params:
            readers = [i for i, own in enumerate(read) if param in own]
            if len(readers) > 1:  # the first of them owns it
                groups.setdefault(readers[0], set()).update(readers)
        for i in sorted(groups):
            yield tuple(sorted(groups[i]))

    def entering(self, layer: int) -> list[Any]:
        """What a layer reads of the output of the one before it, or of the input."""
        if not layer:
            return self.stages.part(0).inputs
        arrives = self.stages.part(layer).arrives
        made = self._made[layer - 1]
        return [var for var in arrives if var in made and var not in self.skips]

    def skipping(self, layer: int) -> dict[tuple[int, str], list[Any]]:
        """What else it reads of earlier layers, by these and by name."""
        entering, found = set(self.entering(layer)), dict[tuple[int, str], list[Any]]()
        for var in self.stages.part(layer).arrives:
            if var not in entering:
                source = next(s for s, made in enumerate(self._made) if var in made)
                number = [*self._made[source]].index(var)
                name = self.skips.get(var) or f"{var.aval.str_short()} ({number})"
                found.setdefault((source, name), []).append(var)
        return found

    def wanted(self, variables: Sequence[Any]) -> list[Any]:
        """Those that have a cotangent."""
        return [var for var in variables if self.stages.has_gradient(var, 0)]

    @cached_property
    def _made(self) -> list[dict[Any, int]]:
        """What each layer makes for others; and of equal ones, as which value."""
        found = []
        for i in range(len(self.names)):
            part = self.stages.part(i)
            ends = zip(
                [*part.leaves, *part.aux], part.closed.jaxpr.outvars, strict=True
            )
            found.append({var: id(end) for var, end in ends})
        return found

    def is_output(self, source: int, variables: Sequence[Any]) -> bool:
        """Whether what a later layer reads is given to the next one too."""
        made = self._made[source]
        given = {made[var] for var in self.entering(source + 1)}
        return all(made[var] in given for var in variables)
