"""One cell of a pipeline schedule: an operation of a stage on a micro-batch."""

import re
import reprlib
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
# The two halves of a backward: the gradient of the stage's input, which the stage
# before waits for, and that of its weights, which nobody waits for.
INPUT = "I"
WEIGHT = "W"
OPS = (FORWARD, BACKWARD, INPUT, WEIGHT)
# A backward, or a half of it -> the op of the same stage and micro-batch that it reads.
LOCAL_READS = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}

# Each stage and micro-batch has a cell or more, so no schedule that fits into memory
# needs more digits; and `int` refuses texts of thousands of digits.
_NUMBER = "([0-9]{1,6})"
_PATTERN = re.compile(f"{_NUMBER}([{''.join(OPS)}]){_NUMBER}")


class Action(NamedTuple):
    """The operation ``op`` of ``stage`` on ``microbatch``.

    Prints as the literature writes it: ``2F0`` is the forward of stage 2 on
    micro-batch 0, ``2B0`` its backward. A backward may be split in two: ``2I0``
    computes the gradient of the stage's input, ``2W0`` that of its weights. Stages and
    micro-batches count from 0.

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
        """Parses the text of an action, as `str` writes it.

        Args:
          text: a stage, an op and a micro-batch without blanks, such as ``"2F0"``.

        Returns:
          The action.

        Raises:
          ValueError: if the text is anything else.
        """
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"{reprlib.repr(text)} is not an action: write stage, op "
                f"({', '.join(OPS)}) and micro-batch without blanks, such as '2F0'"
            )
        stage, op, microbatch = match.groups()
        return cls(op, int(stage), int(microbatch))
