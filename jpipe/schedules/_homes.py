"""Which rank runs what, where several ranks take turns at a stage."""

from collections.abc import Sequence

from ._action import Action


class Homes:
    """The rank of each stage and micro-batch.

    Args:
      placement: the rank of each stage.
      rows: the actions of each rank.
      replicas: the ranks of each stage, where some have several; else empty. Which of
        them runs a micro-batch is what the rows say.
    """

    def __init__(
        self,
        placement: Sequence[int],
        rows: Sequence[Sequence[Action]] = (),
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        self._placement, self._replicas = placement, replicas
        self.num_stages = len(placement)
        self._rank: dict[tuple[int, int], int] = {}
        if replicas:
            cells = ((a, rank) for rank, row in enumerate(rows) for a in row)
            self._rank = {(a.stage, a.microbatch): rank for a, rank in cells}

    def __call__(self, stage: int, microbatch: int) -> int:
        """The rank that runs a stage on a micro-batch."""
        if not self._replicas:
            return self._placement[stage]
        return self._rank[stage, microbatch]

    def ranks(self, stage: int) -> Sequence[int]:
        """All ranks that run a stage."""
        return self._replicas[stage] if self._replicas else (self._placement[stage],)
