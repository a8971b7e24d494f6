"""What micro-batches make another number of is reported, and nothing else is."""

import jax
import pytest

import jpipe

from . import losses, mixing


def checked_layer(layer):
    x = mixing.data()
    pipe = jpipe.sequential([layer], 3)
    return pipe.check(pipe.init(jax.random.key(0), x), x)


def checked_loss(loss_fn, reduction):
    y, targets = losses.data()
    pipe = jpipe.sequential([lambda y: y], 3)
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    return find.check(({},), y, targets)


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


OTHERS = [(name, "mean") for name in losses.OTHERS] + [("root", "sum")]


@pytest.mark.parametrize(("name", "reduction"), OTHERS)
def test_loss_that_is_no_mean_and_no_sum_is_reported(name, reduction):
    report = checked_loss(losses.OTHERS[name], reduction)
    with pytest.raises(ValueError, match=r"^loss_fn with .* type reduction='weighted'"):
        report.raise_if_different()


RIGHT = {"mean": losses.MEANS, "sum": losses.SUMS}
CASES = [(name, reduction) for reduction in RIGHT for name in RIGHT[reduction]]


@pytest.mark.parametrize(("name", "reduction"), CASES)
def test_loss_passes_with_its_reduction(name, reduction):
    report = checked_loss(RIGHT[reduction][name], reduction)
    assert report, report


@pytest.mark.parametrize("name", ["mean", "square of a norm"])
def test_loss_with_the_other_reduction_is_reported(name):
    is_mean = name in losses.MEANS
    right, other = ("mean", "sum") if is_mean else ("sum", "mean")
    assert not checked_loss(RIGHT[right][name], other)
