"""``python -m benchmarks.overhead``."""

from .command import main

if __name__ == "__main__":
    main()
