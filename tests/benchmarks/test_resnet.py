"""ResNet-101 of the published tables: sizes, cuts, and by hand."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models.resnet import resnet101

from .convolutions import (
    check_evaluation,
    check_step,
    conv,
    counts,
    largest,
    norm,
    per_stage,
    relu,
    walk,
)


@cache
def resnet_walk():
    """Cut into the published four stages, two of them inside of blocks."""
    return walk(resnet101(), [44, 92, 124, 110])


def resnet_visits():
    return resnet_walk()[0]


class TestResNet:
    def test_parameters_and_statistics(self):
        visits = resnet_visits()
        assert len(visits) == 370
        assert sum(counts(visits, "params")) == 44_549_160
        assert sum(counts(visits, "batch_stats")) == 105_344

    @pytest.mark.parametrize(
        ("balance", "expected"),
        [
            ([135, 235], [7_426_112, 37_123_048]),
            ([44, 92, 124, 110], [406_080, 7_020_032, 12_551_680, 24_571_368]),
            (
                [26, 22, 33, 44, 44, 66, 66, 69],
                [
                    *[154_944, 449_792, 840_192, 4_864_000, 4_468_736],
                    *[6_703_104, 6_703_104, 20_365_288],
                ],
            ),
        ],
    )
    def test_published_balances(self, balance, expected):
        assert per_stage(counts(resnet_visits(), "params"), balance) == expected

    def test_what_is_sent_between_eight_stages(self):
        starts = np.cumsum([26, 22, 33, 44, 44, 66, 66])
        visits = resnet_visits()
        assert [visits[n].x.shape[1:] for n in starts] == [
            *[(56, 56, 256), (28, 28, 512), (28, 28, 512)],
            *[(14, 14, 1024)] * 4,
        ]
        # The cuts are between blocks: nothing but the activations is sent.
        assert not any(visits[n].skips for n in starts)

    def test_cuts_inside_blocks_send_the_shortcut(self):
        assert resnet_walk()[1] == (
            (("layer2_0", "shortcut"), 0, 1),
            (("layer3_16", "shortcut"), 2, 3),
        )

    def test_no_two_layers_are_one_module(self):
        layers = [layer for layer in resnet101() if hasattr(layer, "init")]
        assert len(layers) == len({id(layer) for layer in layers})
        # Yet they are equal where they may be: their init is compiled once.
        assert len(set(layers)) < 30

    def test_half_precision_is_that_of_the_computation(self):
        layers = resnet101(8, width=4, blocks=(1, 1), dtype=jnp.bfloat16)
        visits, _ = walk(layers, size=32)
        assert {visit.x.dtype for visit in visits[1:]} == {jnp.dtype(jnp.bfloat16)}
        leaves = jax.tree.leaves([visit.variables for visit in visits])
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


def resnet_by_hand(variables, x, train, blocks):
    own = iter([entry for entry in variables if entry])

    def conv_norm(x, stride, padding):
        x = conv(x, next(own)["params"]["kernel"], (stride,) * 2, (padding,) * 2)
        entry = next(own)
        return norm(x, entry["params"], entry["batch_stats"], train)

    x = largest(relu(conv_norm(x, 2, 3)), 3, 2, 1)
    for group, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if group > 0 and number == 0 else 1
            shortcut = x
            x = relu(conv_norm(x, 1, 0))
            x = relu(conv_norm(x, stride, 1))
            x = conv_norm(x, 1, 0)
            if number == 0:
                entry = next(own)
                params, stats = entry["params"], entry["batch_stats"]
                shortcut = conv(shortcut, params["Conv_0"]["kernel"], (stride,) * 2)
                shortcut = norm(
                    shortcut, params["BatchNorm_0"], stats["BatchNorm_0"], train
                )
            x = relu(x + shortcut)
    dense = next(own)["params"]
    assert next(own, None) is None
    return x.mean((1, 2)) @ dense["kernel"] + dense["bias"]


class TestResNetByHand:
    def test_evaluation(self, double):
        blocks = (2, 1)
        layers = resnet101(5, width=4, blocks=blocks)
        check_evaluation(layers, partial(resnet_by_hand, blocks=blocks), 32)

    def test_step_cut_inside_of_a_block(self, double):
        blocks = (1, 1)
        layers = resnet101(5, width=4, blocks=blocks)
        # Before the second norm of the second block.
        by_hand = partial(resnet_by_hand, blocks=blocks)
        check_step(layers, by_hand, 16, [20, 9], num_microbatches=2)
