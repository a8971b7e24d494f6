"""ResNet-101: speed and accuracy (torchgpipe)."""

import jax
import jax.numpy as jnp
import optax

from ..experiment import Experiment, Work, mean_cross_entropy
from ..models.resnet import resnet101
from .benchmark import Benchmark, read_rows

# The width of the first group, the blocks of each group, pixels, classes.
_SCALES = {
    "full": (64, (3, 4, 23, 3), 224, 1000),
    "small": (8, (3, 4, 23, 3), 64, 100),
    "tiny": (4, (1, 1, 1, 1), 32, 10),
}


def work(experiment: Experiment, scale: str) -> Work:
    """Images to classify."""
    width, blocks, pixels, classes = _SCALES[scale]
    return Work(
        layers=resnet101(classes, width=width, blocks=blocks, **experiment.options),
        x=jax.ShapeDtypeStruct((pixels, pixels, 3), jnp.float32),
        targets=jax.ShapeDtypeStruct((), jnp.int32),
        loss=mean_cross_entropy,
        tx=optax.sgd(0.1),
        classes=classes,
    )


_ACCURACY = "row | balance | batch | M | error, % | spread of the error, % | samples/s"

SPEED = Benchmark(
    "resnet101-speed",
    "ResNet-101, images of 224 x 224, SGD: throughput and speed-up",
    "speed",
    read_rows(
        "row | balance | batch | M | remat | samples/s | speed-up of GPipe",
        """
        baseline    370                        118     1  none          95.862  1.0
        pipeline-1  370                        220     2  except_last   81.796  0.800
        pipeline-2  135,235                  25000  1667  except_last  135.539  1.418
        pipeline-4  44,92,124,110             5632   256  except_last  265.958  2.182
        pipeline-8  26,22,33,44,44,66,66,69   5400   150  except_last  411.662  2.891
        """,
    ),
    work,
    "Batch sizes differ from row to row, each tuned to fill a Tesla P40, so these "
    "speed-ups are not at equal batch.",
    tiny=("baseline", "pipeline-2"),
)


ACCURACY = Benchmark(
    "resnet101-accuracy",
    "ResNet-101 on ImageNet, 90 epochs: top-1 test error whatever the pipeline",
    "accuracy",
    # How they are cut is said where they are trained.
    read_rows(
        _ACCURACY,
        """
        reference-256     370   256  1  22.08  0.06  -
        reference-8k      370  8192  1  22.36  0.09  -
        dataparallel-256  370   256  1  22.02  0.11  180.344
        dataparallel-1k   370  1024  1  22.04  0.24  606.916
        dataparallel-4k   370  4096  1  -      -     -
        """,
        ours=False,
    )
    + read_rows(
        _ACCURACY,
        """
        pipeline-256  370   256   4  21.99  0.13  117.432
        pipeline-1k   370  1024  64  22.24  0.19  294.739
        pipeline-4k   370  4096  64  22.13  0.09  378.746
        """,
    ),
    note="The references are Goyal et al. (2017, arXiv:1706.02677) on 8 and 256 "
    "devices; dataparallel-1k ran on four, and dataparallel-4k did not fit.",
)
