"""The settings that users type, and those of a plan, as one checked record."""

import itertools
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from .._instructions._sharding import StageMesh
from .._layers._adapter import LayerAdapter
from .._layers._layer_group import check_balance
from .._messages import raise_all
from .._partition._config import PipelineConfig
from .._partition._param_sharding import ShardingRule
from .._processes._start import check_threads
from ..planning._plan import Plan
from . import _setting_checks

# The settings that a plan decides: name -> default.
_DECIDED_BY_PLAN = {
    "num_microbatches": None,
    "balance": None,
    "num_stages": None,
    "schedule": "1f1b",
    "remat": "min_cut",
    "replicas": None,
}


def configure(
    *,
    plan: Any,
    layers: Sequence[LayerAdapter] | None,
    num_microbatches: Any,
    num_stages: Any,
    devices: Any,
    mesh: Any,
    sharding: ShardingRule | None,
    gather: str,
    replicas: Any,
    schedule: Any,
    remat: Any,
    balance: Any = None,
) -> PipelineConfig:
    """Checks settings, and merges those of a plan into them.

    Args:
      plan: the plan; ``None``: there is none.
      layers: the layers of a list; ``None`` for one model or function.
      num_microbatches: as for `jpipe.pipeline`, as are all following settings.
      num_stages: likewise.
      devices: likewise.
      mesh: likewise.
      sharding: likewise.
      gather: likewise.
      replicas: likewise.
      schedule: likewise.
      remat: likewise.
      balance: likewise.

    Raises:
      TypeError: if a setting is of a wrong type.
      ValueError: if one does not fit; with every fault of a plan that is for other
        layers, or does not decide alone.
    """
    cuts = None
    planned_shapes = None
    if isinstance(devices, Iterator):  # which gives its devices once
        devices = [*devices]
    if plan is not None:
        settings = {
            "num_microbatches": num_microbatches,
            "balance": balance,
            "num_stages": num_stages,
            "schedule": schedule,
            "remat": remat,
            "replicas": replicas,
        }
        typed_names = [
            name
            for name, default in _DECIDED_BY_PLAN.items()
            if settings[name] != default
        ]
        _check_plan(plan, layers, typed_names)
        mesh, devices = _setting_checks.planned_mesh(plan, mesh, devices)
        num_microbatches = plan.schedule.num_microbatches
        balance = plan.balance
        schedule = plan.schedule
        remat = plan.remat
        cuts = plan.cuts
        planned_shapes = plan.param_shapes

    num_microbatches = _setting_checks.check_num_microbatches(num_microbatches)
    devices = _setting_checks.check_mesh(mesh, devices, sharding, gather)
    if layers is None:
        balance = None
        num_stages = _setting_checks.check_num_stages(num_stages)
    else:
        balance = check_balance(balance, len(layers))
        num_stages = len(balance)
    if cuts is not None:
        num_stages = len(cuts.positions) + 1
    _check_replicas(replicas, num_stages)

    ranks = _setting_checks.devices_of_ranks(devices)
    if not ranks:
        raise ValueError("devices=[]: needs at least one")
    if any(isinstance(rank, StageMesh) for rank in ranks):
        check_threads()
    return PipelineConfig(
        num_microbatches=num_microbatches,
        ranks=ranks,
        num_stages=num_stages,
        balance=balance,
        schedule=schedule,
        remat=remat,
        replicas=replicas,
        sharding=sharding,
        gather=gather,
        cuts=cuts,
        planned_shapes=planned_shapes,
        is_mesh=isinstance(devices, Mesh),
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
      typed_names: the settings that a plan decides and the user typed too.
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
        faults.append("it is of a list of layers; make one of what is given here")
    if plan.cuts is not None and layers is not None:
        faults.append("it is of one model or function; make one of what is given here")
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
