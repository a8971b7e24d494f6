"""A candidate of `jpipe.tune` as a training step that is compiled, timed, and run.

    compile       the bytes of the fullest device, with the workspace of its programs
    time_actions  a step after each of whose instructions this process waits
    take_turn     steps that wait for nothing, as a user takes them

Of several processes each compiles and runs its part of the same step.
"""

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._instructions._instruction import Instruction
from .._instructions._transfer import Device, put
from .._layers import _rng
from .._processes._arrays import is_key
from .._processes._group import group
from ..planning._finalists import with_compiled_bytes
from ..planning._forecast import Candidate
from ..planning._measure import CallSeconds
from ..planning._plan_record import TriedPlan
from ..planning._ran_steps import RanStep
from ..planning._request import Request
from ..schedules import Action
from ..schedules._formats import format_bytes
from ._train_step import take_observed_step
from ._transform import pipeline

PyTree = Any
# The steps of a turn that are timed, after one that is not. While one device ends a
# step another begins the next: in a short row of them the wait at its end weighs more
# than in training.
_STEPS_IN_A_TURN = 4
# The steps whose actions are timed; of each action the median counts.
_OBSERVED_STEPS = 3
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """The arguments that each step has.

    Attributes:
      layers: the layers or the model, as for `tune`.
      request: the mini-batch, the loss, and what is trained.
      tx: the optimizer.
      devices: the devices.
      rngs: as the user gives them; in ``request`` a key stands for none.
    """

    layers: Any
    request: Request
    tx: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    devices: Sequence[Device]
    rngs: _rng.Rngs


class RunningStep:
    """A candidate as a training step that is compiled, and run in turns.

    Args:
      candidate: the candidate, lowered.
      job: the arguments of its step.

    Attributes:
      candidate: the candidate.
      num_bytes: the most that a device holds, with the workspace of its programs;
        ``None`` before it is compiled.
      seconds: the seconds of a step, one number for each turn.
      fault: the reason why it does not run; empty if it may.
    """

    def __init__(self, candidate: Candidate, job: StepArguments) -> None:
        self.candidate = candidate
        self.num_bytes: int | None = None
        self.seconds: list[float] = []
        self.fault = ""
        self._action_seconds: dict[Action, float] = {}
        self._job = job
        self._state: Any = None
        request = job.request
        devices = job.devices[: candidate.choice.num_devices]
        # A step of several processes is compared by all, also by those without a stage.
        processes = {device.process_index for device in devices}
        self._takes_part = len(processes) > 1 or jax.process_index() in processes
        self._pipe = pipeline(
            job.layers,
            plan=candidate.plan,
            devices=devices,
            in_axes=request.in_axes,
            target_axes=request.target_axes,
        )
        loss_fn: Any = request.loss_fn
        self._step = self._pipe.train_step(
            loss_fn,
            job.tx,
            has_aux=request.has_aux,
            reduction=request.reduction,
            trainable=request.trainable,
        )

    @property
    def median(self) -> float:
        """The median of the seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def ran(self) -> RanStep:
        """The seconds of its actions, and of it, once it ran."""
        return RanStep(self.candidate.choice, self._action_seconds, self.median)

    def compile(self, limit: int | None) -> None:
        """Compiles the step and counts its bytes; drops it if they are too many."""
        num_bytes = 0
        try:
            if self._takes_part:
                num_bytes = self._count_bytes()
        except jax.errors.JaxRuntimeError as error:
            self._drop_if_out_of_memory(error)
        most_bytes = max(gather(num_bytes))
        self.num_bytes = most_bytes
        self.candidate = with_compiled_bytes(self.candidate, most_bytes)
        if limit is not None and most_bytes > limit:
            excess = format_bytes(most_bytes - limit)
            self._drop(f"does not fit: {excess} more than a device has")

    def time_actions(self, call: CallSeconds) -> None:
        """Times the actions of a few steps, each by itself.

        Args:
          call: the seconds of a program that computes nothing.
        """
        times: list[tuple[Action, list[float]]] = []
        try:
            if self._takes_part:
                times = [*self._observe_actions().items()]
        except jax.errors.JaxRuntimeError as error:
            self._drop_if_out_of_memory(error)
            return
        seconds: dict[Action, float] = {}
        for process_times in gather(times):
            for action, samples in process_times:
                # Each was waited for; in a step none is.
                computing = max(statistics.median(samples) - call.waited, 0.0)
                seconds[Action(*action)] = computing + call.in_a_row
        self._action_seconds = seconds

    def release(self) -> None:
        """Moves its state to the host, which makes room for another step."""
        self._state = jax.tree.map(_to_host, self._state)

    def take_turn(self) -> None:
        """Takes a few steps."""
        seconds = 0.0
        try:
            if self._takes_part:
                seconds = self._time_steps()
        except jax.errors.JaxRuntimeError as error:
            self._drop_if_out_of_memory(error)
            return
        self.seconds.append(gather(seconds)[0])

    def as_trial(self) -> TriedPlan:
        """Its row in the table."""
        return TriedPlan(
            text=str(self.candidate.choice),
            predicted=self.candidate.seconds,
            num_bytes=self.num_bytes,
            seconds=self.median if self.seconds else None,
            outcome=self.fault,
        )

    def _count_bytes(self) -> int:
        """The bytes of the fullest device, by the compiled step."""
        request = self._job.request
        state = self._take_state()
        report = self._step.compile(state, request.x, request.targets)
        self._state = state
        workspace = defaultdict[str, int](int)  # name of a device -> bytes
        for program in report.programs:
            needed = program.workspace_bytes or 0
            workspace[program.device] = max(workspace[program.device], needed)
        return max(peak + workspace[device] for device, peak in report.peak_bytes)

    def _observe_actions(self) -> dict[Action, list[float]]:
        """Action of this process -> its seconds in some steps."""
        times = defaultdict[Action, list[float]](list)
        begin = 0.0

        def note_time(instruction: Instruction, slots: list[Any]) -> None:
            nonlocal begin
            jax.block_until_ready(slots[instruction.result_slots])
            if isinstance(instruction.label, Action) and not instruction.is_move:
                times[instruction.label].append(time.perf_counter() - begin)
            begin = time.perf_counter()

        request = self._job.request
        state = self._take_state()
        for _ in range(_OBSERVED_STEPS):
            state, _ = take_observed_step(
                self._step, state, request.x, request.targets, note_time
            )
        self._state = state
        return times

    def _time_steps(self) -> float:
        """The seconds of a step."""
        request = self._job.request
        state = self._take_state()
        state, metrics = self._step(state, request.x, request.targets)
        jax.block_until_ready((state, metrics))
        begin = time.perf_counter()
        for _ in range(_STEPS_IN_A_TURN):
            state, metrics = self._step(state, request.x, request.targets)
        jax.block_until_ready((state, metrics))
        self._state = state
        return (time.perf_counter() - begin) / _STEPS_IN_A_TURN

    def _take_state(self) -> Any:
        """The state, which a step overwrites; a fresh one if there is none."""
        state = self._state
        self._state = None
        if state is not None:
            return jax.tree.map(_from_host, state)
        job = self._job
        return self._pipe.init_train_state(
            jax.random.key(0),
            job.request.x,
            job.tx,
            trainable=job.request.trainable,
            rngs=job.rngs,
        )

    def _drop_if_out_of_memory(self, error: Exception) -> None:
        """Drops the step after an error of the memory of this only process."""
        if jax.process_count() > 1 or _OUT_OF_MEMORY not in str(error):
            raise error
        self._drop("does not fit: a device was out of memory")

    def _drop(self, fault: str) -> None:
        self.fault = fault
        self._state = None


@dataclasses.dataclass(frozen=True)
class _HostArray:
    """The values of an array that are in this process, on the host.

    Attributes:
      array: shape, dtype and sharding.
      shards: each device, and the values there.
    """

    array: jax.ShapeDtypeStruct
    shards: list[tuple[Device, np.ndarray]]


def _to_host(leaf: jax.Array) -> Any:
    """An array on the host; a random key, which is small, as it is."""
    if is_key(leaf):
        return leaf
    shards = [(x.device, np.array(x.data)) for x in leaf.addressable_shards]
    array = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return _HostArray(array, shards)


def _from_host(leaf: Any) -> jax.Array:
    """The array on its devices; one that is there, as it is."""
    if not isinstance(leaf, _HostArray):
        return leaf
    array = leaf.array
    shards = [put([values], device)[0] for device, values in leaf.shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, shards, dtype=array.dtype
    )


def gather(value: Any) -> list[Any]:
    """A value of each process, in their order."""
    if jax.process_count() == 1:
        return [value]
    facts = group().gather({"value": value}, "jpipe.tune")
    return [fact["value"] for fact in facts]
