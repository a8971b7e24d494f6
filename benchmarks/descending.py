"""The bytes of AmoebaNet-D (18, 416) under GPipe, by the order of its backwards.

torchgpipe runs the last backward first, so that what `"except_last"` stores of the last
micro-batch waits for nobody. Programs are compiled at full size, and nothing runs.

    python -m benchmarks.descending
"""

import functools

import jax

from jpipe.schedules import gpipe

from .cells.compiled import Way, peak
from .published import BY_NAME

GIB = 2**30


def main() -> None:
    """Prints the activations of the row with one stage, in both orders."""
    jax.config.update("jax_num_cpu_devices", 8)
    benchmark = BY_NAME["amoebanetd-memory"]
    (row,) = (row for row in benchmark.rows if row.name == "pipeline-1")
    setting = benchmark.setting(row, "full")
    for order in ("ascending", "descending"):
        schedule = functools.partial(gpipe, descending=order == "descending")
        step = peak(setting, Way(schedule, "except_last"))
        print(f"{order}: activations {step.activations / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
