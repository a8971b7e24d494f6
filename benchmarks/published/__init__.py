"""The published tables as data: every row, its settings and its figures.

Figures are those of the benchmark pages of torchgpipe 0.0.7 (Kim et al., 2020,
arXiv:2004.09910: eight Tesla P40) and of GPipe (Huang et al., 2019, arXiv:1811.06965).
"""

from . import amoebanetd, gpipe, resnet101, unet
from .benchmark import Benchmark

BY_NAME: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        resnet101.SPEED,
        resnet101.ACCURACY,
        amoebanetd.SPEED,
        amoebanetd.MEMORY,
        unet.SPEED,
        unet.TIMELINE,
        unet.MEMORY,
        gpipe.LARGEST,
        gpipe.THROUGHPUT,
        gpipe.SLOW_INTERCONNECT,
    )
}

__all__ = ["BY_NAME", "Benchmark"]
