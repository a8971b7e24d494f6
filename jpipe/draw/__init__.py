"""Draws schedules: as SVG, and as traces for Perfetto.

All functions take timelines, predicted by `Schedule.simulate` or measured, and show
several on one axis: the prediction above the measurement.
"""

from ._svg import svg as svg
from ._trace import trace as trace

__all__ = ["svg", "trace"]
