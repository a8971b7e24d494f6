"""How long the programs of layers take on a device.

The device holds what one program needs, and only while it runs. Others may use the
machine too, which makes calls longer, some for a moment and some for a while. So of a
few calls in a row the shortest counts; the programs are measured one after the other in
several rounds, and of these the median. What a call takes that computes nothing is
taken off. What it takes in a row of calls, none of which is waited for, is known too.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._instructions import _transfer
from .._instructions._compiler import PlacedProgram, compile_all
from .._instructions._progress import count_items
from .._instructions._transfer import Device
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Computation
from .._stage._stage import Stage
from ..schedules._costs import TIME_FIELDS
from ._request import Request
from ._traced import TracedLayer

# In a round a program is called for about so many seconds, at most so many times.
_LONG_ENOUGH = 0.05
_MOST_CALLS = 30
# So many leaves a program of a small layer reads and writes: its input, two weights,
# their sums of gradients, and what it keeps.
_LEAVES = 8
# Random numbers that are repeated: to draw as many as an activation has takes long.
_DRAWN = np.random.default_rng(0).standard_normal(1 << 16, np.float32)


class Times(NamedTuple):
    """Seconds of the programs of a layer; zero where there is nothing to compute.

    Attributes:
      forward: of its forward, which keeps all that its backward reads.
      backward: of its backward.
      input_grad: of the first half of it.
      weight_grad: of the second.
      workspace_bytes: the most that one of them needs while it runs, if it is known.
    """

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    workspace_bytes: int | None


def measure(
    model: TracedLayer, request: Request, device: Device
) -> tuple[dict[Stage, Times], float]:
    """Measures the programs of all layers; of equal layers once.

    Args:
      model: the layers.
      request: has the mini-batch, whose values the first layer is given if it has any,
        and has how often each layer is visited.
      device: where they run.

    Returns:
      The times of the layers, by their functions, and that of a call of a program that
      computes nothing, in a row of them.
    """
    programs = {
        functions: _programs(model, numbers[0], functions, request, device)
        for functions, numbers in model.alike().items()
    }
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * _LEAVES
    plus_one = Computation.like(
        "nothing", lambda *leaves: [x + 1 for x in leaves], *scalars
    )
    nothing = _MeasuredProgram(
        plus_one, scalars, device, "a program that computes nothing"
    )
    every = [nothing, *(p for own in programs.values() for p in own.values())]
    compile_all(program.compiled for program in every)
    in_a_row = []
    for program in count_items("programs measured", every * request.rounds):
        program.visit()
        if program is nothing:  # in each round
            in_a_row.append(nothing.in_a_row())
    times = {f: _times(own, nothing.seconds) for f, own in programs.items()}
    return times, statistics.median(in_a_row)


def _programs(
    model: TracedLayer,
    number: int,
    functions: Stage,
    request: Request,
    device: Device,
) -> dict[str, "_MeasuredProgram"]:
    """The programs of a layer that compute anything, by name."""
    batch = _batch(model, number, request)
    label = f"layer {number} ({model.names[number]})"
    programs = {}
    for name in TIME_FIELDS.values() if functions.has_backward else ["forward"]:
        function: Computation = getattr(functions, name)
        closed, reads = function.closed, function.reads
        assert closed is not None
        assert reads is not None
        if closed.jaxpr.eqns:
            pairs = zip(reads, map(_jaxpr.spec, closed.in_avals), strict=True)
            arguments = [batch.get(at, spec) for at, spec in pairs]
            programs[name] = _MeasuredProgram(function, arguments, device, label)
    return programs


def _batch(model: TracedLayer, number: int, request: Request) -> dict[int, Any]:
    """What a layer reads of the mini-batch and the number of it, by its position."""
    part, batch, program = model.stages.part(number), model.batch, model.stages.first
    leaves = jax.tree.leaves([request.sample, request.targets, request.rngs])
    own = jax.tree.leaves(batch.part(batch.sizes[0]))
    values = [_first_part(*each) for each in zip(leaves, own, strict=True)]
    values += np.int32(0), *program.numbers
    known = dict(zip(program.given, values, strict=True))
    first = len(part.weights) + len(part.arrives)
    return dict(enumerate((known[var] for var in part.given), start=first))


def _times(programs: Mapping[str, "_MeasuredProgram"], idle: float) -> Times:
    """The medians, less what a call takes that computes nothing."""
    found = {name: program.seconds - idle for name, program in programs.items()}
    sizes = [program.compiled.workspace_bytes for program in programs.values()]
    known = [size for size in sizes if size is not None]
    return Times(
        *(max(found.get(name, 0.0), 0.0) for name in TIME_FIELDS.values()),
        workspace_bytes=max(known, default=0) if len(known) == len(sizes) else None,
    )


class _MeasuredProgram:
    """A function that is compiled by itself, and how long its calls took.

    Args:
      function: it was made of a jaxpr.
      arguments: arrays as they are, for specs values of their dtype.
      device: where it runs.
      label: what is measured, for errors.

    Attributes:
      compiled: the program.
    """

    def __init__(
        self,
        function: Computation,
        arguments: Sequence[Any],
        device: Device,
        label: str,
    ) -> None:
        assert function.closed is not None
        specs = list(map(_jaxpr.spec, function.closed.in_avals))
        used = [i for i in range(len(function.results)) if i not in function.aliases]
        self.compiled = PlacedProgram(
            function, specs, used, (), device, [0] * len(specs), function.name
        )
        self._arguments, self._device, self._label = arguments, device, label
        self._rounds: list[float] = []

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self._rounds)

    def visit(self) -> None:
        """Runs it some times; the shortest counts."""
        times: list[float] = []
        try:
            drawn = self._drawn()
            if not self._rounds:  # what is allocated or chosen at the first call
                self._timed(drawn, 1)
            while sum(times) < _LONG_ENOUGH and len(times) < _MOST_CALLS:
                times.append(self._timed(drawn, 1))
        except Exception as error:
            error.add_note(f"raised when {self._label} was measured")
            raise
        self._rounds.append(min(times))

    def in_a_row(self) -> float:
        """The seconds of a call among many that are not waited for one by one."""
        return self._timed(self._drawn(), _MOST_CALLS) / _MOST_CALLS

    def _timed(self, drawn: Sequence[Any], calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([self.compiled.run(*drawn) for _ in range(calls)])
        return time.perf_counter() - start

    def _drawn(self) -> list[jax.Array]:
        """Its arguments, on the device."""
        return _transfer.put(list(map(_value, self._arguments)), self._device)


def _first_part(leaf: Any, spec: jax.ShapeDtypeStruct) -> Any:
    """The first micro-batch of what has values; else its spec."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return spec
    return leaf[tuple(map(slice, spec.shape))]


def _value(leaf: Any) -> Any:
    """An array of a spec: of normal numbers; of zeros where it is not floating."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, leaf.dtype)
    return np.resize(_DRAWN, leaf.shape).astype(leaf.dtype)
