"""The options of `jpipe.pipeline` and `jpipe.value_and_grad`, checked before any work.

arguments --as typed--> `Options` --a plan decides some, all are checked--> `Options`

An option is a parameter of both functions and a field of `Options`, of one name: it is
passed on by that name, and needs a line here only for its check.
"""

import inspect
import itertools
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .._arguments._wrong_call import describe_argument
from .._instructions._sharding import StageMesh
from .._instructions._transfer import Device
from .._layers._adapter import LayerAdapter
from .._layers._layer_group import check_balance
from .._messages import raise_all, warn
from .._partition._options import Options
from .._partition._remat import find_settings
from .._processes._start import check_threads
from ..planning._plan_record import Plan
from ..schedules import Schedule
from ..schedules._choose import find_schedule
from ..schedules._formats import format_type
from ._ranks import check_sharding, find_ranks, planned_mesh

# The options that a plan decides; it has no say in where the ranks are.
_DECIDED_BY_PLAN = (
    "num_microbatches",
    "balance",
    "num_stages",
    "schedule",
    "remat",
    "replicas",
)

# The options that may be arrays of NumPy, or iterators.
_SEQUENCES = {"balance", "devices", "replicas", "remat"}


def check_options(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    layers: Sequence[LayerAdapter] | None,
) -> Options:
    """Checks options, and merges those of a plan into them.

    Args:
      function: `jpipe.pipeline` or `jpipe.value_and_grad`, whose signature has the
        defaults.
      arguments: the value of each of its parameters, options and others.
      layers: the layers of a list; ``None`` for one model or function.

    Raises:
      TypeError: if an option is of a wrong type.
      ValueError: if one does not fit; with every fault of a plan that is for other
        layers, or does not decide alone.
    """
    typed = {
        field.name: arguments[field.name]
        for field in fields(Options)
        if field.name in arguments
    }
    for name in typed.keys() & _SEQUENCES:
        typed[name] = _as_list(typed[name])
    options = Options(**typed)
    plan = arguments["plan"]
    if plan is not None:
        parameters = inspect.signature(function).parameters
        typed_names = [
            name
            for name in _DECIDED_BY_PLAN
            if name in parameters and arguments[name] is not parameters[name].default
        ]
        _check_plan(plan, layers, typed_names)
        options = _with_plan(options, plan)

    num_microbatches = _check_num_microbatches(options.num_microbatches)
    check_sharding(options.mesh, options.devices, options.sharding, options.gather)
    balance = None
    if layers is None:
        num_stages = _check_num_stages(options.num_stages)
    else:
        balance = check_balance(options.balance, len(layers))
        num_stages = len(balance)
    if options.cuts is not None:
        num_stages = len(options.cuts.positions) + 1
    _check_replicas(options.replicas, num_stages)
    # The number of stages may not be known yet, but there are no other names.
    find_schedule(options.schedule)
    find_settings(options.remat)

    ranks = find_ranks(options.mesh, options.devices)
    if any(isinstance(rank, StageMesh) for rank in ranks):
        check_threads()
    return replace(
        options,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        balance=balance,
        devices=ranks,
    )


def _as_list(option: Any) -> Any:
    """A list for an array of NumPy, or an iterator, which gives once."""
    is_array = isinstance(option, np.ndarray) and option.ndim > 0
    return [*option] if is_array or isinstance(option, Iterator) else option


def _with_plan(options: Options, plan: Plan) -> Options:
    """The options with those that a plan decides."""
    mesh, devices = planned_mesh(plan, options.mesh, options.devices)
    return replace(
        options,
        num_microbatches=plan.schedule.num_microbatches,
        balance=plan.balance,
        schedule=plan.schedule,
        remat=plan.remat,
        mesh=mesh,
        devices=devices,
        cuts=plan.cuts,
        planned_shapes=plan.param_shapes,
    )


def _check_num_microbatches(number: Any) -> int:
    """Returns the number of micro-batches if it is an int of at least 1."""
    if number is None:
        raise TypeError(
            "num_microbatches= is missing, into how many micro-batches a mini-batch is "
            "split: type an int of at least 1, such as num_microbatches=4, or plan="
        )
    return _check_count("num_microbatches", number, advice=", or plan=")


def _check_num_stages(number: Any) -> int | None:
    """Returns the number of stages if it is an int of at least 1, or left out."""
    return None if number is None else _check_count("num_stages", number)


def _check_count(name: str, number: Any, advice: str = "") -> int:
    """Returns a number if it is an int of at least 1.

    Args:
      name: the name of the argument.
      number: its value.
      advice: the text on what to type in its place.

    Raises:
      TypeError: if it is no int.
      ValueError: if it is less than 1.
    """
    try:
        if isinstance(number, bool):
            raise TypeError
        number = operator.index(number)
    except TypeError:
        raise TypeError(
            f"{name} is {describe_argument(number)}; needs an int of at least 1, such "
            f"as {name}=4{advice}"
        ) from None
    if number < 1:
        raise ValueError(f"{name}={number}: needs at least 1")
    return number


def check_no_balance(balance: Any) -> None:
    """Raises a ValueError if one model was given a balance."""
    if balance is not None:
        raise ValueError(
            f"balance={balance!r} is for a list of layers; one model is divided by "
            f"itself: give num_stages=, or list its layers"
        )


def warn_of_idle_devices(ranks: Sequence[Device], schedule: Schedule) -> None:
    """Warns of devices that are idle though each stage could have its own.

    Args:
      ranks: the device of each rank that there could be.
      schedule: a schedule that was built by name, or by a builder.
    """
    num_devices = len(dict.fromkeys(ranks))
    num_stages = schedule.num_stages
    num_ranks = schedule.num_ranks
    if not num_ranks < num_stages <= num_devices:
        return
    stages_per_rank = num_stages // num_ranks
    plural = "s" if num_ranks > 1 else ""
    warn(
        f"{schedule.name} runs {stages_per_rank} stages per rank: {num_stages} stages "
        f"make {num_ranks} rank{plural}, {num_devices - num_ranks} of {num_devices} "
        f"devices are idle; give balance= {stages_per_rank * num_devices} entries, or, "
        f"if that is meant, devices=jax.devices()[:{num_ranks}]"
    )


def _check_replicas(replicas: Any, num_stages: int | None) -> None:
    """Checks that there is a number of ranks for each stage."""
    if replicas is None:
        return
    if not hasattr(replicas, "__len__"):
        raise TypeError(
            f"replicas={replicas!r} is {format_type(replicas)}; needs a number "
            f"for each stage, such as replicas={[2] * (num_stages or 2)}"
        )
    if num_stages not in (None, len(replicas)):
        raise ValueError(
            f"replicas={list(replicas)} is for {len(replicas)} stages, the "
            f"pipeline has {num_stages}"
        )


def _check_plan(
    plan: Any, layers: Sequence[LayerAdapter] | None, typed_names: Sequence[str]
) -> None:
    """Checks that a plan is one, is for these layers, and decides alone.

    Args:
      plan: the plan.
      layers: the layers of a list; ``None`` for one model or function.
      typed_names: the options that a plan decides and the user typed too.
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan={reprlib.repr(plan)} is {format_type(plan)}; needs what "
            f"jpipe.plan returned, or jpipe.Plan.from_json(text)"
        )
    faults = [
        f"it decides {name}, which was given too: leave {name}= out"
        for name in typed_names
    ]
    if plan.cuts is None and layers is None:
        faults.append(
            "it is of a list of layers; plan what is given here, by jpipe.plan"
        )
    if plan.cuts is not None and layers is not None:
        faults.append(
            "it is of one model or function; plan these layers, by jpipe.plan"
        )
    if layers is not None and not faults:
        names = [layer.name for layer in layers]
        planned_names: list[str] = []
        for stage in plan.stages:
            planned_names += stage.layers
        pairs = itertools.zip_longest(names, planned_names, fillvalue="missing")
        faults = [
            f"layer {i} is {name}, in the plan {planned_name}"
            for i, (name, planned_name) in enumerate(pairs)
            if name != planned_name
        ]
    raise_all("plan", faults)
