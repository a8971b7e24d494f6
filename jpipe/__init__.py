"""Pipeline-parallel training of Flax models in JAX."""

from importlib.metadata import version as _version

from . import schedules as schedules
from ._layer import Stage as Stage
from ._pipeline import Pipeline as Pipeline
from ._pipeline import pipeline as pipeline
from ._pipeline import sequential as sequential
from ._plan import Plan as Plan
from ._train import TrainState as TrainState

__version__ = _version("jpipe")
