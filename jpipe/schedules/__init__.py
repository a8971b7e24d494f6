"""Pipeline schedules as data: the actions of every rank, in order.

    0F0 0F1 0B0 0F2 0B1 0B2     rank 0; 0F2: the forward of stage 0 on micro-batch 2
    1F0 1B0 1F1 1B1 1F2 1B2     rank 1; 1B0: the backward of stage 1 on micro-batch 0

A schedule is a value. It knows nothing of arrays, devices or models; transfers
follow from the dependencies between its actions and are never written down. Print
it, check it, predict its time and memory, draw it, run it, or write your own rows.

To add one, write a builder ``(num_ranks, num_microbatches) -> Schedule`` and name it
in `BY_NAME`.
"""

from ._action import Action as Action
from ._blocks import one_f_one_b_v as one_f_one_b_v
from ._blocks import v_half as v_half
from ._blocks import v_min as v_min
from ._catalogue import BY_NAME as BY_NAME
from ._catalogue import named as named
from ._compare import Comparison as Comparison
from ._compare import compare as compare
from ._costs import Costs as Costs
from ._costs import Skip as Skip
from ._fit import fit as fit
from ._flush import eager_one_f_one_b as eager_one_f_one_b
from ._flush import forward_only as forward_only
from ._flush import gpipe as gpipe
from ._flush import gpipe_last_one_f_one_b as gpipe_last_one_f_one_b
from ._flush import one_f_one_b as one_f_one_b
from ._looped import interleaved as interleaved
from ._looped import interleaved_zb as interleaved_zb
from ._looped import looped_bfs as looped_bfs
from ._replicated import replicated as replicated
from ._schedule import Schedule as Schedule
from ._schedule import ScheduleBuilder as ScheduleBuilder
from ._simulate import ScheduleError as ScheduleError
from ._timeline import Exchange as Exchange
from ._timeline import MemoryEvent as MemoryEvent
from ._timeline import Timeline as Timeline
from ._zero_bubble import dualpipe_v as dualpipe_v
from ._zero_bubble import zb_h1 as zb_h1
from ._zero_bubble import zb_h2 as zb_h2
from ._zero_bubble import zb_v as zb_v
