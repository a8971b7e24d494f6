"""Cells that are predicted: what several devices would do, from times of one.

The programs of the stages are timed one after the other on one device that does
nothing else; the simulator runs the schedule with these times, with transfers at a
stated bandwidth. Where micro-batches are too large for this device, they are timed
with fewer examples and the times are scaled by the number of examples.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe._pipelined._specialization import Specialization
from jpipe.schedules import Action, Costs, Timeline

from ..experiment import Setting, fill
from ..result import PREDICTED, Cell
from .compiled import Way
from .stages import Call, Calls, gradient_of


class Link(NamedTuple):
    """What moves between two devices.

    Attributes:
      bandwidth: bytes per second.
      latency: seconds that a transfer takes whatever its size.
    """

    bandwidth: float
    latency: float = 20e-6


class Prediction(NamedTuple):
    """A training step on devices that are not there.

    Attributes:
      timeline: its gradients.
      update: the seconds of the optimizer, on the device with most parameters.
      examples: of the mini-batch.
      detail: what it was made from, for the reader of the JSON.
    """

    timeline: Timeline
    update: float
    examples: int
    detail: dict[str, Any]

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.examples / (self.timeline.makespan + self.update)

    @property
    def cell(self) -> Cell:
        """The throughput as a cell of a table."""
        return Cell(self.throughput, PREDICTED, "samples/s", detail=self.detail)


class Predictor:
    """Times programs once and predicts from them.

    Args:
      device: where they are timed.
      repeats: how often; the median counts.
      most_examples: the largest micro-batch that is timed.
    """

    def __init__(
        self, device: Any, repeats: int = 3, most_examples: int | None = None
    ) -> None:
        self._device = device
        self._repeats = repeats
        self._most = most_examples
        self._seconds: dict[Any, float] = {}
        self._tables: dict[Any, dict[str, dict[str, list[float]]]] = {}

    def predict(self, setting: Setting, way: Way, link: Link) -> Prediction:
        """Predicts a training step with a device for each stage."""
        timed = min(setting.size, self._most or setting.size)
        scale = setting.size / timed
        small = dataclasses.replace(setting, size=timed)
        pipe = way.pipe(small)
        batch = small.work.specs(small.batch)
        gradient = gradient_of(pipe, small.work.loss, *batch)
        calls = Calls(gradient)
        if small.work.by_layer:
            seconds = self._by_layer(small, gradient, calls)
        else:
            seconds = self._by_stage(calls)
        forward, backward = _table(pipe), _table(pipe)
        for action in calls.of:
            table = forward if action.op == "F" else backward
            table[action.stage][action.microbatch] = scale * seconds(action)
        costs = dataclasses.replace(
            _scaled_transfers(calls.costs, scale),
            forward=forward,
            backward=backward,
            bandwidth=link.bandwidth,
            latency=link.latency,
        )
        per_parameter = self._update_seconds(setting.work.tx)
        stages = gradient.stages
        parameters = [
            sum(stages.spec_of(weight).size for weight in stages.trained_weights(s))
            for s in range(stages.num_stages)
        ]
        timeline = pipe.schedule.simulate(costs)
        update = per_parameter * max(parameters, default=0)
        detail = way.detail(setting) | {
            "bubble": timeline.bubble_fraction,
            "update_s": update,
            "bandwidth, bytes/s": link.bandwidth,
            "latency, s": link.latency,
            "examples timed": timed,
            "single layers were timed": setting.work.by_layer,
        }
        return Prediction(timeline, update, setting.batch, detail)

    def _by_stage(self, calls: Calls) -> Callable[[Action], float]:
        times = [self._time(call) for call in calls.distinct]
        return lambda action: times[calls.of[action]]

    def _by_layer(
        self, setting: Setting, gradient: Specialization, calls: Calls
    ) -> Callable[[Action], float]:
        """Sums of times of single layers; each layer is a stage of its own here."""
        # Rows of one table mostly have the same layers.
        key = tuple(setting.work.layers), setting.size
        if key not in self._tables:
            modes = ("full", "none")
            self._tables[key] = {mode: self._layers(setting, mode) for mode in modes}
        tables = self._tables[key]

        def seconds(action: Action) -> float:
            op, s, m = action
            span = gradient.placement.layer_groups[s].span
            if Action("F", s, m) not in calls.of:  # the backward does its work too
                return sum(sum(tables["none"][op][span]) for op in "FB")
            return sum(tables[gradient.stages.mode(s, m).name][op][span])

        return seconds

    def _layers(self, setting: Setting, mode: str) -> dict[str, list[float]]:
        """The seconds of the F and the B of each layer by itself."""
        count = len(setting.work.layers)
        single = dataclasses.replace(setting, balance=(1,) * count, microbatches=1)
        pipe = Way("gpipe", mode).pipe(single)
        batch = setting.work.specs(setting.size)
        calls = Calls(gradient_of(pipe, setting.work.loss, *batch))
        seconds = {op: [0.0] * count for op in "FB"}
        for action, number in calls.of.items():
            seconds[action.op][action.stage] = self._time(calls.distinct[number])
        return seconds

    def _time(self, call: Call) -> float:
        key = call.shapes, hash(call.text)
        if key not in self._seconds:
            self._seconds[key] = self._timed(call.program, call.args)
        return self._seconds[key]

    def _timed(self, program: Any, specs: tuple[Any, ...]) -> float:
        """The median seconds of a program on random numbers, compilation apart."""
        lowered = program.lower(*specs)
        compiled = lowered.compile()
        donated = [info.donated for info in jax.tree.leaves(lowered.args_info)]
        random = np.random.default_rng(0)
        leaves, tree = jax.tree.flatten(specs)
        leaves = [
            jax.device_put(fill(leaf, random, 2), self._device) for leaf in leaves
        ]
        seconds = []
        for _ in range(self._repeats + 1):
            # What is donated is gone after the call.
            given = [
                jnp.copy(leaf) if gone else leaf
                for leaf, gone in zip(leaves, donated, strict=True)
            ]
            args = jax.block_until_ready(jax.tree.unflatten(tree, given))
            del given
            with one_core() if self._device.platform == "cpu" else nullcontext():
                start = time.perf_counter()
                result = jax.block_until_ready(compiled(*args))
                seconds.append(time.perf_counter() - start)
            del args, result
        return statistics.median(seconds[1:])

    def _update_seconds(self, tx: optax.GradientTransformation) -> float:
        """Seconds of the optimizer per parameter, on a vector of four million."""
        spec = jax.ShapeDtypeStruct((1 << 22,), jnp.float32)
        state = jax.eval_shape(tx.init, spec)

        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        program = jax.jit(update, donate_argnums=(0, 1))
        return self._time(Call(program, (spec, state, spec))) / spec.size


@contextmanager
def one_core() -> Iterator[None]:
    """Keeps all threads of this process on one core, where the system allows it.

    A device made of a CPU has one thread for arithmetic, but XLA also runs operations
    side by side on all cores: alone in the process it would be more than one device.
    """
    tasks = Path("/proc/self/task")
    if not (hasattr(os, "sched_setaffinity") and tasks.exists()):
        yield
        return
    allowed = os.sched_getaffinity(0)
    _keep_on({max(allowed)}, tasks)
    try:
        yield
    finally:
        _keep_on(allowed, tasks)


def _keep_on(allowed: set[int], tasks: Path) -> None:
    for task in tasks.iterdir():
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), allowed)


def _table(pipe: jpipe.Pipeline) -> list[list[float]]:
    """Zeros by stage and micro-batch: what is not run alone takes no time."""
    return [[0.0] * pipe.num_microbatches for _ in range(pipe.num_stages)]


def _scaled_transfers(costs: Costs, scale: float) -> Costs:
    def scaled(table: Any) -> Any:
        return [[scale * size for size in row] for row in table]

    return dataclasses.replace(
        costs,
        boundary_bytes=scaled(costs.boundary_bytes),
        cotangent_bytes=scaled(costs.cotangent_bytes),
        skips=tuple(
            skip._replace(
                bytes=[scale * size for size in skip.bytes],
                cotangent_bytes=[scale * size for size in skip.cotangent_bytes],
            )
            for skip in costs.skips
        ),
    )
