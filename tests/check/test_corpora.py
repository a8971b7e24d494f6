"""What micro-batches make another number of is told, and nothing else is."""

import jax
import pytest

import jpipe

from . import losses_of_classes, losses_of_tokens, mixing

TOKENS, CLASSES = losses_of_tokens, losses_of_classes


def rows(corpus, table, reduction, only=None):
    """Cases: the corpus, a loss of it, and how its micro-batches are combined."""
    kind = corpus.__name__.rpartition("_")[2]
    return [
        pytest.param(corpus, loss_fn, reduction, id=f"{kind} {name} {reduction}")
        for name, loss_fn in table.items()
        if only is None or name in only
    ]


WRONG = [
    *rows(TOKENS, TOKENS.OTHERS, "mean"),
    *rows(TOKENS, TOKENS.OTHERS, "sum", only=("root",)),
    *rows(CLASSES, CLASSES.OTHERS, "mean"),
]
SWAPPED = [
    *rows(TOKENS, TOKENS.SUMS, "mean"),
    *rows(TOKENS, TOKENS.MEANS, "sum", only=("mean", "scan", "while", "in groups")),
]
RIGHT = [
    *rows(TOKENS, TOKENS.MEANS, "mean"),
    *rows(TOKENS, TOKENS.SUMS, "sum"),
    *rows(CLASSES, CLASSES.MEANS, "mean"),
]


def checked_layer(layer):
    x = mixing.data()
    pipe = jpipe.sequential([layer], 3)
    return pipe.check(pipe.init(jax.random.key(0), x), x)


def checked_loss(corpus, loss_fn, reduction):
    y, targets = corpus.data()
    pipe = jpipe.sequential([lambda y: y], 3)
    return pipe.check(({},), y, targets, loss_fn, reduction=reduction)


@pytest.mark.parametrize("name", mixing.MIXED)
def test_layer_that_mixes_examples_is_reported(name):
    report = checked_layer(mixing.MIXED[name])
    assert not report.is_same
    with pytest.raises(ValueError, match=r"^layer 0 \(.*\): (outputs|gradients)"):
        report.raise_if_different()
    report.raise_if_different(accept=[0])


@pytest.mark.parametrize("name", mixing.APART)
def test_layer_that_keeps_examples_apart_passes(name):
    report = checked_layer(mixing.APART[name])
    assert report, report
    assert "gradients" in report.layers[0].compared


@pytest.mark.parametrize(("corpus", "loss_fn", "reduction"), WRONG)
def test_loss_that_is_no_mean_and_no_sum_is_reported(corpus, loss_fn, reduction):
    report = checked_loss(corpus, loss_fn, reduction)
    with pytest.raises(ValueError, match=r"^loss_fn with .* reduction='weighted'; els"):
        report.raise_if_different()


@pytest.mark.parametrize(("corpus", "loss_fn", "reduction"), SWAPPED)
def test_loss_of_another_reduction_is_reported_with_the_right_one(
    corpus, loss_fn, reduction
):
    report = checked_loss(corpus, loss_fn, reduction)
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(ValueError, match=f"Type reduction='{other}', which fits"):
        report.raise_if_different()


@pytest.mark.parametrize(("corpus", "loss_fn", "reduction"), RIGHT)
def test_loss_of_the_given_reduction_passes(corpus, loss_fn, reduction):
    report = checked_loss(corpus, loss_fn, reduction)
    assert report, report


def test_the_corpora_are_whole():
    """As many as there ever were to compare with."""
    assert len(mixing.MIXED) >= 60
    assert len(mixing.APART) >= 40
    assert len(WRONG) + len(SWAPPED) >= 60
    assert len(RIGHT) >= 40
