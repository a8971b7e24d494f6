"""What jpipe costs beside the arithmetic: run `python -m benchmarks.overhead`."""
