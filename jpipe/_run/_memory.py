"""How many bytes a mini-batch in flight holds: what to predict it from, and a count."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..schedules import Action, Costs
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ..schedules._costs import Skip
from . import _execute, _transfer
from ._execute import Live, Step
from ._program import Program


def nbytes(tree: Any) -> int:
    """The bytes of the arrays of a pytree; one that appears twice is counted once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())


class Meter:
    """Counts what the executor holds: give it to `_execute.execute` as ``observe``.

    Counted are weights, inputs, boundary activations, residuals, cotangents, sums of
    gradients and of losses, targets and keys; not the optimizer's state, and not what
    a program needs while it runs.

    Args:
      placement: the rank of each stage.

    Attributes:
      counts: the bytes of each stage before the first action, then after each.
      actions: what had run before each count; ``None`` for the first.
    """

    def __init__(self, placement: Sequence[int]) -> None:
        self._placement = placement
        self.counts: list[list[int]] = []
        self.actions: list[Any] = []

    def __call__(self, step: Step | None, live: Live) -> None:
        """Takes the count after one action."""
        self.actions.append(step and step.action)
        self.counts.append(
            [
                nbytes([part[s] for part in _parts(live)])
                for s in range(len(self._placement))
            ]
        )

    def ranks(self) -> list[list[int]]:
        """Each count by rank instead of by stage."""
        return [
            [
                sum(n for n, own in zip(row, self._placement, strict=True) if own == r)
                for r in range(max(self._placement) + 1)
            ]
            for row in self.counts
        ]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank held at any count."""
        return tuple(map(max, zip(*self.ranks(), strict=True)))


def _parts(live: Live) -> list[list[Any]]:
    by_microbatch = [live.x, live.extra, live.held, live.cotangents, live.emitted]
    return [live.weights, *by_microbatch, live.grads, live.tally]


def costs_of(program: Program) -> Costs:
    """The bytes that a compiled mini-batch moves and keeps; times are left at one.

    The executor's own loop walks the steps on shapes and dtypes, and its cells are
    read. `Schedule.simulate` predicts from them what a `Meter` counts, to the byte.

    Args:
      program: a mini-batch with a loss.

    Returns:
      Costs with one number per stage and micro-batch.
    """
    reader = _Reader(program)
    _execute.execute(abstract(program.steps), program.abstract_feed(), reader)
    return reader.costs()


def abstract(
    steps: Sequence[Step], note: Callable[[Step, Sequence[Any]], None] | None = None
) -> list[Step]:
    """The same steps on shapes and dtypes: nothing is computed, nothing moves.

    Args:
      steps: of one program.
      note: called with each step and what its compiled program is given.

    Returns:
      Steps for the executor, whose results are specs: one object for each array.
    """
    # A compiled program is always given the same shapes: it is traced once.
    known: dict[int, Any] = {}

    def on_specs(step: Step) -> Step:
        def program(*args: Any) -> Any:
            if note is not None:
                note(step, args)
            if id(step.program) not in known:
                known[id(step.program)] = jax.eval_shape(step.program, *args)
            return jax.tree.map(copy.copy, known[id(step.program)])

        routes = [route._replace(device=None) for route in step.routes]
        return step._replace(program=program, send=_transfer.deliverer(None, routes))

    return [on_specs(step) for step in steps]


class _Reader:
    """Reads off the executor's cells what `Costs` asks for."""

    _FIELDS = ("boundary", "cotangent", "residual", "pending", "extra", "emitted")

    def __init__(self, program: Program) -> None:
        self._schedule = program.schedule
        self._skips = _skips(program)
        self._ran = program.ran
        count = len(program.batch.sizes)
        self._table = {
            field: [[0] * count for _ in program.rows] for field in self._FIELDS
        }
        self._shared: list[dict[int, Any]] = []
        self._shared_x: dict[int, Any] = {}
        self._start: dict[str, Any] = {}

    def __call__(self, step: Step | None, live: Live) -> None:
        if step is None:
            self._read_start(live)
            return
        table, action = self._table, step.action
        op, s, m = action
        table["emitted"][s][m] = nbytes(live.emitted[s][m])
        if op in (FORWARD, INPUT):
            kept = "residual" if op == FORWARD else "pending"
            table[kept][s][m] = self._own(s, live.held[s][m])
        if op == FORWARD and s + 1 < len(live.weights):
            arrived = sum(k.bytes[m] for k in self._skips if k.target == s + 1)
            table["boundary"][s + 1][m] = nbytes(live.x[s + 1][m]) - arrived
        if op in (BACKWARD, INPUT) and s:
            back = sum(k.cotangent_bytes[m] for k in self._skips if k.source == s - 1)
            table["cotangent"][s][m] = nbytes(live.cotangents[s - 1][m]) - back

    def _read_start(self, live: Live) -> None:
        """What is there before the first action; an array of all micro-batches once."""
        for s, extra in enumerate(live.extra):
            cells = [*extra, *(live.x[0] if s == 0 else [])]
            self._shared.append(_repeated(cells))
            self._table["extra"][s] = [self._own(s, cell) for cell in extra]
        self._shared_x = _repeated(live.x[0])
        self._table["boundary"][0] = [self._own(0, cell) for cell in live.x[0]]
        sums = zip(live.grads, live.tally, strict=True)
        self._start = {
            "parameter_bytes": [nbytes(weights) for weights in live.weights],
            "accumulator_bytes": [nbytes(pair) for pair in sums],
            "shared_bytes": [nbytes(list(found.values())) for found in self._shared],
        }

    def _own(self, s: int, tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return nbytes([leaf for leaf in leaves if id(leaf) not in self._shared[s]])

    def costs(self) -> Costs:
        """The costs, once all steps were walked."""
        for row in self._schedule.rows:
            for action in row:
                if self._ran.get(action) != action:
                    self._leave_waiting(action)
        tables: dict[str, Any] = {f"{name}_bytes": t for name, t in self._table.items()}
        return Costs(**tables, **self._start, skips=self._skips)

    def _leave_waiting(self, action: Action) -> None:
        """An action that does nothing changes nothing: a later one does its work."""
        table = self._table
        op, s, m = action
        if op == FORWARD:
            waits = sum(k.bytes[m] for k in self._skips if k.target == s)
            waits += table["boundary"][s][m] - table["emitted"][s][m]
            table["residual"][s][m] = waits
        elif op != WEIGHT and not self._backward_ran(s, m):
            self._leave_frozen(s, m)
        elif op == INPUT and Action(WEIGHT, s, m) in self._ran:
            waits = table["residual"][s][m] + table["extra"][s][m]
            if s + 1 < len(self._shared):
                waits += table["cotangent"][s + 1][m]
            waits += sum(k.cotangent_bytes[m] for k in self._skips if k.source == s)
            if m == len(table["extra"][s]) - 1:
                waits += self._start["shared_bytes"][s]
            table["pending"][s][m] = waits

    def _backward_ran(self, s: int, m: int) -> bool:
        return any(Action(op, s, m) in self._ran for op in (BACKWARD, INPUT, WEIGHT))

    def _leave_frozen(self, s: int, m: int) -> None:
        """Nobody takes what a micro-batch brought; its input goes with the forward."""
        table, start = self._table, self._start
        start["parameter_bytes"][s] += table["extra"][s][m]
        table["extra"][s][m] = 0
        if m == len(table["extra"][s]) - 1:
            inputs = nbytes(list(self._shared_x.values())) if s == 0 else 0
            start["parameter_bytes"][s] += start["shared_bytes"][s] - inputs
            start["shared_bytes"][s] = inputs
            table["residual"][s][m] -= inputs


def _skips(program: Program) -> tuple[Skip, ...]:
    """The bytes of each skip connection, for each micro-batch."""
    found = []
    for s, row in enumerate(program.rows):
        for r, route in enumerate(row[0].task.ports.incoming):
            tasks = [work.task for work in row]
            pairs = [task.incoming(r) for task in tasks]
            found.append(
                Skip(
                    route.source,
                    s,
                    [nbytes(specs) for specs, _ in pairs],
                    [nbytes(wanted) for _, wanted in pairs],
                )
            )
    return tuple(found)


def _repeated(cells: Sequence[Any]) -> dict[int, Any]:
    """The arrays that stand in several cells, by identity."""
    leaves = [leaf for cell in cells for leaf in cell]
    count = Counter(map(id, leaves))
    return {id(leaf): leaf for leaf in leaves if count[id(leaf)] > 1}
