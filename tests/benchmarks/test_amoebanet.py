"""AmoebaNet-D of the published tables: sizes, cuts, and by hand."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models.amoebanet import amoebanetd

from .convolutions import (
    check_evaluation,
    check_step,
    conv,
    counts,
    largest,
    mean_inside,
    norm,
    part_of_amoebanet,
    per_stage,
    relu,
    walk,
)


def shapes_of(layers):
    """The input and the variables of each layer, for small images."""
    return [(visit.x, visit.variables) for visit in walk(layers, size=32)[0]]


@cache
def amoebanet_visits(num_layers, num_filters):
    return walk(amoebanetd(1000, num_layers, num_filters))[0]


class TestAmoebaNet:
    @pytest.mark.parametrize(
        ("size", "parameters", "statistics", "num_layers"),
        [
            ((18, 208), 81_505_540, 168_116, 24),
            ((18, 256), 122_470_120, 206_912, 24),
            ((18, 416), 319_024_120, 336_232, 24),
            ((18, 544), 542_734_840, 439_688, 24),
            ((36, 544), 1_055_832_376, 828_104, 42),
            ((72, 512), 1_844_858_344, 1_510_528, 78),
        ],
    )
    def test_parameters_and_statistics(self, size, parameters, statistics, num_layers):
        visits = amoebanet_visits(*size)
        assert len(visits) == num_layers
        assert sum(counts(visits, "params")) == parameters
        assert sum(counts(visits, "batch_stats")) == statistics

    @pytest.mark.parametrize(
        ("size", "balance", "expected"),
        [
            ((18, 256), [9, 15], [5_557_248, 116_912_872]),
            ((18, 256), [3, 6, 7, 8], [419_328, 5_137_920, 22_586_624, 94_326_248]),
            (
                (18, 256),
                [2, 2, 2, 3, 3, 4, 4, 4],
                [
                    *[76_160, 1_019_264, 1_745_408, 2_716_416],
                    *[8_133_888, 14_452_736, 46_923_264, 47_402_984],
                ],
            ),
            ((18, 544), [16, 8], [126_868_688, 415_866_152]),
            (
                (36, 544),
                [16, 12, 7, 7],
                [58_304_016, 190_804_736, 407_161_152, 399_562_472],
            ),
            (
                (72, 512),
                [23, 16, 11, 6, 6, 5, 5, 6],
                [
                    *[72_748_032, 176_858_624, 158_788_608, 216_433_664],
                    *[346_238_976, 288_532_480, 288_532_480, 296_725_480],
                ],
            ),
        ],
    )
    def test_published_balances(self, size, balance, expected):
        assert per_stage(counts(amoebanet_visits(*size), "params"), balance) == expected

    def test_what_is_sent_from_layer_to_layer(self):
        d = 256
        images, stem, *pairs = [visit.x for visit in amoebanet_visits(18, d)]
        assert images.shape == (2, 224, 224, 3)
        assert stem.shape == (2, 112, 112, d // 4)
        outputs = [(56, 3 * d // 2), (28, 3 * d), *[(28, 4 * d)] * 6]
        outputs += [(14, 6 * d), *[(14, 8 * d)] * 6, (7, 12 * d), *[(7, 16 * d)] * 6]
        before = [(112, d // 4), *outputs]
        for pair, (size, width), (last, of) in zip(
            pairs, outputs, before, strict=False
        ):
            assert [a.shape[1:] for a in pair] == [
                (size, size, width),
                (last, last, of),
            ]
        assert len(pairs) == len(outputs)

    def test_an_inner_normal_cell(self):
        visits = amoebanet_visits(18, 256)
        assert counts(visits, "params")[5] == 905_472

    def test_the_slip_changes_no_shape(self):
        layers = part_of_amoebanet(0, 1, 3)
        others = part_of_amoebanet(0, 1, 3, average_for_max=True)
        assert layers[1] != others[1]
        assert shapes_of(layers) == shapes_of(others)

    def test_half_precision_is_that_of_the_computation(self):
        visits = walk(part_of_amoebanet(0, 1, 3, dtype=jnp.bfloat16), size=32)[0]
        inputs = jax.tree.leaves([visit.x for visit in visits[1:]])
        assert {leaf.dtype for leaf in inputs} == {jnp.dtype(jnp.bfloat16)}
        leaves = jax.tree.leaves([visit.variables for visit in visits])
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}

    @pytest.mark.parametrize("size", [(4, 16), (0, 16), (3, 12), (3, 0)])
    def test_sizes_that_do_not_exist(self, size):
        with pytest.raises(ValueError, match="needs a positive multiple of"):
            amoebanetd(8, *size)


def amoebanet_by_hand(variables, x, train, kinds, average_for_max=False):
    """Straight from the published description; all cells but their widths."""
    stem, *cells, head = variables

    def relu_conv_norm(x, entry, stride=(1, 1), padding=(0, 0)):
        params, stats = entry
        x = conv(relu(x), params["Conv_0"]["kernel"], stride, padding)
        return norm(x, params["BatchNorm_0"], stats["BatchNorm_0"], train)

    def factorized_reduce(x, entry):
        params, stats = entry
        x = relu(x)
        shifted = np.zeros_like(x)
        shifted[:, :-1, :-1] = x[:, 1:, 1:]
        both = [
            conv(x, params["Conv_0"]["kernel"], (2, 2)),
            conv(shifted, params["Conv_1"]["kernel"], (2, 2)),
        ]
        x = np.concatenate(both, -1)
        return norm(x, params["BatchNorm_0"], stats["BatchNorm_0"], train)

    def cell(pair, entry, reduction, after_reduction):
        params, stats = entry["params"], entry["batch_stats"]
        used = []

        def own(kind):
            name = f"{kind}_{sum(kind in other for other in used)}"
            used.append(name)
            return params[name], stats[name]

        def simple(x, *args):
            return relu_conv_norm(x, own("ReluConvNorm"), *args)

        def conv1x1(x, s):
            return simple(x, (s, s))

        def conv3x3(x, s):
            return simple(simple(simple(x), (s, s), (1, 1)))

        def conv1x7_7x1(x, s):
            return simple(simple(simple(simple(x), (1, s), (0, 3)), (s, 1), (3, 0)))

        def max3x3(x, s):
            return mean_inside(x, s) if average_for_max else largest(x, 3, s, 1)

        s1, s2 = pair
        h = [simple(s1)]
        h += [factorized_reduce(s2, own("FactorizedReduce"))] if after_reduction else []
        h += [] if after_reduction else [simple(s2)]
        if reduction:
            h += [largest(h[0], 2, 2, 0) + max3x3(h[0], 2)]
            h += [h[2] + conv3x3(h[1], 2)]
            h += [conv1x7_7x1(h[2], 1) + max3x3(h[2], 1)]
            h += [h[3] + largest(h[1], 2, 2, 0)]
            h += [mean_inside(h[2], 1) + conv1x1(h[3], 1)]
            y = np.concatenate([h[4], h[5], h[6]], -1)
        else:
            h += [conv1x1(h[1], 1) + max3x3(h[1], 1)]
            h += [h[1] + conv1x7_7x1(h[0], 1)]
            h += [conv1x1(h[0], 1) + conv1x7_7x1(h[0], 1)]
            h += [max3x3(h[2], 1) + h[2]]
            h += [mean_inside(h[1], 1) + conv1x1(h[5], 1)]
            y = np.concatenate([h[0], h[3], h[4], h[6]], -1)
        assert len(used) == len(params)
        return y, s1

    x = relu_conv_norm(x, (stem["params"], stem["batch_stats"]), (2, 2), (1, 1))
    pair = x, x
    previous = "none"
    for entry, kind in zip(cells, kinds, strict=True):
        after = previous in ("stem", "reduction")
        pair = cell(pair, entry, kind != "normal", after)
        previous = kind
    (dense,) = head["params"].values()
    return pair[0].mean((1, 2)) @ dense["kernel"] + dense["bias"]


class TestAmoebaNetByHand:
    def test_evaluation(self, double):
        # Every kind of cell after every kind that it may follow.
        layers = part_of_amoebanet(0, 1, 2, 3, 4)
        kinds = "stem", "stem", "normal", "normal"
        check_evaluation(layers, partial(amoebanet_by_hand, kinds=kinds), 32)

    def test_step_cut_between_cells(self, double):
        layers = part_of_amoebanet(0, 1, 3)
        by_hand = partial(amoebanet_by_hand, kinds=("stem", "normal"))
        check_step(layers, by_hand, 16, [2, 2], num_microbatches=1)

    def test_average_pools_for_max_pools(self, double):
        layers = part_of_amoebanet(0, 1, 3, average_for_max=True)
        kinds = "stem", "normal"
        by_hand = partial(amoebanet_by_hand, kinds=kinds, average_for_max=True)
        check_evaluation(layers, by_hand, 16)
