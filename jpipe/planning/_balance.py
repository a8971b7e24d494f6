"""A balance by name: equal times, operations, parameters or bytes."""

from collections.abc import Sequence
from typing import Any

import jax

from ..schedules import Schedule, ScheduleBuilder, named
from ._partition import partition
from ._profile import Profile

KINDS = ("time", "flops", "params", "memory")
