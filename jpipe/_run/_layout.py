"""How given variables lie: which of their leaves each stage uses, and whose they are.

A variable that several layers use is given once, in the entry of any of them: that is
where its gradient is returned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._jaxprs import _jaxpr
from .._layers._sharing import Key, Sharing
from .._layers._tree import Names, dotted, flat, merged, nested
from .._layers._walk import Visit
from . import _facts, _resting, _variables
from ._pipe import Pipe

PyTree = Any
# The layer in whose entry a variable stands, and its names there.
Place = tuple[int, Names]


class Layout:
    """Which leaves of variables of one structure each stage uses.

    Args:
      pipe: the stages.
      visits: what is met at each layer.
      variables: variables that were checked, or their specs.
      marks: whether each of their leaves is trained.

    Attributes:
      numbers: for each stage its variables, with the positions of its leaves among
        those of all variables in their place.
      order: for each stage these positions.
      marks: whether each leaf of all variables is trained.
      params: the positions of leaves that are parameters.
      trained: of these whether each is trained.
      homes: of each leaf of all variables the stage in which it stays.
      specs: what it is like, and its place.
      shardings: how each of them lies there between steps.
    """

    def __init__(
        self,
        pipe: Pipe,
        visits: Sequence[Visit],
        variables: Sequence[PyTree],
        marks: Sequence[PyTree],
    ) -> None:
        leaves, tree = jax.tree.flatten(tuple(variables))
        numbered = jax.tree.unflatten(tree, range(len(leaves)))
        places = _places(pipe.sharing, variables)
        entries = [
            merged(numbered[i], _borrowed(pipe.sharing, i, visit, numbered, places))
            for i, visit in enumerate(visits)
        ]
        self.numbers = [tuple(entries[stage.span]) for stage in pipe.stages]
        self.order = [jax.tree.leaves(own) for own in self.numbers]
        self.params: list[int] = jax.tree.leaves(_variables.params(numbered))
        self.marks: list[bool] = jax.tree.leaves(tuple(marks))
        self.trained = [self.marks[i] for i in self.params]
        layer_of = [
            i for i, entry in enumerate(numbered) for _ in jax.tree.leaves(entry)
        ]
        self.homes = [pipe.stage_of_layer[layer] for layer in layer_of]
        self.specs = [
            (_jaxpr.spec(leaf), pipe.place(home))
            for leaf, home in zip(leaves, self.homes, strict=True)
        ]
        self.shardings = _resting.shardings(pipe, variables)
        self._pipe = pipe

    @property
    def facts(self) -> dict[str, str]:
        """What processes compare of the variables, in words."""
        specs = [[self.specs[i][0] for i in own] for own in self.order]
        return _facts.of_stages(self._pipe, specs)

    def check(self, leaves: Sequence[Any], tree: str = "variables") -> None:
        """Checks what a run is given: see `_variables`.

        Args:
          leaves: those of all variables.
          tree: what the caller gave: variables or a state.

        Raises:
          ValueError: if one was overwritten, or is not where its stage runs.
          TypeError: if one belongs to a trace.
        """
        _variables.check_alive(leaves)
        triples = list(zip(self.homes, leaves, self.shardings, strict=True))
        own = [
            [
                (leaf, sharding)
                for home, leaf, sharding in triples
                if home == stage.index
            ]
            for stage in self._pipe.stages
        ]
        _variables.check_placed(own, self._pipe.stages, self._pipe.devices, tree)


def check(sharing: Sharing, visits: Sequence[Visit], given: Any, told: str) -> None:
    """Checks that variables are those of this model.

    Args:
      sharing: which variables of the layers are one.
      visits: what is met at each layer.
      given: what the caller passed.
      told: what the error says first.

    Raises:
      ValueError: with every leaf that is missing, surplus, given twice or of another
        shape.
    """
    _variables.check_entries(given, len(visits))
    needed: dict[Key, tuple[Place, PyTree]] = {}
    for i, visit in enumerate(visits):
        for names, spec in flat(visit.variables).items():
            needed[sharing.key(i, names)] = (i, names), spec
    places = _places(sharing, given)
    expected: list[dict[Names, PyTree]] = [{} for _ in visits]
    twice = {}
    for key, (place, spec) in needed.items():
        first, *others = places.get(key, [place])
        expected[first[0]][first[1]] = spec
        twice |= dict.fromkeys(others, first)
    rest = [
        nested(
            {names: x for names, x in flat(entry).items() if (i, names) not in twice}
        )
        for i, entry in enumerate(given)
    ]
    called = [f"variables[{i}]" for i in range(len(visits))]
    faults = [
        f"tied: {dotted(called[i], names)} is {dotted(called[k], own)}; give {{}} in "
        f"its place"
        for (i, names), (k, own) in twice.items()
    ]
    wanted = dict(zip(called, map(nested, expected), strict=True))
    found = dict(zip(called, rest if twice else given, strict=True))
    _variables.check(wanted, found, told, faults)


def by_owner(
    sharing: Sharing, visits: Sequence[Visit], variables: Sequence[PyTree]
) -> list[PyTree]:
    """Checked variables, each in the entry of the layer that `init` gives it to."""
    places = _places(sharing, variables)
    entries = []
    for i, (visit, entry) in enumerate(zip(visits, variables, strict=True)):
        found = {n: places[sharing.key(i, n)][0] for n in flat(visit.variables)}
        if set(found.values()) != {(i, names) for names in flat(entry)}:
            entry = nested(
                {n: flat(variables[at])[there] for n, (at, there) in found.items()}
            )
        entries.append(entry)
    return entries


def complete(sharing: Sharing, variables: Sequence[PyTree]) -> list[PyTree]:
    """What each layer may use: its own entry, and what others hold of its modules."""
    places = _places(sharing, variables)
    entries = []
    for i, entry in enumerate(variables):
        lent = {}
        for key, ((layer, names), *_) in places.items():
            if layer != i and (here := sharing.place(i, key)) is not None:
                lent[here] = flat(variables[layer])[names]
        entries.append(merged(entry, lent))
    return entries


def _places(sharing: Sharing, variables: Sequence[PyTree]) -> dict[Key, list[Place]]:
    places: dict[Key, list[Place]] = {}
    for i, entry in enumerate(variables):
        for names in flat(entry):
            places.setdefault(sharing.key(i, names), []).append((i, names))
    return places


def _borrowed(
    sharing: Sharing,
    layer: int,
    visit: Visit,
    variables: Sequence[PyTree],
    places: Mapping[Key, Sequence[Place]],
) -> dict[Names, PyTree]:
    """Of what a layer uses that which stands in the entries of others."""
    borrowed = {}
    for names in [*flat(visit.variables), *flat(visit.borrowed)]:
        (owner, there), *_ = places[sharing.key(layer, names)]
        if owner != layer:
            borrowed[names] = flat(variables[owner])[there]
    return borrowed
