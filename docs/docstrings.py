"""The docstrings of the library as mkdocstrings reads them: an extension of griffe.

Griffe knows the section ``Examples`` and Markdown. The library writes ``Example``,
and links in the manner of reStructuredText. A default that has a name inside of the
library is shown as its value.
"""

import re
from typing import Any

import griffe

from jpipe._partition._options import REMAT, SCHEDULE
from jpipe.planning._mode_names import TRIED_MODES

DEFAULTS = {"SCHEDULE": SCHEDULE, "REMAT": REMAT, "TRIED_MODES": TRIED_MODES}
LINK = re.compile(r"`([^`<]+?)\s+<([^>]+)>`_")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when its object is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute.

        Args:
          obj: the object that was read.
          **kwargs: how it was read.
        """
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                name = str(parameter.default)
                if name in DEFAULTS:
                    parameter.default = repr(DEFAULTS[name])
        if obj.docstring is None:
            return
        text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
        obj.docstring.value = LINK.sub(_write_link, text)


def _write_link(match: re.Match[str]) -> str:
    title, address = match.groups()
    return f"[{' '.join(title.split())}]({address})"
