"""The plans of ten models on two devices, against all other ways, in Markdown.

Run it with ``python -m benchmarks.planning``, or with names of models. It needs a
machine with two cores and nothing else to do.
"""

import argparse
import os
import statistics
import sys

_FLAG = "--xla_cpu_multi_thread_eigen=false"


def main() -> None:
    """Measures what was named, and prints a table."""
    if _FLAG not in os.environ.get("XLA_FLAGS", ""):
        # A device of its own for each stage: products would use the others' cores.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    from rich.progress import Progress

    from .models import MODELS
    from .sweep import Result, Way, sweep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    names = parser.parse_args().models or list(MODELS)
    results: dict[str, Result] = {}

    def shown(way: Way) -> str:
        return f"{list(way.balance)}, {way.schedule}"

    print("| model | plan | fastest | by the fastest | equal | predicted by measured |")
    print("| --- | --- | --- | --: | --: | --: |")
    with Progress() as progress:
        for name in names:
            result = results[name] = sweep(name, *MODELS[name](), progress)
            progress.console.print(
                f"| {name} | {shown(result.plan)} | {shown(result.best)} of "
                f"{result.ways} | {result.ratio:.3f} | {result.even:.3f} | "
                f"{result.predicted / result.measured:.2f} |",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
    ratios = [result.ratio for result in results.values()]
    print(f"median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
