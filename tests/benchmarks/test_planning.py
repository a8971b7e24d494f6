"""What published cuts would take, beside plans."""

import jpipe
from benchmarks.planning.cuts import MODELS, PUBLISHED, Run, plans, row

from .. import reference as ref


def test_published_cuts_are_of_all_layers():
    for model, runs in PUBLISHED.items():
        layers = MODELS[model]()
        for num_devices, run in runs.items():
            assert len(run.balance) == num_devices
            assert sum(run.balance) == len(layers)


def test_cuts_are_planned_and_printed():
    layers = [ref.dense(8) for _ in range(5)]
    run = Run([1, 4], examples=16, num_microbatches=4)
    made = dict(plans(layers, 4, run, 2**30))
    assert list(made) == [
        "equal layers",
        "torchgpipe's",
        "jpipe.partition",
        "jpipe.plan",
    ]
    balances = [plan.balance for plan in made.values()]
    assert balances[:2] == [[3, 2], [1, 4]]
    assert isinstance(made["jpipe.plan"], jpipe.Plan)
    line = row(2, "torchgpipe's", made["torchgpipe's"], limit=1)
    assert line.startswith("      2 | torchgpipe's    | ")
    assert line.endswith("too much | [1, 4], 1f1b")
    refusal = dict(plans(layers, 4, run, 1))["jpipe.plan"]
    assert isinstance(refusal, ValueError)
    assert str(refusal) in row(2, "jpipe.plan", refusal, limit=1)
