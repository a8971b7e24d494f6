"""The options that users type, and those of a plan, as one checked record.

`jpipe.pipeline` and `jpipe.value_and_grad` make `Options` of what users typed, and
`configure` makes a `PipelineConfig` of these and of the decisions of a plan.
"""

import itertools
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .._instructions._sharding import StageMesh
from .._instructions._transfer import Device
from .._layers._adapter import LayerAdapter
from .._layers._layer_group import check_balance
from .._messages import raise_all
from .._partition._config import DEFAULT_SCHEDULE, PipelineConfig
from .._partition._param_sharding import ShardingRule
from .._partition._remat import find_settings
from .._processes._start import check_threads
from ..planning._plan import Plan
from ..schedules import Schedule, ScheduleBuilder
from ..schedules._choose import find_schedule
from . import _option_checks

# The options that a plan decides: name -> default.
DECIDED_BY_PLAN = {
    "num_microbatches": None,
    "balance": None,
    "num_stages": None,
    "schedule": DEFAULT_SCHEDULE,
    "remat": "min_cut",
    "replicas": None,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that say how a program is divided and run, as users typed them.

    Each is described in `jpipe.pipeline`. The defaults are those of the functions that
    users call: here there are none, so that an option which is not passed on is an
    error.
    """

    num_microbatches: int | None
    num_stages: int | None
    balance: Sequence[int] | None
    plan: Plan | None
    devices: Sequence[Device] | np.ndarray | Mesh | None
    mesh: Mesh | None
    sharding: ShardingRule | None
    gather: str
    replicas: Sequence[int] | None
    schedule: str | ScheduleBuilder | Schedule
    remat: Any


def configure(
    options: Options, layers: Sequence[LayerAdapter] | None
) -> PipelineConfig:
    """Checks options, and merges those of a plan into them.

    Args:
      options: the options.
      layers: the layers of a list; ``None`` for one model or function.

    Raises:
      TypeError: if an option is of a wrong type.
      ValueError: if one does not fit; with every fault of a plan that is for other
        layers, or does not decide alone.
    """
    plan = options.plan
    cuts = None
    planned_shapes = None
    options = _with_lists(options)
    if plan is not None:
        typed_names = [
            name
            for name, default in DECIDED_BY_PLAN.items()
            if getattr(options, name) != default
        ]
        _check_plan(plan, layers, typed_names)
        options = _with_plan(options, plan)
        cuts = plan.cuts
        planned_shapes = plan.param_shapes

    num_microbatches = _option_checks.check_num_microbatches(options.num_microbatches)
    devices = _option_checks.check_mesh(
        options.mesh, options.devices, options.sharding, options.gather
    )
    if layers is None:
        balance = None
        num_stages = _option_checks.check_num_stages(options.num_stages)
    else:
        balance = check_balance(options.balance, len(layers))
        num_stages = len(balance)
    if cuts is not None:
        num_stages = len(cuts.positions) + 1
    _check_replicas(options.replicas, num_stages)
    # The number of stages may not be known yet, but there are no other names.
    find_schedule(options.schedule)
    find_settings(options.remat)

    ranks = _option_checks.devices_of_ranks(devices)
    if not ranks:
        raise ValueError("devices=[]: needs at least one")
    if any(isinstance(rank, StageMesh) for rank in ranks):
        check_threads()
    return PipelineConfig(
        num_microbatches=num_microbatches,
        ranks=ranks,
        num_stages=num_stages,
        balance=balance,
        schedule=options.schedule,
        remat=options.remat,
        replicas=options.replicas,
        sharding=options.sharding,
        gather=options.gather,
        cuts=cuts,
        planned_shapes=planned_shapes,
        is_mesh=isinstance(devices, Mesh),
    )


def _with_lists(options: Options) -> Options:
    """The options with lists for arrays of NumPy and iterators, which give once."""
    lists = dict[str, list[Any]]()
    for name in ("balance", "devices", "replicas", "remat"):
        value = getattr(options, name)
        is_array = isinstance(value, np.ndarray) and value.ndim > 0
        if is_array or isinstance(value, Iterator):
            lists[name] = [*value]
    return replace(options, **lists)


def _with_plan(options: Options, plan: Plan) -> Options:
    """The options with those that a plan decides."""
    mesh, devices = _option_checks.planned_mesh(plan, options.mesh, options.devices)
    return replace(
        options,
        num_microbatches=plan.schedule.num_microbatches,
        balance=plan.balance,
        schedule=plan.schedule,
        remat=plan.remat,
        mesh=mesh,
        devices=devices,
    )


def _check_replicas(replicas: Any, num_stages: int | None) -> None:
    """Checks that there is a number of ranks for each stage."""
    if replicas is None:
        return
    if not hasattr(replicas, "__len__"):
        raise TypeError(
            f"replicas={replicas!r} is a {type(replicas).__name__}; needs a number "
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
            f"plan={reprlib.repr(plan)} is a {type(plan).__name__}; needs what "
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
