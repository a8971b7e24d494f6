"""The plan of a pipeline, from what is known of it so far."""

from ._functions import _remat
from ._functions._weights import is_params
from ._layers._skip import label
from ._library import Library
from ._plan import Plan, StagePlan
from ._run._memory import nbytes
from ._run._pipe import Pipe


def describe(pipe: Pipe, library: Library) -> Plan:
    """Says who runs what, and more the more is known.

    Args:
      pipe: what is fixed for all batches.
      library: what was compiled: parameters are known once variables were seen, bytes
        once there is a program with a loss.

    Returns:
      The plan.
    """
    step, placement = library.predicted(), pipe.schedule.placement
    ranks: dict[str, set[int]] = {}  # of each device: users may repeat one
    for device, rank in zip(pipe.devices, placement, strict=True):
        ranks.setdefault(str(device), set()).add(rank)
    peaks = (
        (name, int(step.peak_of(own)) if step else 0) for name, own in ranks.items()
    )
    return Plan(
        tuple(
            _stage(pipe, library, s, int(step.peak_kept(s)) if step else None)
            for s in range(len(pipe.stages))
        ),
        pipe.schedule,
        tuple(peaks) if step else (),
        tuple((label(r.key), r.source, r.target) for r in library.routes),
    )


def _stage(pipe: Pipe, library: Library, s: int, held_bytes: int | None) -> StagePlan:
    stage, training = pipe.stages[s], library.training
    layout = training.layout if training else library.layout
    params = trained = None
    if layout is not None:
        own = layout.weights[s]
        pairs = zip(own.specs, own.trainable, strict=True)
        leaves = zip(layout.order[s], own.paths, pairs, strict=True)
        # By leaf: what is tied within the stage is counted once.
        found = {leaf: pair for leaf, path, pair in leaves if is_params(path)}.values()
        params = [spec for spec, _ in found]
        if training:
            trained = sum(spec.size for spec, yes in found if yes)
    return StagePlan(
        index=s,
        rank=pipe.schedule.placement[s],
        device=str(pipe.devices[s]),
        layers=tuple(layer.name for layer in stage.layers),
        remat=_remat.name(pipe.remat[s]),
        num_params=None if params is None else sum(spec.size for spec in params),
        param_bytes=None if params is None else sum(map(nbytes, params)),
        held_bytes=held_bytes,
        num_trained=trained,
    )
