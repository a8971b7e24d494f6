"""`jpipe.tune`: runs the best plans on paper, and takes the fastest.

estimate    the share of each layer in the work, by its jaxpr     (`planning/_profile`)
even split  compiled and run: shares of the work become seconds; if it does not fit, by
            the first step that does
search      the best of each family of schedules                 (`planning/_finalists`)
compile     their steps, and that of one stage on one device; one that needs more than a
            device has is dropped
run         the others, in turns, but for those that are far behind after the first; the
            fastest by its median is the plan

Shares that are estimated make nearly as good a cut as layers that are measured one by
one. Which schedule is the fastest they do not know, and neither do the measured ones.
What slows a machine for a while slows all steps of a turn.

Of several processes each compiles and runs its part of the same steps. The numbers of
process 0 count for all: the times of transfers and actions, and of steps.
"""

import dataclasses
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from .._instructions._progress import Progress, count_items
from .._instructions._transfer import Device
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._processes._group import group
from .._train._transformation import check_optimizer
from ..planning._finalists import (
    find_finalists,
    forecast_again,
    scale_times,
    split_evenly,
    take_one_stage,
)
from ..planning._forecast import Candidate
from ..planning._layer_profile import LinkOptions, MeasuredLink, find_count_faults
from ..planning._measure import measure_action, measure_neighbor_link
from ..planning._mode_names import TRIED_MODES
from ..planning._plan_problem import (
    PlanProblem,
    explain_loss_functions,
    pose_plan_problem,
)
from ..planning._plan_record import Plan, TriedPlan
from ..planning._reasons import make_plan
from ..planning._request import Request
from ..planning._space import Hardware, PlanChoices
from ..schedules import Schedule, ScheduleBuilder
from ..schedules._formats import format_bytes, format_count, format_seconds
from ._process_link import measure_process_link
from ._transform import pipeline

PyTree = Any
# The steps of a turn that are timed, after one that is not.
_STEPS_IN_A_TURN = 2
# The turns of the first step, after which shares of the work become seconds.
_FIRST_TURNS = 2
# A step takes no further turn once its median is so many times that of the fastest:
# this saves time of tuning. The number was chosen, not measured.
_FAR_BEHIND = 1.5
# The number of searches, each with less room, until a step fits as it is compiled.
_MAX_SEARCHES = 3
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@outside_of_meshes
def tune(
    layers: Any,
    x: PyTree,
    targets: PyTree,
    loss_fn: Callable[[PyTree, PyTree], Any],
    tx: optax.GradientTransformation,
    *,
    # the machine
    devices: Sequence[Device] | None = None,
    memory_limit: int | None = None,
    # the model
    has_aux: bool = False,
    reduction: str = "mean",
    trainable: Any = None,
    in_axes: Any = 0,
    target_axes: Any = 0,
    rngs: _rng.Rngs = None,
    # what may be chosen
    num_microbatches: int | Sequence[int] | None = None,
    data: int | Sequence[int] | None = None,
    schedules: str | Schedule | ScheduleBuilder | Sequence[Any] | None = None,
    remat: str | Sequence[str] = TRIED_MODES,
    # the measurement
    rounds: int = 5,
) -> Plan:
    """Decides how to run a model, by running the best plans on its devices.

    The work of each layer is estimated, and plans are searched as `jpipe.plan` does.
    The best of each of three families of schedules, and an even split under 1F1B, are
    compiled as training steps. What needs more memory than a device has is dropped; the
    others take steps in turns. The plan is the fastest of them.

    Each has a state of its own, of a random key; where these do not fit beside each
    other, a fresh one for each turn. Nothing that is passed is changed.

    Ctrl-C ends the search, and the fastest so far is returned; before a step ran, and
    in one of several processes, it is raised.

    Args:
      layers: as `jpipe.pipeline` takes them: a sequence of layers, or one model.
      x: an input of a mini-batch.
      targets: its targets.
      loss_fn: ``(outputs, targets) -> scalar``, as for `Pipeline.train_step`.
      tx: the optax optimizer.
      devices: the devices; default: `jax.devices`. A plan may leave some idle.
      memory_limit: the bytes that a device has; default: what the devices report, and
        no limit where they report nothing, as CPUs do.
      has_aux: as for `Pipeline.train_step`.
      reduction: likewise.
      trainable: likewise.
      in_axes: as for `jpipe.pipeline`.
      target_axes: likewise.
      rngs: as for `Pipeline.init_train_state`.
      num_microbatches: as for `jpipe.plan`.
      data: likewise.
      schedules: likewise; none are made to measure.
      remat: likewise.
      rounds: the number of turns of all plans; the first takes two more before, and one
        that is far behind takes fewer.

    Returns:
      The plan. It prints with what was tried: the predicted and the measured seconds of
      a step, and the bytes of the fullest device, with the workspace of its programs.
      ``jpipe.pipeline(layers, plan=plan)`` builds it. ``plan.forecast`` is the
      prediction; ``plan.forecast.trials`` are the numbers of the table.

    Raises:
      ValueError: with all faults of the arguments; or if nothing fits the memory: with
        what each plan needs.
      TypeError: if an argument is of a wrong type; or the batch has no values.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(16), nn.relu, nn.Dense(16), nn.relu, nn.Dense(4)]
      >>> x = jax.random.normal(jax.random.key(0), (32, 8))
      >>> loss_fn = lambda y, t: jnp.mean((y - t) ** 2)
      >>> plan = jpipe.tune(layers, x, x[:, :4], loss_fn, optax.sgd(0.1), rounds=1)
      >>> sum(plan.balance), len(plan.forecast.trials) > 1
      (5, True)
      >>> pipe = jpipe.pipeline(layers, plan=plan)
    """
    with explain_loss_functions(layers):
        check_optimizer(tx)
    user_devices = jax.devices() if devices is None else list(devices)
    if memory_limit is None:
        memory_limit = _reported_limit(user_devices)
    choices = PlanChoices.from_options(
        data=data,
        num_microbatches=num_microbatches,
        schedules=schedules,
        remat=remat,
        is_here=True,
        needs_forwards_first=reduction == "batch",
        fits_schedules=False,
    )
    faults = [
        *find_count_faults("rounds", rounds),
        *find_count_faults("the number of devices", len(user_devices)),
        *choices.find_faults(memory_limit),
    ]
    if faults:
        raise ValueError(f"tune: {'; '.join(faults)}")
    leaves = jax.tree.leaves((x, targets))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(
            "tune runs steps: it needs the values of x and targets; with shapes type "
            "jpipe.plan(layers, x, tx, loss_fn=loss_fn, targets=targets)"
        )

    request = Request(
        x,
        loss_fn=loss_fn,
        targets=targets,
        has_aux=has_aux,
        reduction=reduction,
        trainable=trainable,
        in_axes=in_axes,
        target_axes=target_axes,
        rngs=rngs,
        measure=False,
    )
    job = _StepArguments(layers, request, tx, devices=user_devices, rngs=rngs)
    with Progress("plans tuned"):  # a terminal shows all progress as a part of this
        problem = _pose_problem(job, choices, memory_limit)
        contest = _Contest(job, problem)
        interruption = ""
        try:
            contest.run(rounds)
        except KeyboardInterrupt:
            if jax.process_count() > 1 or not contest.list_measured():
                raise
            interruption = "interrupted: the fastest so far, maybe of fewer turns"
    return contest.make_plan(interruption)


@dataclasses.dataclass(frozen=True)
class _StepArguments:
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


def _reported_limit(devices: Sequence[Device]) -> int | None:
    """The bytes of the smallest device, as far as those of this process report it."""
    limits: list[int] = []
    for device in devices:
        if device.process_index == jax.process_index():
            stats = device.memory_stats() or {}
            limits.append(stats.get("bytes_limit", 0))
    smallest = min(_gather(min(limits, default=0)))
    return smallest or None


def _pose_problem(
    job: _StepArguments, choices: PlanChoices, memory_limit: int | None
) -> PlanProblem:
    """The problem on paper, with actions and transfers as they are measured here."""
    local = [d for d in job.devices if d.process_index == jax.process_index()]
    device = (local or jax.local_devices())[0]
    link = _measure_link(job.devices, device)
    action_seconds = _gather(measure_action(device))[0]
    hardware = Hardware(len(job.devices), memory_limit)
    request = dataclasses.replace(job.request, action_seconds=action_seconds)
    return pose_plan_problem(
        job.layers,
        request,
        job.tx,
        profile=None,
        hardware=hardware,
        link_options=LinkOptions(None, None, device.platform != "cpu"),
        choices=choices,
        measured_link=link,
    )


def _measure_link(devices: Sequence[Device], device: Device) -> MeasuredLink | None:
    """The transfers between the first neighbors in two processes, if there are any.

    Else those of a device to another one of its process; ``None`` if it has none.

    Args:
      devices: the devices of the pipeline.
      device: one of this process.
    """
    process = 0
    neighbors = itertools.pairwise(devices)
    pairs = [(a, b) for a, b in neighbors if a.process_index != b.process_index]
    if pairs:
        source, target = pairs[0]
        process = source.process_index
        link = measure_process_link(source, target)
    else:
        link = measure_neighbor_link(device)
    fields = _gather(None if link is None else list(link))[process]
    return None if fields is None else MeasuredLink(*fields)


class _RunningStep:
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

    def __init__(self, candidate: Candidate, job: _StepArguments) -> None:
        self.candidate = candidate
        self.num_bytes: int | None = None
        self.seconds: list[float] = []
        self.fault = ""
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

    def compile(self, limit: int | None) -> None:
        """Compiles the step and counts its bytes; drops it if they are too many."""
        num_bytes = 0
        try:
            if self._takes_part:
                num_bytes = self._count_bytes()
        except jax.errors.JaxRuntimeError as error:
            self._drop_if_out_of_memory(error)
        most_bytes = max(_gather(num_bytes))
        self.num_bytes = most_bytes
        if limit is not None and most_bytes > limit:
            excess = format_bytes(most_bytes - limit)
            self.fault = f"does not fit: {excess} more than a device has"

    def take_turn(self, *, keeps_state: bool) -> None:
        """Takes a few steps, from a fresh state if the last turn kept none."""
        seconds = 0.0
        try:
            if self._takes_part:
                seconds = self._time_steps(keeps_state=keeps_state)
        except jax.errors.JaxRuntimeError as error:
            self._drop_if_out_of_memory(error)
            return
        self.seconds.append(_gather(seconds)[0])

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
        state = self._initial_state()
        report = self._step.compile(state, request.x, request.targets)
        workspace = defaultdict[str, int](int)  # name of a device -> bytes
        for program in report.programs:
            needed = program.workspace_bytes or 0
            workspace[program.device] = max(workspace[program.device], needed)
        return max(peak + workspace[device] for device, peak in report.peak_bytes)

    def _time_steps(self, *, keeps_state: bool) -> float:
        """The seconds of a step."""
        request = self._job.request
        state = self._initial_state() if self._state is None else self._state
        self._state = None  # a step overwrites it
        state, metrics = self._step(state, request.x, request.targets)
        jax.block_until_ready((state, metrics))
        begin = time.perf_counter()
        for _ in range(_STEPS_IN_A_TURN):
            state, metrics = self._step(state, request.x, request.targets)
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - begin) / _STEPS_IN_A_TURN
        if keeps_state:
            self._state = state
        return seconds

    def _initial_state(self) -> Any:
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
        self.fault = "does not fit: a device was out of memory"


class _Contest:
    """The even split, one stage, and the finalists, as far as they have run.

    Args:
      job: the arguments of all steps.
      problem: the problem on paper.
    """

    def __init__(self, job: _StepArguments, problem: PlanProblem) -> None:
        self._job = job
        self._problem = problem
        self._limit = problem.space.hardware.memory_limit
        # True once the shares of layers are seconds.
        self._is_scaled = False
        self._steps: list[_RunningStep] = []

    def run(self, rounds: int) -> None:
        """Runs the even split, searches, and runs all finalists in turns.

        Raises:
          ValueError: if nothing fits.
        """
        self._compile(split_evenly(self._problem))
        self._scale_times()
        one_stage = take_one_stage(self._problem)
        if one_stage is not None:
            self._compile_new([one_stage])
        self._scale_times()
        self._compile_finalists()
        if not self._is_scaled:
            # They were found by estimates alone.
            self._scale_times()
            self._compile_finalists()
        num_bytes = sum(step.num_bytes or 0 for step in self._list_fitting())
        keeps_states = self._limit is None or num_bytes <= self._limit
        for _ in count_items("turns of steps taken", range(rounds)):
            for step in self._list_close():
                step.take_turn(keeps_state=keeps_states)
        if not self.list_measured():
            raise ValueError(self._explain_no_fit())

    def list_measured(self) -> list[_RunningStep]:
        """The steps that ran, the fastest first."""
        measured = [step for step in self._list_fitting() if step.seconds]
        return sorted(measured, key=lambda step: step.median)

    def make_plan(self, interruption: str) -> Plan:
        """The plan of the fastest step, with what was tried.

        Args:
          interruption: a sentence for the reasons; empty if all turns were taken.
        """
        measured = self.list_measured()
        best = measured[0]
        assert best.num_bytes is not None
        count = format_count(len(best.seconds), "turn")
        notes = [
            f"measured: {format_seconds(best.median)} a step, the median of {count}, "
            f"and {format_bytes(best.num_bytes)} in the fullest device, with the "
            f"workspace of its programs",
            "profile: each layer's share of the work is estimated",
        ]
        if self._is_scaled:
            notes[-1] += "; with these seconds the first step that ran took its turns"
        if interruption:
            notes.append(interruption)
        plan = make_plan([best.candidate], self._problem.space, notes)
        assert plan.forecast is not None
        not_measured = [step for step in self._steps if step not in measured]
        trials = [step.as_trial() for step in (*measured, *not_measured)]
        forecast = dataclasses.replace(plan.forecast, trials=tuple(trials))
        return dataclasses.replace(plan, forecast=forecast)

    def _scale_times(self) -> None:
        """Makes seconds of shares of the work, once, by the first step that fits."""
        if self._is_scaled:
            return
        for step in self._list_fitting():
            for _ in range(_FIRST_TURNS):
                if not step.fault:
                    step.take_turn(keeps_state=False)
            if step.seconds:
                self._problem = scale_times(self._problem, step.candidate, step.median)
                for other in self._steps:
                    other.candidate = forecast_again(self._problem, other.candidate)
                self._is_scaled = True
                return

    def _compile_finalists(self) -> None:
        """Compiles finalists; with less and less room until one fits."""
        problem = self._problem
        for _ in range(_MAX_SEARCHES):
            new_steps = self._compile_new(find_finalists(problem))
            if self._limit is None or self._list_fitting() or not new_steps:
                return
            excess = min(step.num_bytes or 0 for step in new_steps) - self._limit
            problem = problem.with_less_room(excess)

    def _compile_new(self, candidates: Sequence[Candidate]) -> list[_RunningStep]:
        """Compiles the candidates that are no steps yet."""
        new_steps: list[_RunningStep] = []
        for candidate in count_items("steps compiled", candidates):
            if not any(candidate.is_same_run(x.candidate) for x in self._steps):
                new_steps.append(self._compile(candidate))
        return new_steps

    def _compile(self, candidate: Candidate) -> _RunningStep:
        step = _RunningStep(candidate, self._job)
        self._steps.append(step)
        step.compile(self._limit)
        return step

    def _list_close(self) -> list[_RunningStep]:
        """The steps that fit and are not far behind the fastest."""
        steps = self._list_fitting()
        fastest = min((x.median for x in steps if x.seconds), default=0.0)
        return [x for x in steps if not x.seconds or x.median <= _FAR_BEHIND * fastest]

    def _list_fitting(self) -> list[_RunningStep]:
        """The steps that fit."""
        return [step for step in self._steps if not step.fault]

    def _explain_no_fit(self) -> str:
        """The message if no step fits."""
        lines = [
            f"{step.candidate.choice} needs {format_bytes(step.num_bytes or 0)}"
            for step in self._steps
        ]
        return (
            f"tune: memory_limit={self._limit} bytes on "
            f"{format_count(len(self._job.devices), 'device')}: no step fits as it is "
            f"compiled:\n  * " + "\n  * ".join(lines) + "\nTake more devices, smaller "
            "micro-batches (num_microbatches=) or a smaller model"
        )


def _gather(value: Any) -> list[Any]:
    """A value of each process, in their order."""
    if jax.process_count() == 1:
        return [value]
    facts = group().gather({"value": value}, "jpipe.tune")
    return [fact["value"] for fact in facts]
