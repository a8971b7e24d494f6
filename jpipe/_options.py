"""What users type of how a function is divided, and of where and when it runs."""

import itertools
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import _setup
from ._instructions._sharding import SubMesh
from ._layers._layer import LayerAdapter
from ._messages import raise_all
from ._processes._start import check_threads
from ._run._param_sharding import Rule
from ._slices._cuts import Cuts
from ._slices._division import Division, Shapes
from .planning._plan import Plan

# What a plan decides, and what is there if it was not given.
_DECIDED = {
    "num_microbatches": None,
    "balance": None,
    "num_stages": None,
    "schedule": "1f1b",
    "remat": "min_cut",
    "replicas": None,
}


@dataclass(frozen=True)
class Options:
    """The arguments of `jpipe.pipeline` of these names.

    Attributes:
      cuts: of a plan, where one model or function is divided.
      planned_shapes: of a plan, those of the parameters that it is of.
    """

    num_microbatches: Any
    num_stages: int | None
    devices: Any
    mesh: Any
    sharding: Rule | None
    gather: str
    replicas: Sequence[int] | None
    schedule: Any
    remat: Any
    balance: Any = None
    cuts: Cuts | None = None
    planned_shapes: Shapes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.devices, Iterator):  # which gives its devices once
            object.__setattr__(self, "devices", [*self.devices])

    def planned(self, plan: Any, layers: Sequence[LayerAdapter] | None) -> "Options":
        """The same, with what a plan decides.

        Args:
          plan: what was given as one; ``None``: there is none.
          layers: of the pipeline; ``None``: of one model or function.

        Raises:
          TypeError: if it is not a plan.
          ValueError: with every fault, if it is for others, or does not decide alone.
        """
        if plan is None:
            return self
        given = [n for n, default in _DECIDED.items() if getattr(self, n) != default]
        _check(plan, layers, given)
        mesh, devices = _setup.planned_mesh(plan, self.mesh, self.devices)
        return replace(
            self,
            num_microbatches=plan.schedule.num_microbatches,
            balance=plan.balance,
            schedule=plan.schedule,
            remat=plan.remat,
            cuts=plan.cuts,
            planned_shapes=plan.param_shapes,
            mesh=mesh,
            devices=devices,
        )

    def checked(self) -> "Options":
        """The same, with devices in place of a mesh, which is one way to give them.

        Raises:
          ValueError: if the number of micro-batches, or what is given of a mesh and
            devices, does not fit.
          TypeError: if one of these is of a wrong type.
        """
        number = _setup.check_num_microbatches(self.num_microbatches)
        where = self.mesh, self.devices, self.sharding, self.gather
        devices = _setup.check_mesh(*where)
        return replace(self, num_microbatches=number, mesh=None, devices=devices)

    def division(
        self, num_stages: int | None = None, is_lasting: bool = False
    ) -> Division:
        """In which stages functions are divided, and where these run.

        Args:
          num_stages: how many a list of layers has.
          is_lasting: see `Division`.

        Raises:
          ValueError: if a number does not fit.
          TypeError: if it is none, or replicas are no sequence.
        """
        count = num_stages or _setup.check_num_stages(self.num_stages)
        replicas = self.replicas
        if self.cuts is not None:
            count = len(self.cuts.positions) + 1
        if replicas is not None and not hasattr(replicas, "__len__"):
            raise TypeError(
                f"replicas={replicas!r} is a {type(replicas).__name__}; needs a number "
                f"for each stage, such as replicas={[2] * (count or 2)}"
            )
        if replicas is not None and count not in (None, len(replicas)):
            raise ValueError(
                f"replicas={list(replicas)} is for {len(replicas)} stages, the "
                f"pipeline has {count}"
            )
        ranks = _setup.ranks(self.devices)
        if not ranks:
            raise ValueError("devices=[]: needs at least one")
        if any(isinstance(rank, SubMesh) for rank in ranks):
            check_threads()
        return Division(
            num_microbatches=self.num_microbatches,
            num_stages=count,
            devices=ranks,
            choose=partial(_setup.choose_devices, self.devices),
            schedule=self.schedule,
            remat=self.remat,
            replicas=replicas,
            rule=self.sharding,
            gather=self.gather,
            is_lasting=is_lasting,
            cuts=self.cuts,
            planned_shapes=self.planned_shapes,
        )


def _check(
    plan: Any, layers: Sequence[LayerAdapter] | None, given: Sequence[str]
) -> None:
    """Checks that a plan is one, is for these layers, and decides alone."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan={reprlib.repr(plan)} is a {type(plan).__name__}; needs what "
            f"jpipe.plan returned, or jpipe.Plan.from_json(text)"
        )
    faults = [
        f"it decides {name}, which was given too: leave {name}= out" for name in given
    ]
    if (plan.cuts is None) != (layers is not None):
        what = "a list of layers" if plan.cuts is None else "one model or function"
        faults.append(f"it is of {what}; make one of what is given here")
    if layers is not None and not faults:
        names = [name for stage in plan.stages for name in stage.layers]
        listed = [layer.name for layer in layers]
        pairs = itertools.zip_longest(listed, names, fillvalue="missing")
        faults = [
            f"layer {i} is {has}, in the plan {name}"
            for i, (has, name) in enumerate(pairs)
            if name != has
        ]
    raise_all("plan", faults)
