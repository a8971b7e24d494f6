"""`jpipe.tune`: runs the best plans on paper, and takes the fastest.

estimate  the share of each layer in the work, by its jaxpr      (`planning/_profile`)
try       the even split; then the best on paper of each family of schedules, and the
          best of all, as long as that should be about as fast as what ran
                                                               (`planning/_finalists`)
  lower,
  compile   what needs more bytes than a device has is dropped, and the next best tried
  run       each action by itself, then steps
  learn     layers take the times of the stages that ran       (`planning/_ran_steps`),
            and forecasts the bytes that steps needed        (`planning/_byte_errors`)
run       those that fit in turns, but for what is far behind; the fastest by its median
          is the plan

What slows a machine for a while slows all steps of a turn.

Of several processes each compiles and runs its part of the same steps. The numbers of
process 0 count for all: the times of transfers and actions, and of steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from .._instructions._progress import Progress, count_items
from .._instructions._transfer import Device
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._train._transformation import check_optimizer
from ..planning._finalists import (
    find_finalist,
    forecast_again,
    list_even_splits,
    list_families,
    lower,
)
from ..planning._forecast import Candidate, evaluate
from ..planning._layer_profile import LinkOptions, MeasuredLink, find_count_faults
from ..planning._measure import CallSeconds, measure_call, measure_neighbor_link
from ..planning._mode_names import TRIED_MODES
from ..planning._plan_problem import (
    PlanProblem,
    explain_loss_functions,
    pose_plan_problem,
)
from ..planning._plan_record import Plan
from ..planning._ran_steps import learn_times
from ..planning._reasons import make_plan
from ..planning._request import Request
from ..planning._space import Hardware, PlanChoices, SearchSpace
from ..schedules import Schedule, ScheduleBuilder
from ..schedules._formats import format_bytes, format_count, format_seconds
from ._process_link import measure_process_link
from ._running_step import RunningStep, StepArguments, gather

PyTree = Any
# The turns of a step as soon as it is compiled.
_FIRST_TURNS = 2
# A step takes no further turn once its median is so many times that of the fastest,
# and no step of a family is compiled that should be as slow: this saves time of tuning.
# The number was chosen, not measured.
_FAR_BEHIND = 1.5
# The number of searches of all choices: each may compile another step, if its forecast
# is at most so many times the fastest (benchmarks/results/planning.md).
_MAX_SEARCHES = 6
_NEARLY_AS_FAST = 1.02
# The number of candidates of a search that are lowered, and maybe compiled, until one
# fits (benchmarks/results/planning.md).
_MAX_ATTEMPTS = 3


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

    The work of each layer is estimated. An even split under 1F1B is compiled as a
    training step and run, its actions one by one and as a whole; then the best plan on
    paper of each family of schedules, and a few of all. Each is searched with the times
    and bytes of those before it. What needs more memory than a device has is dropped.
    The others take steps in turns, and the plan is the fastest of them.

    Each has a state of its own, of a random key; where the memory of devices is known,
    it is there only for its turns. Nothing that is passed is changed.

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
      schedules: likewise.
      remat: likewise.
      rounds: the number of turns at the end; one that is far behind takes fewer.

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
    job = StepArguments(layers, request, tx, devices=user_devices, rngs=rngs)
    with Progress("plans tuned"):  # a terminal shows all progress as a part of this
        call = _measure_call(job.devices)
        problem = _pose_problem(job, choices, memory_limit, call)
        contest = _Contest(job, problem, call)
        interruption = ""
        try:
            contest.run(rounds)
        except KeyboardInterrupt:
            if jax.process_count() > 1 or not contest.list_measured():
                raise
            interruption = "interrupted: the fastest so far, maybe of fewer turns"
    return contest.make_plan(interruption)


def _reported_limit(devices: Sequence[Device]) -> int | None:
    """The bytes of the smallest device, as far as those of this process report it."""
    limits: list[int] = []
    for device in devices:
        if device.process_index == jax.process_index():
            stats = device.memory_stats() or {}
            limits.append(stats.get("bytes_limit", 0))
    smallest = min(gather(min(limits, default=0)))
    return smallest or None


def _pose_problem(
    job: StepArguments,
    choices: PlanChoices,
    memory_limit: int | None,
    call: CallSeconds,
) -> PlanProblem:
    """The problem on paper, with actions and transfers as they are measured here."""
    device = _find_local_device(job.devices)
    link = _measure_link(job.devices, device)
    hardware = Hardware(len(job.devices), memory_limit)
    request = dataclasses.replace(job.request, action_seconds=call.in_a_row)
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


def _find_local_device(devices: Sequence[Device]) -> Device:
    """A device of this process, one of the pipeline if it has such."""
    local = [d for d in devices if d.process_index == jax.process_index()]
    return (local or jax.local_devices())[0]


def _measure_call(devices: Sequence[Device]) -> CallSeconds:
    """The seconds of a program that computes nothing, in process 0."""
    return CallSeconds(*gather(measure_call(_find_local_device(devices)))[0])


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
    fields = gather(None if link is None else list(link))[process]
    return None if fields is None else MeasuredLink(*fields)


class _Contest:
    """The even split and the finalists, as far as they have run.

    Args:
      job: the arguments of all steps.
      problem: the problem on paper.
      call: the seconds of a program that computes nothing.
    """

    def __init__(
        self, job: StepArguments, problem: PlanProblem, call: CallSeconds
    ) -> None:
        self._job = job
        self._call = call
        # It has the times and the bytes of the steps so far.
        self._problem = problem
        self._limit = problem.space.hardware.memory_limit
        self._steps: list[RunningStep] = []

    def run(self, rounds: int) -> None:
        """Runs the even split, searches, and runs all finalists in turns.

        Raises:
          ValueError: if nothing fits.
        """
        for choice in list_even_splits(self._problem):
            forecast = evaluate(self._problem.space, choice)
            self._try(self._lower(forecast))
            if self.list_measured():
                break
        # Times that a family takes say little about those of another one: each is tried
        # with those of the even split.
        even_space = self._problem.space
        families = list_families(even_space)
        for names in count_items("families of schedules tried", families):
            self._try_best(even_space.with_schedules(names), than_fastest=_FAR_BEHIND)
        for _ in count_items("searches of all schedules", range(_MAX_SEARCHES)):
            if not self._try_best(self._problem.space, than_fastest=_NEARLY_AS_FAST):
                break
        for _ in count_items("turns of steps taken", range(rounds)):
            for step in self._list_close():
                step.take_turn()
                self._make_room(step)
        if not self.list_measured():
            raise ValueError(self._explain_no_fit())

    def list_measured(self) -> list[RunningStep]:
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
            "profile: each layer's share of the work of its stage is estimated; the "
            "stages of the steps that ran take the seconds that were measured",
        ]
        if interruption:
            notes.append(interruption)
        plan = make_plan([best.candidate], self._problem.space, notes)
        assert plan.forecast is not None
        not_measured = [step for step in self._steps if step not in measured]
        trials = [step.as_trial() for step in (*measured, *not_measured)]
        forecast = dataclasses.replace(plan.forecast, trials=tuple(trials))
        return dataclasses.replace(plan, forecast=forecast)

    def _try_best(self, space: SearchSpace, *, than_fastest: float) -> bool:
        """Tries the best candidates of some choices, no steps yet, until one fits.

        Args:
          space: the choices, with the times to search with.
          than_fastest: the candidate should take less than so many times the seconds of
            the fastest step.

        Returns:
          False if none did.
        """
        for _ in range(_MAX_ATTEMPTS):
            known_space = dataclasses.replace(
                space, byte_errors=self._problem.space.byte_errors
            )
            measured = self.list_measured()
            most_seconds = than_fastest * measured[0].median if measured else math.inf
            forecast = find_finalist(known_space, self._may_try, most_seconds)
            if forecast is None:
                return False
            candidate = self._lower(forecast)
            # Its instructions may hold more than was forecast.
            if measured and not candidate.fits(space.hardware):
                continue
            self._try(candidate)
            if not self._steps[-1].fault:
                return True
        return False

    def _may_try(self, candidate: Candidate) -> bool:
        """True if a candidate is no step yet, and fits.

        Before a step ran, nothing is known of its bytes if no schedule of its kind was
        compiled.
        """
        space = self._problem.space
        for step in self._steps:
            # With other remat modes it may be less than what did not fit.
            is_other = (
                step.fault and candidate.choice.remat != step.candidate.choice.remat
            )
            if candidate.is_same_run(step.candidate) and not is_other:
                return False
        fits = candidate.fits(space.hardware)
        if self.list_measured():
            return fits
        return fits or not space.byte_errors.knows(candidate.choice.schedule)

    def _lower(self, forecast: Candidate) -> Candidate:
        """Lowers a candidate, and notes the bytes that its forecast lacked."""
        candidate = lower(forecast, self._problem)
        self._note_bytes(forecast, candidate.max_bytes)
        return candidate

    def _try(self, candidate: Candidate) -> None:
        """Compiles a lowered candidate, runs it, and learns from that."""
        step = RunningStep(candidate, self._job)
        self._steps.append(step)
        step.compile(self._limit)
        assert step.num_bytes is not None
        self._note_bytes(candidate, step.num_bytes)
        if not step.fault:
            step.time_actions(self._call)
        for _ in range(_FIRST_TURNS):
            if not step.fault:
                step.take_turn()
        self._make_room(step)
        if step.seconds:
            self._learn_times()

    def _make_room(self, step: RunningStep) -> None:
        """Releases a step for the next one, if the memory of devices is known."""
        if self._limit is not None:
            step.release()

    def _learn_times(self) -> None:
        """Learns from all steps that ran, and forecasts them again."""
        ran = [step.ran for step in self.list_measured()]
        space = learn_times(self._problem.space, ran)
        self._problem = dataclasses.replace(self._problem, space=space)
        for step in self._steps:
            step.candidate = forecast_again(space, step.candidate)

    def _note_bytes(self, candidate: Candidate, num_bytes: int) -> None:
        """Notes that a candidate needs so many bytes."""
        lacking = num_bytes - candidate.max_bytes
        space = self._problem.space.with_byte_error(candidate.choice, lacking)
        self._problem = dataclasses.replace(self._problem, space=space)

    def _list_close(self) -> list[RunningStep]:
        """The steps that fit and are not far behind the fastest."""
        steps = self._list_fitting()
        fastest = min((x.median for x in steps if x.seconds), default=0.0)
        return [x for x in steps if not x.seconds or x.median <= _FAR_BEHIND * fastest]

    def _list_fitting(self) -> list[RunningStep]:
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
