"""Pictures of schedules: SVG, and traces for Perfetto.

Everything here takes timelines, predicted by `Schedule.simulate` or measured, and
shows several on one axis: what was predicted above what was measured.
"""

from ._svg import svg as svg
from ._trace import trace as trace

__all__ = ["svg", "trace"]
