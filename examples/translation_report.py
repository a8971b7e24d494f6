"""The tables and pictures of `translation.py`, in the form of GPipe's.

* Quality against depth and width, as in section 5 of Huang et al. (2019).
* Languages by their training messages, against a bilingual model: their Figure 3.
* Loss and BLEU against the size of a batch: their Table 5.
* The paper's models: parameters and plans, by shapes only.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from messages import PAD, show_versions
from translator import PAPER, Translator, count_parameters

import jpipe

mpl.use("agg")
import matplotlib.pyplot as plt

# A device of the plans, as roughly a TPUv3: operations and bytes per second.
DEVICE: dict[str, Any] = {"peak_flops": 1e14, "memory_bandwidth": 1e12}
MEMORY = 16 * 2**30
BANDWIDTH = 7e10
PLAN_BATCH = 128  # pairs
PLAN_LENGTH = 64  # tokens
# Model -> the number of devices.
PLAN_DEVICES = {"400M": 2, "1.3B deep": 4, "1.3B wide": 4, "6B": 16}

Tables = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def write_report(tables: Tables, folder: Path) -> str:
    """Writes JSON, Markdown and pictures.

    Args:
      tables: ``tables[table][row]``, the results of each seed.
      folder: a folder for the files.

    Returns:
      The Markdown.
    """
    (folder / "tables.json").write_text(json.dumps(tables, ensure_ascii=False), "utf-8")
    text = "\n\n".join(
        [
            _format_models(tables),
            _format_languages(tables),
            _format_batches(tables["batches"]),
            f"{show_versions()}, jax {jax.__version__}, flax {flax.__version__}",
        ]
    )
    (folder / "tables.md").write_text(text + "\n", "utf-8")
    _draw_differences(tables, folder / "languages.png")
    curves = {
        f"{name}, seed {result['seed']}": result["losses"]
        for name, results in tables["models"].items()
        for result in results[:1]
    }
    draw_losses(curves, folder / "losses.png")
    return text


def _show_spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean of some seeds and their standard deviation, if there are several."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text."""
    rule = [":--", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _format_models(tables: Tables) -> str:
    """Quality against depth and width; languages in thirds by training messages."""
    head = ["model", "seeds", "parameters", "loss", "BLEU", "chrF"]
    head += ["chrF, most messages", "chrF, fewer", "chrF, fewest"]
    rows = []
    for name, results in tables["models"].items():
        rows.append(
            [
                f"{name}, {results[0]['model']}",
                str(len(results)),
                f"{results[0]['parameters']:,}",
                _show_spread([result["nll"] for result in results], 3),
                _show_spread([result["bleu"] for result in results]),
                _show_spread([result["chrf"] for result in results]),
            ]
        )
        scores = np.array([_list_scores(tables, result, "chrf") for result in results])
        for part in np.array_split(scores, 3, axis=1):
            rows[-1].append(_show_spread(part.mean(axis=1)))
    return _format_table(head, rows)


def _list_scores(tables: Tables, result: Mapping[str, Any], metric: str) -> list[float]:
    """The scores of the languages of a result, that with the most messages first."""
    return [result["languages"][name][metric] for name in tables["bilingual"]]


def _subtract_bilingual(tables: Tables, metric: str) -> dict[str, np.ndarray]:
    """Scores of the multilingual models less the mean of the bilingual ones.

    Returns:
      For each model ``[seeds, languages]``.
    """
    bilingual = [
        np.mean([result[metric] for result in results])
        for results in tables["bilingual"].values()
    ]
    return {
        name: np.array([_list_scores(tables, result, metric) for result in results])
        - np.array(bilingual)
        for name, results in tables["models"].items()
    }


def _format_languages(tables: Tables) -> str:
    """A row for each language that has a bilingual model."""
    head = ["language", "training messages", "tested"]
    head += ["bilingual BLEU", "chrF"]
    differences = {m: _subtract_bilingual(tables, m) for m in ("bleu", "chrf")}
    for name in tables["models"]:
        head += [f"{name} BLEU", "chrF"]
    rows = []
    for index, (language, results) in enumerate(tables["bilingual"].items()):
        counts = results[0]["languages"][language]
        row = [language, f"{counts['training']:,}", str(counts["test"])]
        for metric in ("bleu", "chrf"):
            row.append(f"{np.mean([result[metric] for result in results]):.1f}")
        for name in tables["models"]:
            for metric in ("bleu", "chrf"):
                row.append(f"{differences[metric][name][:, index].mean():+.1f}")
        rows.append(row)
    return _format_table(head, rows)


def _format_batches(batches: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Loss and BLEU against the size of a batch."""
    head = ["tokens in a batch", "steps", "seeds", "loss", "BLEU", "chrF"]
    rows = [
        [
            f"{int(tokens):,}",
            str(results[0]["steps"]),
            str(len(results)),
            _show_spread([result["nll"] for result in results], 3),
            _show_spread([result["bleu"] for result in results]),
            _show_spread([result["chrf"] for result in results]),
        ]
        for tokens, results in batches.items()
    ]
    return _format_table(head, rows)


def _draw_differences(tables: Tables, path: Path) -> None:
    """Draws the paper's Figure 3: each language against its bilingual model."""
    languages = list(tables["bilingual"])
    figure, panels = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True)
    for metric, label, axes in zip(
        ("bleu", "chrf"), ("BLEU", "chrF"), panels, strict=True
    ):
        for name, values in _subtract_bilingual(tables, metric).items():
            model = tables["models"][name][0]["model"]
            (line,) = axes.plot(values.mean(axis=0), marker="o", label=model)
            axes.fill_between(
                range(len(languages)),
                values.min(axis=0),
                values.max(axis=0),
                color=line.get_color(),
                alpha=0.15,
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel(f"{label} less bilingual {label}")
        axes.grid(alpha=0.3)
    counts = [
        results[0]["languages"][language]["training"]
        for language, results in tables["bilingual"].items()
    ]
    ticks = [f"{name}\n{n}" for name, n in zip(languages, counts, strict=True)]
    panels[-1].set_xticks(range(len(languages)), ticks, fontsize=8)
    panels[-1].set_xlabel("language and its training messages")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_losses(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws training losses, each the mean of a hundredth of the steps."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, losses in curves.items():
        parts = np.array_split(np.asarray(losses), min(len(losses), 100))
        ends = np.cumsum([len(part) for part in parts])
        axes.plot(ends, [part.mean() for part in parts], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("smoothed loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


# ------------------------------------------------------------------------------- plans


def _loss(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of losses over the tokens that are no padding, and their number."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    mask = targets != PAD
    return (losses * mask).sum(), mask.sum()


def plan_paper_models(names: Sequence[str] = tuple(PAPER)) -> str:
    """Plans the paper's models by shapes: no parameter is made, nothing is run.

    Args:
      names: names of models in `PAPER`.

    Returns:
      A table of parameters, and the plans.
    """
    head = ["paper", "model", "parameters", "devices", "stages"]
    head += ["fullest device", "predicted step"]
    rows = []
    plans = []
    tokens = jax.ShapeDtypeStruct((PLAN_BATCH, PLAN_LENGTH), jnp.int32)
    for name in names:
        sizes = PAPER[name]
        plan = jpipe.plan(
            Translator(sizes),
            jpipe.inputs(tokens, tokens),
            optax.adam(1e-3),
            loss_fn=_loss,
            targets=tokens,
            reduction="weighted",
            num_devices=PLAN_DEVICES[name],
            memory_limit=MEMORY,
            bandwidth=BANDWIDTH,
            num_microbatches=4 * PLAN_DEVICES[name],
            data=1,
            measure=False,
            **DEVICE,
        )
        forecast = plan.forecast
        assert forecast is not None  # since it was planned
        rows.append(
            [
                name,
                str(sizes),
                f"{count_parameters(sizes):,}",
                str(PLAN_DEVICES[name]),
                str(len(plan.stages)),
                f"{max(memory.total for memory in forecast.memory) / 2**30:.1f} GiB",
                f"{forecast.seconds * 1000:.0f} ms",
            ]
        )
        plans.append(f"{sizes}\n{plan}")
    return "\n\n".join([_format_table(head, rows), *plans])
