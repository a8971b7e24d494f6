"""Arrays and texts in a few letters, which processes compare."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._elsewhere import is_elsewhere, own_copy
from ._keys import as_numbers

# An array of more numbers is compared by a digest.
_FEW = 8


def fingerprint(array: Any) -> str:
    """The dtype, shape and values of an array; of one of another process no values."""
    if is_elsewhere(array):
        return f"{array.dtype}{list(array.shape)}"
    values = np.asarray(as_numbers(own_copy(array)))
    found = f"{values.dtype}{list(values.shape)} "
    if values.size <= _FEW:
        return found + str(values.tolist())
    return found + hashlib.sha256(values.tobytes()).hexdigest()[:12]


def digest(lines: Iterable[str]) -> str:
    """Lines of text in a few letters."""
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
    return found.hexdigest()[:12]
