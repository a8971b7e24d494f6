"""Peers, one run, same work: jpipe beside other libraries of pipelines.

Run it with ``python -m benchmarks.peers`` (about ten minutes on two cores). The same
two models start from the same weights and see the same batch in each framework; two
stages run on two cores; every side is compared with the plain training step of its
own framework on one core. `torchgpipe`, `torch.distributed.pipelining` and SpectraX
are optional: what is not installed is left out, with a message that says what to type.
"""
