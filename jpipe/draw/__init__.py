"""Pictures of schedules: SVG, PNG or PDF, and traces for Perfetto.

Everything here takes timelines, predicted by `Schedule.simulate` or measured, and
shows several on one axis: what was predicted above what was measured.
"""

from ._png import png as png
from ._svg import svg as svg
from ._trace import trace as trace

__all__ = ["png", "svg", "trace"]
