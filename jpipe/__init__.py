"""Pipeline-parallel training of Flax models in JAX."""

from importlib.metadata import version as _version

from . import draw as draw
from . import schedules as schedules
from ._layer import Stage as Stage
from ._layer import layer as layer
from ._pipeline import Pipeline as Pipeline
from ._plan import Plan as Plan
from ._skip import isolate as isolate
from ._skip import pop as pop
from ._skip import stash as stash
from ._train import TrainState as TrainState
from ._train import TrainStep as TrainStep
from ._transform import pipeline as pipeline
from ._transform import sequential as sequential

__version__ = _version("jpipe")
