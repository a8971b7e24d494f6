"""Trains one Transformer to translate a hundred languages into English, as GPipe did.

GPipe's second task (Huang et al. 2019, section 5) at the size of a desk: one model
T(L, H, A), given to `jpipe.pipeline` as it is, learns the messages of two packages in
102 languages. Rare languages are drawn more often, labels are smoothed, the learning
rate warms up. The model translates, token by token, through the forward pass of the
pipeline. It is tested on messages that it has not seen in any language.

    python examples/translation.py            # one model of all languages
    python examples/translation.py --tiny     # a tiny one of three languages
    python examples/translation.py --plans    # the paper's models: parameters and plans
    python examples/translation.py --table    # all of docs/translation.md

SIGTERM writes a checkpoint and ends with status 75. The same command goes on
there, to the losses of one run. Results, curves and tables lie in `build/translation`.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from messages import Corpus
from translation_report import plan_paper_models, write_report
from translation_runs import STAGES, Run, Trainer, build_job
from translator import Sizes

# L, H and A of models in the paper's ratios: a base, one twice as deep and twice as
# wide, and one four times as deep.
MODELS = {"small": (1, 128, 4), "wide": (2, 256, 8), "deep": (4, 128, 4)}
WIDTH = 64
HEAD_DIM = 16
TINY_MODEL = (2, 64, 2)
TINY_STEPS = 6
TINY_TOKENS = 192
TINY_CORPUS: dict[str, Any] = {
    "languages": ("da", "fy", "nb"),
    "source_subwords": 1000,
    "english_subwords": 500,
}
TOKENS = 768  # positions of targets in a batch
BATCH_TOKENS = (TOKENS // 4, TOKENS, 4 * TOKENS)
DEFAULT_STEPS = 3000
TABLE_STEPS = 4000
BILINGUAL_STEPS = 800
SEEDS = (0, 1)
# Languages that are tested, and the most and the fewest messages of one.
NUM_TESTED = 9
MOST_TESTED = 100
FEWEST_TESTED = 15


def train_tables(
    trainer: Trainer, models: dict[str, Sizes], *, trains: bool
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Trains all that the tables show, the quickest models first.

    Args:
      trainer: a trainer.
      models: the sizes of the multilingual models.
      trains: False for the results that there are; nothing is trained.

    Returns:
      ``tables[table][row]``, the results of a row of a table, one for each seed.
    """
    corpus = trainer.corpus
    tested = spread_languages(corpus)
    runs = {
        "bilingual": {
            language: Run(
                models["small"], BILINGUAL_STEPS, tokens=TOKENS, language=language
            )
            for language in tested
        },
        "batches": {
            str(tokens): Run(models["small"], TABLE_STEPS, tokens=tokens)
            for tokens in BATCH_TOKENS
        },
        "models": {
            name: Run(sizes, TABLE_STEPS, tokens=TOKENS)
            for name, sizes in models.items()
        },
    }
    tables = {table: {} for table in runs}
    for seed in SEEDS:
        for table, rows in runs.items():
            for row, run in rows.items():
                languages = [run.language] if run.language else tested
                test = corpus.test_messages(languages, MOST_TESTED)
                run = dataclasses.replace(run, seed=seed)
                if trains or trainer.has_result(run):
                    results = tables[table].setdefault(row, [])
                    results.append(trainer.result(run, test))
    return tables


def spread_languages(corpus: Corpus) -> list[str]:
    """Some languages from the one with the most messages to one with very few."""
    num_tested = np.bincount(corpus.parts["test"].languages)
    enough = np.flatnonzero(num_tested >= FEWEST_TESTED)
    enough = enough[np.argsort(-corpus.counts[enough], kind="stable")]
    places = np.unique(np.linspace(0, len(enough) - 1, NUM_TESTED).astype(int))
    return [corpus.languages[index] for index in enough[places]]


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--tiny", action="store_true", help="a tiny model of three languages, 6 steps")
    add("--table", action="store_true", help="train all models of the page's tables")
    add("--report", action="store_true", help="tables of what is trained so far")
    add("--plans", action="store_true", help="plan the paper's models; train none")
    add("--steps", type=int, help="optimizer steps of one model")
    add("--seed", type=int, default=0, help="of parameters, dropout and batches")
    add("--language", default="", help="train on this language only, such as de")
    add("--bfloat16", action="store_true", help="compute in bfloat16")
    add("--preempt-after", type=int, help="the step after which SIGTERM arrives")
    add("--folder", type=Path, default=Path("build/translation"), help="of results")
    return parser.parse_args()


def main() -> int:
    """Trains one model, or those of the tables; returns the exit status."""
    options = parse_options()
    if options.plans:
        print(plan_paper_models())
        return 0
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    corpus = Corpus(options.folder, **(TINY_CORPUS if options.tiny else {}))
    shapes = {"deep": TINY_MODEL} if options.tiny else MODELS
    models = {
        name: Sizes(
            *shape,
            width=WIDTH,
            head_dim=HEAD_DIM,
            source_words=corpus.source_words,
            english_words=corpus.english_words,
            ties_logits=True,
            dtype=jnp.bfloat16 if options.bfloat16 else jnp.float32,
        )
        for name, shape in shapes.items()
    }
    trainer = Trainer(corpus, options.folder, preempt_after=options.preempt_after)
    if options.table or options.report:
        tables = train_tables(trainer, models, trains=options.table)
        print(write_report(tables, options.folder))
        return 0

    run = Run(
        models["deep"],
        steps=options.steps or (TINY_STEPS if options.tiny else DEFAULT_STEPS),
        tokens=TINY_TOKENS if options.tiny else TOKENS,
        seed=options.seed,
        language=options.language,
    )
    tested = [run.language] if run.language else spread_languages(corpus)
    result = trainer.result(run, corpus.test_messages(tested, MOST_TESTED))
    print(build_job(run.sizes).pipe)
    for language, english, text in result["samples"]:
        print(f"{language}: {english}\n  {text}")
    scores = "loss {nll:.3f}, BLEU {bleu:.2f}, chrF {chrf:.2f}".format(**result)
    print(f"{run.name}, of messages that it has not seen: {scores}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
