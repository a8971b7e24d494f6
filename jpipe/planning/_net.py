"""What stages with several devices take, by where they begin and end."""

from typing import Any, NamedTuple

import numpy as np

from ._chain import Matrix, between
from ._profile import Profile


class ReplicatedStage(NamedTuple):
    """Layers ``start`` to ``end - 1``, on as many devices as there are ``replicas``."""

    start: int
    end: int
    replicas: int


def ring(num_bytes: Any, replicas: int, bandwidth: float, latency: float = 0.0) -> Any:
    """The time in which a ring of devices adds up gradients of so many bytes."""
    hops = 2 * (replicas - 1)
    return hops * num_bytes / (bandwidth * replicas) + hops * latency


class Net:
    """Times of stages and bytes of cuts, by layers.

    Attributes:
      times: of each stage on one device; infinite where it has no layer.
      params: their bytes.
      there: bytes that cross a cut before each layer; skip connections do too.
      back: those of their gradients.
      sent: both.
      bandwidth: bytes per second.
    """

    def __init__(self, profile: Profile, bandwidth: float, transfers: bool) -> None:
        layers = profile.layers
        self.times = between(np.array([x.forward + x.backward for x in layers]))
        self.params = between(np.array([float(x.param_bytes) for x in layers]), 0.0)
        self.bandwidth = bandwidth
        self.there, self.back = np.zeros((2, len(layers) + 1))
        self.total = float(self.times[0, -1])
        for cut in range(1, len(layers) if transfers else 0):
            behind = layers[cut - 1]
            crossing = {
                (skip.source, skip.name): (skip.bytes, skip.cotangent_bytes)
                for skip in profile.skips
                if skip.source < cut <= skip.target
                and not (skip.is_output and skip.source == cut - 1)
            }
            self.there[cut] = behind.output_bytes + sum(a for a, _ in crossing.values())
            self.back[cut] = behind.cotangent_bytes
            self.back[cut] += sum(b for _, b in crossing.values())
        self.sent = self.there + self.back

    @property
    def size(self) -> int:
        """The number of layers, and one."""
        return len(self.sent)

    def turns(self, replicas: int) -> Matrix:
        """The time per micro-batch of stages whose replicas take turns."""
        return (self.times + 2 * self.exchange(replicas)) / replicas

    def exchange(self, replicas: int) -> Matrix:
        """The time in which a ring of replicas adds up the gradients of a stage."""
        return ring(self.params, replicas, self.bandwidth)
