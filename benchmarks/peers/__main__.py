"""``python -m benchmarks.peers``."""

from .command import main

if __name__ == "__main__":
    main()
