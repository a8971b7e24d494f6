"""From runs to rows, to whether the work was the same, and to text."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from .. import markdown
from .launch import SIDES, Run

TOLERANCE = 1e-4
MIB = 2**20

# Results of a run, one per round.
Rounds = dict[Run, list[dict[str, Any]]]

NOTES = """\
- *Speed-up* is by the row "no pipeline" above, of the same framework, in the same
  round: the plain training step in one process on one core, whose gradients add up over
  as many micro-batches of the same size. Medians over rounds of fresh processes.
- *Of the ideal*: by 2M / (M + 1), which two equal stages reach with GPipe and 1F1B if
  nothing but their arithmetic takes time.
- *Cores busy* is the processor time of all threads and processes by the time of a step,
  *processor ms* that time itself, which other work beside it hardly changes.
- *Peak* is the sum over processes of the most that each had resident while it trained,
  interpreter and libraries included; a page that two processes share counts twice.
  *Above start* is the same less what was resident before there was a model: when all
  was imported, and the framework had taken a step on one number. *Between steps* is
  what is resident then above start, once what nobody uses is given back: weights,
  compiled programs and what compiling has left behind. *A step* is what comes to it.
- jpipe's stages are two CPU devices of one process, with one thread each for
  arithmetic; Python drives both. torch.distributed.pipelining, and jpipe in two
  processes, have a process and a core per stage.
- 1F1B waits for two transfers in each turn of a stage; `eager_1f1b` forwards one
  micro-batch more before the first backward, and hides them.
- remat "default" is each library as it comes: jpipe keeps the fewest bytes, PyTorch
  all that autograd reads, torchgpipe the inputs of all micro-batches but the last.
  "compiled" is the same with the stages of PyTorch under `torch.compile`.
- SpectraX computes the forward of a stage again in its backward, whatever is asked: it
  stands beside remat "full", and "default" as it comes. Its function is the one that
  "no pipeline" differentiates, with a mark between the halves; the update is a program
  for each stage. What it prints of its first steps is off.
- torchgpipe was made for GPUs. PyTorch has one CPU device: torchgpipe runs the forwards
  of both stages in one worker thread, and autograd runs all backwards on CPU in the
  thread that called it. Its stages cannot overlap here."""


def ideal(microbatches: int) -> float:
    """The speed-up of two equal stages over one, if nothing else takes time."""
    return 2 * microbatches / (microbatches + 1)


def rows(rounds: Rounds) -> list[dict[str, Any]]:
    """A row for each run, baselines before what is compared with them."""
    return [_row(run, rounds) for run in rounds]


# Figures of a run: each is the median over its rounds.
_FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "cores_busy": lambda result: result["busy_seconds"] / sum(result["seconds"]),
    "processor_ms": lambda result: (
        1000 * result["busy_seconds"] / len(result["seconds"])
    ),
    "peak_mib": lambda result: result["peak_bytes"] / MIB,
    "above_start_mib": lambda result: (
        (result["peak_bytes"] - result["start_bytes"]) / MIB
    ),
    "between_mib": lambda result: (result["idle_bytes"] - result["start_bytes"]) / MIB,
    "step_mib": lambda result: (result["peak_bytes"] - result["idle_bytes"]) / MIB,
}


def _row(run: Run, rounds: Rounds) -> dict[str, Any]:
    results = rounds[run]
    case = run.case
    is_baseline = case.schedule == "baseline"
    seconds = _median_seconds(results)
    row: dict[str, Any] = {
        "title": run.title,
        "case": asdict(case),
        "stages": "1 process" if is_baseline else SIDES[run.side].stages,
        "samples_per_s": case.size.batch / statistics.median(seconds),
        "samples_per_s_least": case.size.batch / max(seconds),
        "samples_per_s_most": case.size.batch / min(seconds),
    }
    for name, figure in _FIGURES.items():
        row[name] = statistics.median(map(figure, results))
    threads = {"forward_threads", "backward_threads"} & results[0].keys()
    row |= {name: results[0][name] for name in threads}
    if is_baseline:
        return row
    plain = _median_seconds(rounds[run.baseline])
    ratios = [before / now for before, now in zip(plain, seconds, strict=True)]
    return row | {
        "speed_up": statistics.median(ratios),
        "speed_up_least": min(ratios),
        "speed_up_most": max(ratios),
        "of_ideal": statistics.median(ratios) / ideal(case.microbatches),
    }


def _median_seconds(results: list[dict[str, Any]]) -> list[float]:
    """The median step of each round."""
    return [statistics.median(result["seconds"]) for result in results]


def same_work(rounds: Rounds) -> list[dict[str, Any]]:
    """For each model: whether all runs had the same parameters and losses.

    The first loss is that of the weights that all were given; those after it say that
    gradients and updates were the same too.
    """
    found = []
    for model in dict.fromkeys(run.case.model for run in rounds):
        results = [
            result
            for run, own in rounds.items()
            if run.case.model == model
            for result in own
        ]
        losses, parameters = results[0]["losses"], results[0]["parameters"]
        apart = [
            abs(a - b)
            for result in results
            for a, b in zip(losses, result["losses"], strict=True)
        ]
        counts = sorted({result["parameters"] for result in results})
        found.append(
            {
                "model": model,
                "parameters": counts,
                "losses": losses,
                "apart": max(apart),
                # Written so that a loss that is not a number is not the same.
                "same": counts == [parameters] and all(a <= TOLERANCE for a in apart),
            }
        )
    return found


def sentence(work: dict[str, Any]) -> str:
    """What `same_work` found of a model, for a reader."""
    counts = " or ".join(f"{count:,}" for count in work["parameters"])
    losses = ", ".join(f"{loss:.4f}" for loss in work["losses"])
    verdict = "the same work" if work["same"] else "**NOT the same work**"
    return (
        f"{work['model']}: {verdict}. {counts} parameters on every side; the losses of "
        f"the first steps, {losses}, are at most {work['apart']:.1e} apart "
        f"(tolerance {TOLERANCE:.0e})."
    )


def shown(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    lines = [_where(result["provenance"]), ""]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        case = row["case"]
        groups.setdefault((case["model"], case["remat"]), []).append(row)
    for (model, remat), own in groups.items():
        lines += [_table(model, remat, own, result["settings"]), ""]
    lines += starved(result["rows"])
    lines += [sentence(work) for work in result["same_work"]]
    lines += [f"Left out: {reason}" for reason in result["skipped"].values()]
    for row in result["rows"]:
        if "forward_threads" in row and row["case"]["remat"] == "none":
            lines.append(
                f"Seen at work in torchgpipe ({row['case']['model']}): "
                f"{row['forward_threads']} thread for the forwards of both stages, "
                f"{row['backward_threads']} for the backwards."
            )
    return "\n".join([*lines, "", NOTES])


def starved(own: Sequence[dict[str, Any]]) -> list[str]:
    """A warning if something else ran: a step on one core keeps that core busy."""
    least = min(row["cores_busy"] for row in own if "speed_up" not in row)
    if least >= 0.9:
        return []
    return [
        f"**Not quiet**: a step without pipeline had {least:.0%} of its core, other "
        "work the rest. These times say little."
    ]


def _table(
    model: str, remat: str, own: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> str:
    number = settings["microbatches"]
    head = [f'{model}, M = {number}, remat "{remat}"', "stages", "samples/s"]
    head += ["least to most", "speed-up", "least to most"]
    head += [f"of the ideal {ideal(number):.2f}", "cores busy", "processor ms"]
    head += ["peak, MiB", "above start", "between steps", "a step"]
    rows = []
    for row in own:
        ratios = ["1", "", ""]
        if "speed_up" in row:
            ratios = [
                f"**{row['speed_up']:.2f}**",
                f"{row['speed_up_least']:.2f} to {row['speed_up_most']:.2f}",
                f"{row['of_ideal']:.0%}",
            ]
        rows.append(
            [
                row["title"],
                row["stages"],
                f"{row['samples_per_s']:.1f}",
                f"{row['samples_per_s_least']:.1f} to {row['samples_per_s_most']:.1f}",
                *ratios,
                f"{row['cores_busy']:.2f}",
                f"{row['processor_ms']:.0f}",
                f"{row['peak_mib']:.0f}",
                f"{row['above_start_mib']:.0f}",
                f"{row['between_mib']:.0f}",
                f"{row['step_mib']:.0f}",
            ]
        )
    return markdown.table(head, rows, left=2)


def _where(made: dict[str, Any]) -> str:
    """The provenance in a line."""
    versions = ", ".join(
        f"{name} {version}" for name, version in made["versions"].items()
    )
    return (
        f"{versions}; {made['cores']} cores of {made['processor']}, one minute's load "
        f"{made['load_before']:.1f} before; {made['date']}, commit {made['commit']}."
    )
