"""Pipeline-parallel training of Flax models in JAX."""

from importlib.metadata import version as _version

from . import draw as draw
from . import schedules as schedules
from ._layers._layer import Stage as Stage
from ._layers._method import layer as layer
from ._layers._skip import isolate as isolate
from ._layers._skip import pop as pop
from ._layers._skip import stash as stash
from ._pipeline import Pipeline as Pipeline
from ._plan import Plan as Plan
from ._train._state import TrainState as TrainState
from ._train._step import TrainStep as TrainStep
from ._transform import pipeline as pipeline
from ._transform import sequential as sequential

__version__ = _version("jpipe")
