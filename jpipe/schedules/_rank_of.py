"""Which rank runs what, where several ranks take turns at a stage."""

from collections.abc import Sequence

from ._action import Action


class RankOf:
    """The placement of each micro-batch: the rank of each stage, by stages.

    Args:
      placement: the rank of each stage.
      rows: the actions of each rank.
      replicas: the ranks of each stage, where some have several; else empty. Which of
        them runs a micro-batch follows from the rows.

    Example:
      >>> rows = [[Action.parse(cell)] for cell in ("0F0", "0F1", "1F0", "1F1")]
      >>> rank_of = RankOf((0, 2), rows, ((0, 1), (2, 3)))
      >>> rank_of[1]
      [1, 3]
    """

    def __init__(
        self,
        placement: Sequence[int],
        rows: Sequence[Sequence[Action]] = (),
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        self._placement, self._replicas = placement, replicas
        self.num_stages = len(placement)
        self._each: dict[int, list[int]] = {}
        for rank, row in enumerate(rows if replicas else ()):
            for _, stage, microbatch in row:
                ranks = self._each.setdefault(microbatch, list(placement))
                ranks[stage] = rank

    def __getitem__(self, microbatch: int) -> Sequence[int]:
        """The rank of each stage for a micro-batch."""
        return self._each.get(microbatch, self._placement)

    @property
    def are_fixed(self) -> bool:
        """Whether each stage has one rank."""
        return not self._replicas

    def ranks(self, stage: int) -> Sequence[int]:
        """All ranks that run a stage."""
        return self._replicas[stage] if self._replicas else (self._placement[stage],)


def stages_of(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each rank."""
    found: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        found[rank].append(stage)
    return found
