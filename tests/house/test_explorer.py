"""The page "Try a schedule": its simulator against that of the library."""

import json
import runpy
import shutil
import subprocess

import pytest

from jpipe.schedules import BY_NAME, Costs

from ..programs import ROOT

EXPLORER = ROOT / "docs" / "explorer" / "explorer.js"
SIMULATE = """
const { parseRows, simulate } = require(process.argv[1]);
const requests = JSON.parse(require("fs").readFileSync(0, "utf-8"));
console.log(JSON.stringify(requests.map(({ rows, costs }) => {
  const { makespan, bubble, peaks } = simulate(parseRows(rows), costs);
  return { makespan, bubble, peaks };
})));
"""
SIZES = [(2, 2), (3, 8), (4, 16), (8, 32)]
COSTS = [(2.0, 0.0), (3.0, 0.5)]  # of a backward, of a transfer


def test_the_page_predicts_what_the_library_predicts():
    if not shutil.which("node"):
        pytest.skip("there is no node, which runs the program of the page")
    tabulate = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["tabulate"]
    requests = []
    expected = []
    for build in BY_NAME.values():
        table = tabulate(build)
        for ranks, microbatches in SIZES:
            entry = table[f"{ranks}x{microbatches}"]
            if "error" in entry:
                with pytest.raises(ValueError, match="num_microbatches"):
                    build(ranks, microbatches)
                continue
            schedule = build(ranks, microbatches)
            for backward, transfer in COSTS:
                page_costs = {
                    "forward": 1,
                    "backward": backward,
                    "transfer": transfer,
                }
                requests.append({"rows": entry["rows"], "costs": page_costs})
                costs = Costs(forward=1, backward=backward, latency=transfer)
                chunks = schedule.num_stages // schedule.num_ranks
                expected.append(schedule.simulate(costs.per_chunk(chunks)))
    answer = subprocess.run(
        ["node", "-e", SIMULATE, str(EXPLORER)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(answer.stdout)
    assert len(results) == len(expected) > 100
    for result, timeline in zip(results, expected, strict=True):
        assert result["makespan"] == pytest.approx(timeline.makespan), timeline.name
        assert result["bubble"] == pytest.approx(timeline.bubble_fraction)
        if not timeline.schedule.forward_only:
            assert result["peaks"] == pytest.approx(timeline.peak_bytes), timeline.name


def test_the_page_offers_every_schedule():
    page = (ROOT / "docs" / "try_a_schedule.md").read_text()
    for name in BY_NAME:
        assert page.count(f">{name}</option>") == 2, name
