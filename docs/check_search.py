"""Searches the built site for what people type, and fails where a page is not found.

    python docs/check_search.py [build/site]

A section of a page is found, as in the site's own search, if each word of the query
begins a word of it; words end where `separator` of mkdocs.yml says.
"""

import json
import re
import sys
from pathlib import Path

# What people type -> the page that they look for.
QUERIES = {
    "global_norm": "custom_loop",
    "tree.norm": "logging",
    "skip_nonfinite": "training",
    "gradient accumulation": "recipes",
    "MultiSteps": "recipes",
    "learning rate schedule": "recipes",
    "inject_hyperparams": "recipes",
    "early stopping": "recipes",
    "wandb": "recipes",
    "tensorboard": "recipes",
    "incremental_update": "training",
    "evaluate": "training",
    "init_train_state": "reference/pipeline_class",
    "num_cpu_devices": "install",
    "perfetto": "profiling",
    "equinox": "libraries",
    "haiku": "libraries",
    "keras": "libraries",
    "preemption": "slurm",
    "bubble": "schedules",
    "zero bubble": "schedules",
    "fsdp": "many_devices",
    "tied weights": "models",
    "batch norm": "batch_norm_and_state",
    "out of memory": "memory",
    "slurm": "slurm",
}


def find_pages(index: dict[str, object], query: str) -> set[str]:
    """The pages that a query finds, by their paths in the site."""
    separator = re.compile(index["config"]["separator"])  # pyright: ignore
    words = [word for word in separator.split(query.lower()) if word]
    pages = set[str]()
    for section in index["docs"]:  # pyright: ignore
        text = re.sub(r"<[^>]*>", " ", f"{section['title']} {section['text']}")
        there = {word.lower() for word in separator.split(text) if word}
        if all(any(other.startswith(word) for other in there) for word in words):
            pages.add(section["location"].split("#")[0].strip("/"))
    return pages


def main(site: Path) -> int:
    """Prints the queries that miss their page; returns their number."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    missed = 0
    for query, page in QUERIES.items():
        pages = find_pages(index, query)
        if page not in pages:
            missed += 1
            print(f"the search for {query!r} misses {page}; it finds {sorted(pages)}")
    return missed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else "build/site")))
