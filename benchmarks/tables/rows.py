"""Which rows of a table are run."""

from ..published import Benchmark


def row_names(benchmark: Benchmark, scale: str, measured: bool = False) -> list[str]:
    """The experiments that a table has at a scale.

    Args:
      benchmark: the table.
      scale: one of `SCALES`.
      measured: whether those that are only measured are among them.
    """
    if benchmark.kind == "accuracy":
        from .. import accuracy  # which needs what the others do not

        return accuracy.EXPERIMENTS[scale]
    return [
        row.name
        for row in benchmark.rows
        if row.ours and (measured or not row.only_measured)
    ]


def default_rows(benchmark: Benchmark, scale: str, measured: bool = False) -> list[str]:
    """Those that are run if none are named; see `row_names`."""
    few = scale == "tiny" and benchmark.tiny
    return list(benchmark.tiny) if few else row_names(benchmark, scale, measured)
