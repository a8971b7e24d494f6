"""All faults of a kind, listed in one error."""

from collections.abc import Iterable

# So many are listed.
_MOST = 20


def refuse(
    title: str,
    faults: Iterable[str],
    kind: type[Exception] = ValueError,
    advice: str = "",
) -> None:
    """Raises an error with every fault, one a line; nothing if there is none.

    Args:
      title: what is wrong with all of them.
      faults: one sentence for each.
      kind: of the error.
      advice: what follows the faults, with its line break.
    """
    each = list(dict.fromkeys(faults))
    if not each:
        return
    more = len(each) - _MOST
    each = [*each[:_MOST], *([f"and {more} more"] if more > 0 else [])]
    lines = "".join(f"\n  * {fault}" for fault in each)
    raise kind(f"{title}:{lines}{advice}")
