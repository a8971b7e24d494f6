"""One cell of a pipeline schedule: an operation of a stage on a micro-batch."""

import re
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
OPS = (FORWARD, BACKWARD)

_PATTERN = re.compile(rf"(\d+)([{''.join(OPS)}])(\d+)")


class Action(NamedTuple):
    """What a rank does next: ``op`` of ``stage`` on ``microbatch``.

    Prints as the literature writes it: ``2F0`` is the forward of stage 2 on
    micro-batch 0, ``2B0`` its backward. Stages and micro-batches count from 0.

    Example:
      >>> Action("F", 2, 0)
      2F0
      >>> Action.parse("1B3").microbatch
      3
    """

    op: str
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    __str__ = __repr__

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads what `str` wrote.

        Args:
          text: a stage, an op and a micro-batch without blanks, such as ``"2F0"``.

        Returns:
          The action.

        Raises:
          ValueError: if the text is anything else.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no action: write stage, op ({', '.join(OPS)}) and "
                f"micro-batch without blanks, such as '2F0'"
            )
        stage, op, microbatch = match.groups()
        return cls(op, int(stage), int(microbatch))

    def needs(self, num_stages: int) -> "tuple[Action, ...]":
        """The actions whose results this one reads: the whole meaning of a schedule.

        A forward reads the output of the stage before. A backward reads what its
        own forward kept and, except on the last stage where the loss is, the
        cotangent that the stage after it computed.

        Args:
          num_stages: the number of stages of the pipeline.

        Returns:
          At most two actions.
        """
        if self.op == FORWARD:
            return (self._replace(stage=self.stage - 1),) if self.stage else ()
        own = self._replace(op=FORWARD)
        if self.stage == num_stages - 1:
            return (own,)
        return (own, self._replace(stage=self.stage + 1))
