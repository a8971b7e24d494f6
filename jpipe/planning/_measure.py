"""How long the programs of layers take on a device.

The device holds what one layer needs, and only while it runs. Others may use the
machine too, which makes calls longer, some for a moment and some for a while. So of a
few calls in a row the shortest counts; the layers are measured one after the other in
several rounds, and of these the median. What a call takes that computes nothing is
taken off. What it takes in a row of calls, none of which is waited for, is known too.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._instructions import _transfer
from .._instructions._compile import Compiled, compile_all
from .._instructions._progress import counted
from .._instructions._transfer import Device
from .._jaxprs import _jaxpr
from .._jaxprs._function import Function
from .._slices._functions import StageFunctions
from .._slices._slice import specs
from ..schedules._costs import FIELDS
from ._request import Request
from ._traced import Traced

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
    model: Traced, request: Request, device: Device
) -> tuple[dict[StageFunctions, Times], float]:
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
    layers = [
        _Measured(model, numbers[0], functions, request, device)
        for functions, numbers in model.alike().items()
    ]
    nothing = _Program(_nothing(), device)
    programs = [nothing, *(p for x in layers for p in x.programs.values())]
    compile_all(program.compiled for program in programs)
    zeros = _transfer.put([np.float32(0)] * _LEAVES, device)
    in_a_row = []
    for layer in counted("visits of layers measured", layers * request.rounds):
        if layer is layers[0]:  # in each round
            nothing(zeros)
            in_a_row.append(nothing.in_a_row(zeros))
        layer.visit()
    times = {layer.functions: layer.times(nothing.seconds) for layer in layers}
    return times, statistics.median(in_a_row)


def _nothing() -> Function:
    """Of some numbers as many others."""
    specs = [jax.ShapeDtypeStruct((), jnp.float32)] * _LEAVES
    return Function.like("nothing", lambda *leaves: [x + 1 for x in leaves], *specs)


class _Program:
    """A function that is compiled by itself, and how long its calls took.

    Args:
      function: it was made of a jaxpr.
      device: where it runs.

    Attributes:
      compiled: the program.
    """

    def __init__(self, function: Function, device: Device) -> None:
        closed = function.closed
        assert closed is not None
        self._function = function
        specs = list(map(_jaxpr.spec, closed.in_avals))
        self._used = [i for i in range(len(closed.out_avals)) if i not in function.same]
        self.compiled = Compiled(
            function, specs, self._used, (), device, [0] * len(specs), function.name
        )
        self._rounds: list[float] = []

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self._rounds)

    def __call__(self, offered: Sequence[Any]) -> list[Any]:
        """Runs it some times; all its results.

        Args:
          offered: of these it reads some.
        """
        reads = self._function.reads
        given = tuple(offered if reads is None else [offered[i] for i in reads])
        if not self._rounds:  # what is allocated or chosen at the first call
            self._timed(given)
        times: list[float] = []
        made: Sequence[Any] = ()
        while sum(times) < _LONG_ENOUGH and len(times) < _MOST_CALLS:
            made = ()  # not two results at once
            seconds, made = self._timed(given)
            times.append(seconds)
        self._rounds.append(min(times))
        return self._results(given, made)

    def in_a_row(self, given: Sequence[Any]) -> float:
        """The seconds of a call among many that are not waited for one by one."""
        start = time.perf_counter()
        made = [self.compiled.run(*given) for _ in range(_MOST_CALLS)]
        jax.block_until_ready(made)
        return (time.perf_counter() - start) / _MOST_CALLS

    def _timed(self, given: tuple[Any, ...]) -> tuple[float, Sequence[Any]]:
        start = time.perf_counter()
        made = jax.block_until_ready(self.compiled.run(*given))
        return time.perf_counter() - start, made

    def _results(self, given: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """All results: some are what the function was given, or other results."""
        results: list[Any] = [None] * len(self._function.results)
        for i, value in zip(self._used, made, strict=True):
            results[i] = value
        for i, at in self._function.same.items():
            results[i] = given[at] if at >= 0 else results[~at]
        return results


class _Measured:
    """A layer that is measured.

    Attributes:
      number: which it is.
      functions: what it does.
      programs: those of them that compute anything, by name.
    """

    def __init__(
        self,
        model: Traced,
        number: int,
        functions: StageFunctions,
        request: Request,
        device: Device,
    ) -> None:
        self._model = model
        self._part = model.stages.part(number)
        self._request = request
        self._device = device
        self.number = number
        self.functions = functions
        names = [*FIELDS.values()] if functions.has_backward else ["forward"]
        found = {name: getattr(functions, name) for name in names}
        self.programs = {
            name: _Program(function, device)
            for name, function in found.items()
            if function.closed is not None and function.closed.jaxpr.eqns
        }

    def visit(self) -> None:
        """Makes what the layer needs, and runs each of its programs for a while."""
        part, functions = self._part, self.functions
        try:
            given = [*self._drawn(specs(part.weights)), *self._batch()]
            results = self._run("forward", given)
            if functions.has_backward:
                count = len(part.leaves) + len(part.aux)
                drawn = self._drawn(functions.cotangents)
                given += [*results[count:], *drawn]
                self._run("backward", given)
                halves = self._run("input_grad", given)
                self._run("weight_grad", [*given, *halves[sum(functions.arrives) :]])
        except Exception as error:
            name = self._model.names[self.number]
            error.add_note(f"raised when layer {self.number} ({name}) was measured")
            raise

    def times(self, idle: float) -> Times:
        """The medians.

        Args:
          idle: what a call takes that computes nothing.
        """
        found = {name: p.seconds - idle for name, p in self.programs.items()}
        sizes = [p.compiled.workspace_bytes for p in self.programs.values()]
        known = [size for size in sizes if size is not None]
        return Times(
            *(max(found.get(name, 0.0), 0.0) for name in FIELDS.values()),
            workspace_bytes=max(known, default=0) if len(known) == len(sizes) else None,
        )

    def _run(self, name: str, given: Sequence[Any]) -> list[Any]:
        if name in self.programs:
            return self.programs[name](given)
        # What computes nothing gives of what it is given.
        function: Function = getattr(self.functions, name)
        return list(function.run(*[given[i] for i in function.reads or ()]))

    def _batch(self) -> list[Any]:
        """What it reads of other layers, of the mini-batch, and the number of it."""
        part, batch, request = self._part, self._model.batch, self._request
        program = self._model.stages.first
        leaves = jax.tree.leaves([request.sample, request.targets, request.rngs])
        own = jax.tree.leaves(batch.part(batch.sizes[0]))
        values = [_first_part(*each) for each in zip(leaves, own, strict=True)]
        values += np.int32(0), *program.numbers
        known = dict(zip(program.given, values, strict=True))
        given = [known[var] for var in part.given]
        return self._drawn([*specs(part.arrives), *given])

    def _drawn(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """On the device: arrays as they are, for specs values of their dtype."""
        return _transfer.put(list(map(_value, leaves)), self._device)


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
