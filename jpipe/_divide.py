"""Where one function or model is divided, of what its user typed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from . import _setup
from ._instructions._sharding import SubMesh
from ._processes._start import check_threads
from ._run import _param_sharding
from ._slices._cuts import Cuts
from ._slices._division import Division


def divide(
    num_microbatches: int,
    num_stages: int | None,
    devices: Any,
    *,
    schedule: Any,
    remat: Any,
    replicas: Sequence[int] | None,
    rule: _param_sharding.Rule | None,
    gather: str,
    is_lasting: bool = False,
    cuts: Cuts | None = None,
) -> Division:
    """A division, checked.

    Args:
      num_microbatches: how many there are.
      num_stages: how many stages, if that is given.
      devices: as `_setup.check_mesh` gives them.
      schedule: as for `jpipe.pipeline`, and so on.
      remat: likewise.
      replicas: likewise.
      rule: its ``sharding``.
      gather: likewise.
      is_lasting: see `Division`.
      cuts: of a plan.

    Raises:
      ValueError: if a number does not fit.
    """
    if cuts is not None:
        num_stages = len(cuts.positions) + 1
    if num_stages is not None and num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: needs at least 1")
    if replicas is not None and num_stages not in (None, len(replicas)):
        raise ValueError(
            f"replicas={list(replicas)} is for {len(replicas)} stages, the pipeline "
            f"has {num_stages}"
        )
    ranks = _setup.ranks(devices)
    if not ranks:
        raise ValueError("devices=[]: needs at least one")
    if any(isinstance(rank, SubMesh) for rank in ranks):
        check_threads()
    return Division(
        num_microbatches,
        num_stages,
        ranks,
        partial(_setup.choose_devices, devices),
        schedule,
        remat,
        replicas,
        rule,
        gather,
        is_lasting,
        cuts,
    )
