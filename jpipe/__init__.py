"""Pipeline-parallel training of Flax models in JAX."""

import importlib as _importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import schedules as schedules

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import draw as draw
    from ._api._compile_report import Report as Report
    from ._api._function_gradient import FunctionGradient as FunctionGradient
    from ._api._gradient_call import ValueAndGrad as ValueAndGrad
    from ._api._pipeline import Pipeline as Pipeline
    from ._api._train_step import TrainStep as TrainStep
    from ._api._transform import pipeline as pipeline
    from ._api._transform import sequential as sequential
    from ._api._tune import tune as tune
    from ._api._value_and_grad import value_and_grad as value_and_grad
    from ._arguments._stacked import Stacked as Stacked
    from ._check._report import CheckReport as CheckReport
    from ._layers._adapter import Layer as Layer
    from ._layers._inputs import inputs as inputs
    from ._layers._method import layer as layer
    from ._layers._rng import microbatch_key as microbatch_key
    from ._layers._skip import isolate as isolate
    from ._layers._skip import pop as pop
    from ._layers._skip import stash as stash
    from ._lower._join import MEAN as MEAN
    from ._lower._join import SUM as SUM
    from ._processes._preemption import preempted as preempted
    from ._processes._start import distributed as distributed
    from ._trace._boundaries import boundary as boundary
    from ._trace._whole_batch import whole_batch as whole_batch
    from ._train._train_state import TrainState as TrainState
    from .planning._layer_partition import partition as partition
    from .planning._plan import plan as plan
    from .planning._plan_record import Plan as Plan
    from .planning._profile import profile as profile
    from .planning._profile_record import Profile as Profile

# Public name -> the module that defines it. A module is imported when one of its names
# is first used: the command line draws schedules without JAX, and a step draws nothing
# and plans nothing.
_HOME = {
    "MEAN": "._lower._join",
    "SUM": "._lower._join",
    "CheckReport": "._check._report",
    "FunctionGradient": "._api._function_gradient",
    "Layer": "._layers._adapter",
    "Pipeline": "._api._pipeline",
    "Plan": ".planning._plan_record",
    "Profile": ".planning._profile_record",
    "Report": "._api._compile_report",
    "Stacked": "._arguments._stacked",
    "TrainState": "._train._train_state",
    "TrainStep": "._api._train_step",
    "ValueAndGrad": "._api._gradient_call",
    "boundary": "._trace._boundaries",
    "distributed": "._processes._start",
    "inputs": "._layers._inputs",
    "isolate": "._layers._skip",
    "layer": "._layers._method",
    "microbatch_key": "._layers._rng",
    "partition": ".planning._layer_partition",
    "pipeline": "._api._transform",
    "plan": ".planning._plan",
    "pop": "._layers._skip",
    "preempted": "._processes._preemption",
    "profile": ".planning._profile",
    "sequential": "._api._transform",
    "stash": "._layers._skip",
    "tune": "._api._tune",
    "value_and_grad": "._api._value_and_grad",
    "whole_batch": "._trace._whole_batch",
}
# former name -> what to type
_FORMER_NAMES = {
    "replicate": "type jpipe.plan(layers, x, tx), which chooses the devices of each "
    "stage (data=), or jpipe.pipeline(layers, num_microbatches, replicas=[1, 3, 2, 1])",
}
__version__ = _version("jpipe")
__all__ = [
    "MEAN",
    "SUM",
    "CheckReport",
    "FunctionGradient",
    "Layer",
    "Pipeline",
    "Plan",
    "Profile",
    "Report",
    "Stacked",
    "TrainState",
    "TrainStep",
    "ValueAndGrad",
    "boundary",
    "checkpoint",
    "distributed",
    "draw",
    "inputs",
    "isolate",
    "layer",
    "microbatch_key",
    "partition",
    "pipeline",
    "plan",
    "pop",
    "preempted",
    "profile",
    "schedules",
    "sequential",
    "stash",
    "tune",
    "value_and_grad",
    "whole_batch",
]


def __getattr__(name: str) -> _Any:
    if name in ("checkpoint", "draw"):
        return _importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        advice = f"; {_FORMER_NAMES[name]}" if name in _FORMER_NAMES else ""
        raise AttributeError(f"module 'jpipe' has no attribute {name!r}{advice}")
    module = _importlib.import_module(_HOME[name], __name__)
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name[0] == "_")})
