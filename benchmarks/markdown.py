"""Tables in Markdown, as all commands print them."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table, a line for each row.

    Args:
      head: the titles of the columns.
      rows: the cells of each row.
      left: the number of columns that hold words; the others hold figures and are
        aligned to the right.

    Example:
      >>> print(table(["side", "ms"], [["jpipe", "1.5"]]))
      | side | ms |
      | --- | --: |
      | jpipe | 1.5 |
    """
    rules = ["---"] * left + ["--:"] * (len(head) - left)
    lines = [head, rules, *rows]
    return "\n".join(line(cells) for cells in lines)


def line(cells: Sequence[str]) -> str:
    """One row of a table, for tables that are printed row by row."""
    return f"| {' | '.join(cells)} |"
