"""A jaxpr cut by the places of its operands.

An equation runs in the place that minimizes the bytes moved: its operands that are
elsewhere must come, and if all that follows from its results ends in one place, their
*destination*, that must go there. Equations of one place that wait for no other place
between them become one segment, which is one program:

    place 0    place 1        segments
    a = f x    b = g y        (wave 0, place 0): a, c
    c = h a                   (wave 0, place 1): b
    d = a + b -> place 1      (wave 1, place 1): d

The *wave* of an equation is the number of transfers on the longest way to it. One that
could run earlier than it is read waits for its first reader, unless more bytes had to
wait for it then: so ``b1 * momentum`` waits for the global norm of all gradients, and
the update overwrites the momentum.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._instructions._graph import NOWHERE, Place
from .._jaxprs import _inlining, _jaxpr
from .._jaxprs._jaxpr import nbytes


class Destination(NamedTuple):
    """The one place to which all results that follow from a variable go.

    Attributes:
      place: the place; `NOWHERE` if there are several, or results stay anywhere.
      nbytes: the fewest bytes that reach it from there: those of the variable, or of
        what is computed of it on the way, such as its norm.
    """

    place: Place
    nbytes: int


class PlacedJaxpr:
    """A jaxpr with a place for each equation and each variable.

    An equation with no operand in a place is in `NOWHERE`, and so are its results.

    Args:
      closed: the jaxpr.
      places: the places of its arguments; less than 0: none.
      result_places: the places to which its results go, likewise; ``None``: they stay
        where they are computed.

    Attributes:
      closed: the jaxpr.
      eqn_places: the place of each equation.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        places: Sequence[Place],
        result_places: Sequence[Place] | None = None,
    ) -> None:
        self.closed = closed
        self._destinations = _destinations(closed.jaxpr, result_places or ())
        # variable -> place
        self._places = dict.fromkeys(closed.jaxpr.constvars, NOWHERE)
        for var, place in zip(closed.jaxpr.invars, places, strict=True):
            self._places[var] = max(place, NOWHERE)
        self.eqn_places = [self._place_eqn(eqn) for eqn in closed.jaxpr.eqns]

    def __getitem__(self, atom: Any) -> Place:
        """The place of a variable or a constant."""
        return NOWHERE if isinstance(atom, core.Literal) else self._places[atom]

    def _place_eqn(self, eqn: core.JaxprEqn) -> Place:
        """Chooses the place of an equation, and of its results.

        Among places that are as good it is the destination of the results, or else the
        last, so that a sum of scalars passes from place to place instead of gathering
        its terms in one.
        """
        num_bytes: dict[Place, int] = {}  # place -> bytes that need not cross
        for atom in eqn.invars:
            place = self[atom]
            if place >= 0:
                num_bytes[place] = num_bytes.get(place, 0) + nbytes(atom.aval)
        destinations = set[Place]()
        if num_bytes:
            for var in eqn.outvars:
                destination = self._destinations.get(var)
                if destination and destination.place >= 0:
                    place = destination.place
                    num_bytes[place] = num_bytes.get(place, 0) + destination.nbytes
                    destinations.add(place)
        eqn_place = max(
            num_bytes,
            key=lambda p: (num_bytes[p], p in destinations, p),
            default=NOWHERE,
        )
        if eqn_place < 0 and eqn.effects:
            eqn_place = 0  # in no place it would be left out, as no result is read

        self._places |= dict.fromkeys(eqn.outvars, eqn_place)
        carry = eqn.invars[_jaxpr.carry_slice(eqn)]
        for var, initial in zip(eqn.outvars, carry, strict=False):
            # The carry of a loop belongs where it was before, for all who read it.
            if self[initial] >= 0:
                self._places[var] = self[initial]
        return eqn_place


def _destinations(
    jaxpr: core.Jaxpr, places: Sequence[Place]
) -> dict[core.Var, Destination]:
    """The destination of each variable from which a result follows.

    Args:
      jaxpr: the jaxpr.
      places: the places to which its results go.
    """
    destinations: dict[core.Var, Destination] = {}

    def add(atom: Any, destination: Destination) -> None:
        if isinstance(atom, core.Literal):
            return
        previous = destinations.get(atom, Destination(destination.place, 0))
        is_one_place = previous.place == destination.place
        destinations[atom] = Destination(
            place=destination.place if is_one_place else NOWHERE,
            nbytes=min(nbytes(atom.aval), previous.nbytes + destination.nbytes),
        )

    for atom, place in zip(jaxpr.outvars, places, strict=False):
        add(atom, Destination(place, nbytes(atom.aval)))
    for eqn in reversed(jaxpr.eqns):
        of_results = [destinations[v] for v in eqn.outvars if v in destinations]
        result_places = {destination.place for destination in of_results}
        of_operands = Destination(
            place=result_places.pop() if len(result_places) == 1 else NOWHERE,
            nbytes=sum(destination.nbytes for destination in of_results),
        )
        for atom in eqn.invars:
            add(atom, of_operands)
    return destinations


def open_branches(
    closed: core.ClosedJaxpr,
    places: Sequence[Place],
    result_places: Sequence[Place] | None = None,
) -> PlacedJaxpr:
    """The same computation without a `jax.lax.cond` over operands of many places.

    If each result needs operands of one place alone, each place gets a cond of its own.
    Otherwise all branches are computed, leaf by leaf, and their results selected: each
    leaf may then stay where it is. A cond stays, in one place, if a branch has a
    callback, or a `jax.lax.while_loop`, which may end only where it is needed.
    """
    while True:
        closed = _jaxpr.dce_jaxpr(closed, closed.jaxpr.outvars)
        placed = PlacedJaxpr(closed, places, result_places)
        # id of a cond to open -> its results by place; empty: select leaf by leaf
        groups_of: dict[int, _inlining.Groups] = {}
        for eqn in closed.jaxpr.eqns:
            if _spans_places(eqn, placed):
                groups = _by_place(eqn, placed)
                if groups or not _contains(eqn, "while"):
                    groups_of[id(eqn)] = groups
        if not groups_of:
            return placed
        closed = _inlining.open_branches(closed, groups_of)


def _spans_places(eqn: core.JaxprEqn, placed: PlacedJaxpr) -> bool:
    if eqn.primitive.name != "cond" or eqn.effects:
        return False
    # A number may come from elsewhere.
    places = {placed[atom] for atom in eqn.invars[1:] if _size(atom) > 1}
    return len(places - {NOWHERE}) > 1 and not _contains(eqn, "pure_callback")


def _size(atom: Any) -> int:
    return atom.aval.size


def _contains(eqn: core.JaxprEqn, name: str) -> bool:
    return any(_jaxpr.contains(branch, name) for branch in eqn.params["branches"])


def _by_place(eqn: core.JaxprEqn, placed: PlacedJaxpr) -> _inlining.Groups:
    """The results of a `jax.lax.cond` by place; nothing if they need other places."""
    _, *operands = eqn.invars
    places = [placed[atom] for atom in operands]

    result_places = [NOWHERE] * len(eqn.outvars)
    for branch in _inlining.branches_of(eqn):
        placed_branch = PlacedJaxpr(branch, places)
        for i, atom in enumerate(branch.jaxpr.outvars):
            if len({result_places[i], placed_branch[atom]} - {NOWHERE}) > 1:
                return ()
            result_places[i] = max(result_places[i], placed_branch[atom])

    groups: dict[Place, list[int]] = {}
    for i, place in enumerate(result_places):
        groups.setdefault(place, []).append(i)
    for place, group in groups.items():
        _, used_operands = _inlining.branches_of_results(eqn, group)
        for i in used_operands:
            is_large = _size(operands[i]) > 1
            if is_large and places[i] not in (place, NOWHERE):
                return ()
    return tuple(groups.values()) if len(groups) > 1 else ()


def check_order(placed: PlacedJaxpr) -> None:
    """Checks that ordered effects are in one place: places run side by side.

    Raises:
      ValueError: if they are in more than one.
    """
    ordered: set[tuple[str, Place]] = set()
    eqns = placed.closed.jaxpr.eqns
    for eqn, place in zip(eqns, placed.eqn_places, strict=True):
        if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects):
            ordered.add((eqn.primitive.name, place))
    if len({place for _, place in ordered}) > 1:
        names = ", ".join(sorted({name for name, _ in ordered}))
        raise ValueError(
            f"effects with ordered=True ({names}) on values of several devices, which "
            f"run side by side; write ordered=False, or call them on the results"
        )


class Segment(NamedTuple):
    """Equations that run as one program.

    Attributes:
      wave: the number of transfers for which they wait.
      place: the place in which they run.
    """

    wave: int
    place: Place


def parts(
    placed: PlacedJaxpr, default_places: Sequence[Place]
) -> Iterator[tuple[Place, core.ClosedJaxpr]]:
    """Cuts a jaxpr in segments.

    Args:
      placed: the jaxpr.
      default_places: for each result the place in which it is computed if it is in
        `NOWHERE`.

    Yields:
      The place of each segment, in an order in which they can run, and the jaxpr of its
      results that others read. It has a copy of each equation in `NOWHERE` that it
      needs.
    """
    jaxpr = placed.closed.jaxpr
    segment_eqns = _segment_equations(placed)
    results = _segment_results(placed, segment_eqns, default_places)

    replicated = [i for i, place in enumerate(placed.eqn_places) if place < 0]
    variables = list(jaxpr.invars)
    for eqn in jaxpr.eqns:
        variables += eqn.outvars
    for segment, outvars in results.items():
        indices = sorted([*replicated, *segment_eqns.get(segment, ())])
        eqns = [jaxpr.eqns[i] for i in indices]
        invars = _free_variables(eqns, outvars)
        part = jaxpr.replace(
            invars=[var for var in variables if var in invars],
            outvars=outvars,
            eqns=eqns,
        )
        yield segment.place, core.ClosedJaxpr(part, placed.closed.consts)


def _segment_equations(placed: PlacedJaxpr) -> dict[Segment, list[int]]:
    """The indices of the equations of each segment, in an order in which they run."""
    waves = _first_waves(placed)
    _wait_for_readers(placed, waves)
    segment_eqns: dict[Segment, list[int]] = {}
    for index, wave in sorted(waves.items()):
        segment = Segment(wave, placed.eqn_places[index])
        segment_eqns.setdefault(segment, []).append(index)
    return {segment: segment_eqns[segment] for segment in sorted(segment_eqns)}


def _first_waves(placed: PlacedJaxpr) -> dict[int, int]:
    """Index of an equation in a place -> the first wave in which it can run."""
    jaxpr = placed.closed.jaxpr
    waves: dict[int, int] = {}
    # variable in a place -> the wave in which it can be read there
    wave_of: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
    for index, eqn in enumerate(jaxpr.eqns):
        place = placed.eqn_places[index]
        if place < 0:
            continue
        wave = 0
        for atom in eqn.invars:
            if placed[atom] >= 0:
                is_moved = placed[atom] != place
                wave = max(wave, wave_of[atom] + 1 if is_moved else wave_of[atom])
        for var in eqn.outvars:
            # A result that belongs elsewhere is a wave further on: its readers wait.
            is_moved = placed[var] != place
            wave_of[var] = wave + 1 if is_moved else wave
        waves[index] = wave
    return waves


def _wait_for_readers(placed: PlacedJaxpr, waves: dict[int, int]) -> None:
    """Moves equations to the waves in which they are read first.

    Args:
      placed: the jaxpr.
      waves: index of an equation in a place -> its wave.
    """
    jaxpr = placed.closed.jaxpr
    results = _jaxpr.variables(jaxpr.outvars)
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    # variable -> the last wave in which it can be computed
    last_wave: dict[Any, int] = {}
    for index in reversed(waves):
        eqn = jaxpr.eqns[index]
        place = placed.eqn_places[index]
        last_waves = list[int]()
        for var in eqn.outvars:
            if var in last_wave:
                last_waves.append(last_wave[var] - (placed[var] != place))
        operands = [v for v in _jaxpr.variables(eqn.invars) if placed[v] >= 0]
        operand_bytes = sum(nbytes(v.aval) for v in operands if v not in arguments)
        result_bytes = sum(nbytes(v.aval) for v in eqn.outvars)
        stays = eqn.effects or results & {*eqn.outvars} or operand_bytes > result_bytes
        if last_waves and not stays:
            waves[index] = min(last_waves)
        for var in operands:
            wave = waves[index] - (placed[var] != place)
            last_wave[var] = min(wave, last_wave.get(var, wave))


def _segment_results(
    placed: PlacedJaxpr,
    segment_eqns: dict[Segment, list[int]],
    default_places: Sequence[Place],
) -> dict[Segment, list[Any]]:
    """The variables of each segment that other segments or the caller read."""
    jaxpr = placed.closed.jaxpr
    # variable -> the segment that computes it
    producer: dict[Any, Segment] = {}
    for segment, indices in segment_eqns.items():
        for i in indices:
            producer |= dict.fromkeys(jaxpr.eqns[i].outvars, segment)

    read = _jaxpr.variables(jaxpr.outvars)
    for segment, indices in segment_eqns.items():
        for i in indices:
            for var in _jaxpr.variables(jaxpr.eqns[i].invars):
                if producer.get(var, segment) != segment:
                    read.add(var)
    results: dict[Segment, list[Any]] = {}
    for segment, indices in segment_eqns.items():
        results[segment] = []
        for i in indices:
            results[segment] += [v for v in jaxpr.eqns[i].outvars if v in read]

    arguments = set(jaxpr.invars)
    for atom, place in zip(jaxpr.outvars, default_places, strict=True):
        is_argument = not isinstance(atom, core.Literal) and atom in arguments
        if placed[atom] < 0 and not is_argument:
            # Computed in its default place, with whatever runs there first.
            last = Segment(len(jaxpr.eqns), place)
            first = next((x for x in results if x.place == place), last)
            results.setdefault(first, []).append(atom)

    # In the order of the function's results, which an optimizer returns in the order of
    # its arguments. XLA gives a result the memory of the first donated argument of its
    # shape: this is then the old value of the same leaf, which it need not copy away.
    result_index = {id(atom): i for i, atom in enumerate(jaxpr.outvars)}
    for atoms in results.values():
        atoms.sort(key=lambda atom: result_index.get(id(atom), len(result_index)))
    return results


def _free_variables(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> set[Any]:
    """The variables that equations and results read and no equation computes."""
    read = set(_jaxpr.variables(outvars))
    for eqn in eqns:
        read |= _jaxpr.variables(eqn.invars)
    for eqn in eqns:
        read -= set(eqn.outvars)
    return read
