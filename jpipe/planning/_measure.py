"""Measures the programs of layers on a device, and transfers between two devices.

The device holds the arrays of one program, and only while it runs. Others may use the
machine too, which makes calls longer, some for a moment and some for a while. So of a
few calls in a row the shortest counts; the programs are measured one after the other in
several rounds, and of these the median:

    seconds(program) = median over rounds of min over calls - seconds(nothing)

where *nothing* is a program that computes nothing. Its time in a row of calls, none of
which is waited for, is measured too: an action takes at least that.

A hop is a small program and the transfer of its result, in a chain of them:

    latency   = seconds of a hop between two devices - seconds of a hop on one
    bandwidth = bytes of a large array / (seconds of its transfer - latency)
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._instructions import _transfer
from .._instructions._compiler import PlacedExecutable, compile_all
from .._instructions._progress import count_items
from .._instructions._transfer import Device
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Computation
from .._stage._stage_functions import StageFunctions
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ..schedules._costs import TIME_FIELDS
from ._layer_profile import MeasuredLink, ProgramCosts
from ._request import Request
from ._traced_layers import TracedLayers

# In a round a program is called for about so many seconds, at most so many times.
_ROUND_SECONDS = 0.05
_MAX_CALLS = 30
# The leaves that a program of a small layer reads and writes: its input, two weights,
# their sums of gradients, and its residuals.
_NUM_LEAVES = 8
# Random numbers that are repeated: to draw as many as an activation has takes long.
_NORMAL = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
# The number of transfers that wait for each other, as those of micro-batches do.
_HOPS = 30
# The number of times that they are timed; the first one is not counted.
_REPEATS = 5
# Large enough for its latency to be no matter, on a host or a fast link.
_BYTES = 1 << 24


def measure_layers(
    model: TracedLayers, request: Request, device: Device
) -> tuple[dict[StageFunctions, dict[str, ProgramCosts]], float]:
    """Measures the programs of all layers; of equal layers once.

    Args:
      model: the layers.
      request: the mini-batch, whose values the first layer reads if it has any, and the
        number of rounds.
      device: the device on which they run.

    Returns:
      The programs of the layers that compute anything, by their names, and the seconds
      of a call of a program that computes nothing, in a row of them.
    """
    programs = {
        functions: _programs(
            functions, model=model, layer=layers[0], request=request, device=device
        )
        for functions, layers in model.group_equal_layers().items()
    }
    nothing = _program_of_nothing(device)
    all_programs = [nothing]
    for layer_programs in programs.values():
        all_programs += layer_programs.values()
    compile_all(program.executable for program in all_programs)

    seconds_in_a_row: list[float] = []
    visits = all_programs * request.rounds
    for program in count_items("programs measured", visits):
        program.measure_round()
        if program is nothing:  # in each round
            seconds_in_a_row.append(nothing.measure_in_a_row())
    costs: dict[StageFunctions, dict[str, ProgramCosts]] = {}
    for functions, layer_programs in programs.items():
        costs[functions] = {
            name: program.costs(call_seconds=nothing.seconds)
            for name, program in layer_programs.items()
        }
    return costs, statistics.median(seconds_in_a_row)


class CallSeconds(NamedTuple):
    """Seconds of a program that computes nothing.

    Attributes:
      in_a_row: seconds of one of many that are not waited for one by one: an action
        takes at least that.
      waited: seconds of one that is waited for.
    """

    in_a_row: float
    waited: float


def measure_call(device: Device) -> CallSeconds:
    """Measures a program that computes nothing."""
    nothing = _program_of_nothing(device)
    compile_all([nothing.executable])
    nothing.measure_round()
    return CallSeconds(nothing.measure_in_a_row(), nothing.seconds)


def _program_of_nothing(device: Device) -> "_MeasuredProgram":
    """A program that computes next to nothing, on as many leaves as a small layer."""
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * _NUM_LEAVES
    plus_one = Computation.from_function(
        "nothing", lambda *leaves: [x + 1 for x in leaves], *scalars
    )
    return _MeasuredProgram(
        plus_one, scalars, device, label="a program that computes nothing"
    )


def _programs(
    functions: StageFunctions,
    *,
    model: TracedLayers,
    layer: int,
    request: Request,
    device: Device,
) -> dict[str, "_MeasuredProgram"]:
    """The programs of a layer that compute anything, by name."""
    batch_inputs = _batch_inputs(model, layer, request)
    label = f"layer {layer} ({model.names[layer]})"
    programs: dict[str, _MeasuredProgram] = {}
    for name, computation in layer_computations(functions).items():
        assert computation.closed is not None
        assert computation.used_args is not None
        if not computation.closed.jaxpr.eqns:
            continue
        specs = map(_jaxpr.spec, computation.closed.in_avals)
        arguments = [
            batch_inputs.get(index, spec)
            for index, spec in zip(computation.used_args, specs, strict=True)
        ]
        programs[name] = _MeasuredProgram(computation, arguments, device, label=label)
    return programs


def layer_computations(functions: StageFunctions) -> dict[str, Computation]:
    """The computations of a layer by the names of their times, as a step runs them.

    A backward adds gradients to their sums: until then both are held.
    """
    computations = {TIME_FIELDS[FORWARD]: functions.forward}
    if functions.slice.has_backward:
        for op in (BACKWARD, INPUT, WEIGHT):
            computations[TIME_FIELDS[op]] = functions.backward_adding(op)
    return computations


def _batch_inputs(model: TracedLayers, layer: int, request: Request) -> dict[int, Any]:
    """The leaves of the mini-batch that a layer reads, by the index of its input.

    The number of the micro-batch, and what follows from it, are among them.
    """
    stage_slice = model.stages.slice_of(layer)
    batch = model.batch
    traced = model.stages.traced()
    leaves = jax.tree.leaves([request.x, request.targets, request.rngs])
    specs = jax.tree.leaves(batch.first)
    values = [
        _first_microbatch(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)
    ]
    values += [np.int32(0), *traced.folded_numbers]
    value_of = dict(zip(traced.batch_inputs, values, strict=True))  # variable -> value
    first = len(stage_slice.weight_vars) + len(stage_slice.input_activations)
    return {
        index: value_of[var]
        for index, var in enumerate(stage_slice.batch_inputs, start=first)
    }


class _MeasuredProgram:
    """A computation that is compiled by itself, and the times of its calls.

    Args:
      computation: a computation that was made of a jaxpr.
      arguments: its arguments; of a spec, values of that dtype.
      device: the device on which it runs.
      label: the layer, for errors.

    Attributes:
      executable: the compiled program.
    """

    def __init__(
        self,
        computation: Computation,
        arguments: Sequence[Any],
        device: Device,
        *,
        label: str,
    ) -> None:
        assert computation.closed is not None
        specs = list(map(_jaxpr.spec, computation.closed.in_avals))
        results = range(len(computation.results))
        self.executable = PlacedExecutable(
            function=computation,
            arguments=specs,
            live_results=[i for i in results if i not in computation.aliases],
            donated=(),
            device=device,
            argument_places=[0] * len(specs),
            name=computation.name,
        )
        self._arguments = arguments
        self._device = device
        self._label = label
        self._rounds: list[float] = []  # the shortest call of each

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self._rounds)

    def costs(self, *, call_seconds: float) -> ProgramCosts:
        """The costs of the program, less the time of a call."""
        return ProgramCosts(
            seconds=max(self.seconds - call_seconds, 0.0),
            workspace_bytes=self.executable.workspace_bytes,
        )

    def measure_round(self) -> None:
        """Calls the program some times; the shortest counts."""
        times: list[float] = []
        try:
            leaves = self._put_arguments()
            if not self._rounds:  # what is allocated or chosen at the first call
                self._call_seconds(leaves, num_calls=1)
            while sum(times) < _ROUND_SECONDS and len(times) < _MAX_CALLS:
                times.append(self._call_seconds(leaves, num_calls=1))
        except Exception as error:
            error.add_note(f"raised when {self._label} was measured")
            raise
        self._rounds.append(min(times))

    def measure_in_a_row(self) -> float:
        """The seconds of a call among many that are not waited for one by one."""
        leaves = self._put_arguments()
        return self._call_seconds(leaves, num_calls=_MAX_CALLS) / _MAX_CALLS

    def _call_seconds(self, leaves: Sequence[Any], *, num_calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([self.executable.run(*leaves) for _ in range(num_calls)])
        return time.perf_counter() - start

    def _put_arguments(self) -> list[jax.Array]:
        """The arguments, on the device."""
        return _transfer.put(list(map(_value, self._arguments)), self._device)


def _first_microbatch(leaf: Any, spec: jax.ShapeDtypeStruct) -> Any:
    """The first micro-batch of a leaf that has values; else its spec."""
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
    return np.resize(_NORMAL, leaf.shape).astype(leaf.dtype)


def measure_neighbor_link(device: Device) -> MeasuredLink | None:
    """Measures transfers to another device of this process; ``None`` if it has none."""
    devices = jax.local_devices(backend=device.platform)
    neighbor = next((other for other in devices if other != device), None)
    return None if neighbor is None else _measure_link(device, neighbor)


def _measure_link(source: Device, target: Device) -> MeasuredLink:
    """Measures transfers between two devices: small ones both ways, a large one."""
    hop_seconds = _hop_seconds(source, target)
    latency = max(hop_seconds - _hop_seconds(source, source), 0.0)
    (large,) = _transfer.put([np.zeros(_BYTES, np.uint8)], source)
    seconds = _shortest_seconds(lambda: _transfer.put([large], target))
    if seconds > latency:
        seconds -= latency
    return MeasuredLink(latency, _BYTES / seconds, str(source), str(target))


def _hop_seconds(source: Device, target: Device) -> float:
    """The seconds of a hop to and fro between two devices, or on one."""
    add = jax.jit(lambda x: x + 1)

    def run_hops() -> Any:
        x = _transfer.put([np.float32(0)], source)
        for i in range(_HOPS):
            device = source if i % 2 else target
            x = _transfer.put([add(*x)], device)
        return x

    return _shortest_seconds(run_hops) / _HOPS


def _shortest_seconds(run: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])
