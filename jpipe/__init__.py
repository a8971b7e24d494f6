"""Pipeline-parallel training of Flax models in JAX."""

import importlib as _importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import schedules as schedules
from ._layers._layer import Stage as Stage
from ._layers._method import layer as layer
from ._layers._skip import isolate as isolate
from ._layers._skip import pop as pop
from ._layers._skip import stash as stash
from ._pipeline import Pipeline as Pipeline
from ._report import Report as Report
from ._train._state import TrainState as TrainState
from ._train._step import TrainStep as TrainStep
from ._transform import pipeline as pipeline
from ._transform import sequential as sequential
from .planning._plan import Plan as Plan

if _TYPE_CHECKING:
    from . import draw as draw
    from .planning._decide import plan as plan
    from .planning._partition import partition as partition
    from .planning._profiler import profile as profile
    from .planning._replicas import replicate as replicate
    from .planning._replicated import Replicated as Replicated

_PLANNING = {
    "plan": "jpipe.planning._decide",
    "partition": "jpipe.planning._partition",
    "profile": "jpipe.planning._profiler",
    "replicate": "jpipe.planning._replicas",
    "Replicated": "jpipe.planning._replicated",
}
__version__ = _version("jpipe")


def __getattr__(name: str) -> _Any:
    # A step draws nothing and plans nothing.
    if name == "draw":
        return _importlib.import_module("jpipe.draw")
    if name in _PLANNING:
        return getattr(_importlib.import_module(_PLANNING[name]), name)
    raise AttributeError(f"module 'jpipe' has no attribute {name!r}")
