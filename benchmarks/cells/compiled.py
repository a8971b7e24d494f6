"""Cells that are compiled: the bytes of a step, of which nothing runs.

What lies between actions (weights, sums of gradients, activations that wait) is what
the simulator says; what an action needs while it runs is what XLA says of its compiled
program. Both are of the model at its real size, on abstract arrays.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

import jpipe
from jpipe._jaxprs._jaxpr import nbytes
from jpipe.schedules import Action, Timeline

from ..experiment import PyTree, Setting
from .stages import Call, Calls, gradient_of

# The layout of the memory does not depend on how well the code is optimized. It does
# depend on the order of operations: XLA on CPU takes, by default, the one in which most
# can run at once, with the gradients of all weights alive together; here it takes the
# one that holds least, as compilers for accelerators, which run one at a time, do.
_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
_known: dict[Any, int] = {}


class Peak(NamedTuple):
    """The bytes of a training step.

    Attributes:
      devices: the most that each device holds at once, all included.
      model: parameters, their gradients and the state of the optimizer, of all
        devices.
      parameters: their number.
    """

    devices: tuple[int, ...]
    model: int
    parameters: int

    @property
    def activations(self) -> int:
        """The bytes of all devices that are not the model's."""
        return sum(self.devices) - self.model


@dataclass(frozen=True)
class Way:
    """How to run an experiment: what it was published with, or what is better.

    Attributes:
      schedule: its name, or its builder.
      remat: what stages keep.
    """

    schedule: Any
    remat: str

    def pipe(self, setting: Setting, devices: Sequence[Any] = ()) -> jpipe.Pipeline:
        """The pipeline; by default all stages are on one device, where nothing runs."""
        return jpipe.pipeline(
            setting.work.layers,
            setting.microbatches,
            balance=setting.balance,
            devices=devices or jax.devices()[:1] * len(setting.balance),
            schedule=self.schedule,
            remat=self.remat,
        )

    def detail(self, setting: Setting) -> dict[str, Any]:
        """What is run, for the reader of the JSON."""
        return {
            "schedule": self.schedule,
            "remat": self.remat,
            "layers per stage": setting.balance,
            "micro-batches": setting.microbatches,
            "examples in each": setting.size,
        }


def peak(setting: Setting, way: Way) -> Peak:
    """The bytes of a training step, predicted from compiled programs."""
    pipe = way.pipe(setting)
    batch = setting.work.specs(setting.batch)
    gradient = gradient_of(pipe, setting.work.loss, *batch)
    calls = Calls(gradient)
    timeline = pipe.schedule.simulate(calls.costs)
    extra = {action: workspace(calls.distinct[n]) for action, n in calls.of.items()}
    stages = gradient.stages
    params = [
        [stages.spec_of(weight) for weight in stages.trained_weights(s)]
        for s in range(stages.num_stages)
    ]
    slots = [_slot_bytes(setting.work.tx, specs) for specs in params]
    devices = [
        _peak_of_rank(timeline, rank, extra) for rank in range(len(timeline.rows))
    ]
    for stage, rank in enumerate(timeline.placement):
        devices[rank] += slots[stage]
    weights = sum(nbytes(spec) for specs in params for spec in specs)
    return Peak(
        devices=tuple(devices),
        model=2 * weights + sum(slots),
        parameters=sum(spec.size for specs in params for spec in specs),
    )


def workspace(call: Call) -> int:
    """What a program takes beside what it is given: results and temporary arrays."""
    key = call.shapes, hash(call.text)
    if key not in _known:
        lowered = call.program.lower(*call.args)
        memory = lowered.compile(compiler_options=_OPTIONS).memory_analysis()
        _known[key] = (
            memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
    return _known[key]


def _peak_of_rank(timeline: Timeline, rank: int, extra: Mapping[Action, int]) -> int:
    """The most that lies on a rank together with what an action takes there."""
    events = [event for event in timeline.memory if event.rank == rank]
    times = [event.time for event in events]
    most = max(event.bytes for event in events)
    for action in timeline.rows[rank]:
        if action not in extra:
            continue
        first = bisect_right(times, timeline.start[action]) - 1
        last = bisect_left(times, timeline.end[action])
        held = max(event.bytes for event in events[first : max(last, first + 1)])
        most = max(most, held + extra[action])
    return int(most)


def _slot_bytes(tx: Any, params: Sequence[jax.ShapeDtypeStruct]) -> int:
    state: PyTree = jax.eval_shape(tx.init, list(params))
    return sum(map(nbytes, jax.tree.leaves(state)))
