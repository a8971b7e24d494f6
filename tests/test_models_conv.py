"""The convolutional models of the benchmarks: the published numbers, and by hand."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from benchmarks.models import amoebanet
from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.resnet import convolution, linear, max_pool, resnet101
from jpipe._layers import _layer, _stage, _walk
from jpipe._run import _variables

from . import reference as ref

# Double precision (2e-16) through fifty convolutions and norms of few examples.
DOUBLE = 1e-10


# ---------------------------------------------------------------- shapes and counts


def walk(layers, balance=None, size=224, dtype=jnp.float32):
    """What jpipe meets at each layer, and the routes of the skip connections."""
    stages = _stage.fuse(_layer.as_layers(layers), balance or [len(layers)])
    spec = jax.ShapeDtypeStruct((2, size, size, 3), dtype)
    return _walk.walk(stages, jax.random.key(0), spec)


def elements(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def counts(visits, collection):
    return [elements(visit.variables.get(collection, {})) for visit in visits]


def shapes_of(layers):
    """The input and the variables of each layer, for small images."""
    return [(visit.x, visit.variables) for visit in walk(layers, size=32)[0]]


def per_stage(numbers, balance):
    """Sums of so many neighbours each."""
    assert sum(balance) == len(numbers)
    ends = np.cumsum(balance)
    return [sum(numbers[e - n : e]) for e, n in zip(ends, balance, strict=True)]


@cache
def resnet_walk():
    """Cut into the published four stages, two of them inside of blocks."""
    return walk(resnet101(), [44, 92, 124, 110])


def resnet_visits():
    return resnet_walk()[0]


@cache
def amoebanet_visits(num_layers, num_filters):
    return walk(amoebanetd(1000, num_layers, num_filters))[0]


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


def test_initial_values_are_those_of_torch():
    x = jnp.ones((1, 8, 8, 25))
    layers = [
        linear(400, 25),
        amoebanet.ReluConvNorm(400, (1, 7), (1, 2)),
        resnet101(width=50)[5],
    ]

    @jax.jit
    def init(key):
        switches = [], [False], []
        return [
            layer.init(key, x, *own)["params"]
            for layer, own in zip(layers, switches, strict=True)
        ]

    dense, cell, conv = init(jax.random.key(0))
    assert within(dense["kernel"], 1 / math.sqrt(25))
    assert within(dense["bias"], 1 / math.sqrt(25))
    assert within(cell["Conv_0"]["kernel"], 1 / math.sqrt(7 * 25))
    deviation = math.sqrt(2 / 50)
    assert jnp.std(conv["kernel"]) == pytest.approx(deviation, rel=0.1)
    assert jnp.abs(conv["kernel"]).max() > 2.5 * deviation  # not truncated


def within(values, bound):
    """Whether they are uniform between plus and minus a bound."""
    largest = float(jnp.abs(values).max())
    uniform = pytest.approx(bound / math.sqrt(3), rel=0.1)
    return 0.97 * bound < largest <= bound and jnp.std(values) == uniform


# ---------------------------------------------------------------- by hand, in NumPy


def windows(x, size, strides=(1, 1), padding=(0, 0), fill=0.0):
    """For each offset in a window, what is there in all windows."""
    (above, left), (rows, columns) = padding, x.shape[1:3]
    batch, features = x.shape[0], x.shape[3]
    padded = np.full((batch, rows + 2 * above, columns + 2 * left, features), fill)
    padded[:, above : above + rows, left : left + columns] = x
    down = (padded.shape[1] - size[0]) // strides[0] + 1
    across = (padded.shape[2] - size[1]) // strides[1] + 1
    return {
        (i, j): padded[:, i:, j:][:, :: strides[0], :: strides[1]][:, :down, :across]
        for i, j in np.ndindex(*size)
    }


def conv(x, kernel, strides=(1, 1), padding=(0, 0)):
    parts = windows(x, kernel.shape[:2], strides, padding)
    return sum(part @ kernel[at] for at, part in parts.items())


def largest(x, size, stride, padding):
    parts = windows(x, (size, size), (stride,) * 2, (padding,) * 2, -np.inf)
    return np.max(list(parts.values()), axis=0)


def mean_inside(x, stride):
    """Of 3 x 3, of what is not padding."""
    sums = sum(windows(x, (3, 3), (stride,) * 2, (1, 1)).values())
    ones = np.ones_like(x)
    return sums / sum(windows(ones, (3, 3), (stride,) * 2, (1, 1)).values())


def relu(x):
    return np.maximum(x, 0)


def norm(x, params, stats, train):
    mean, var = stats["mean"], stats["var"]
    if train:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * params["scale"] + params["bias"]


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


def random_variables(layers, size):
    """Every leaf drawn anew, in double precision; running variances above zero."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.standard_normal(leaf.shape)
        if path[-1].key == "var":
            return 0.5 + np.abs(values)
        if path[-1].key in (
            "scale",
            "bias",
        ):  # near those at the start: no dead channels
            return (path[-1].key == "scale") + values / 4
        return values / math.sqrt(max(math.prod(leaf.shape[:-1]), 1))

    visits, _ = walk(layers, size=size, dtype=jnp.float64)
    specs = tuple(visit.variables for visit in visits)
    return jax.tree_util.tree_map_with_path(draw, specs)


def check_evaluation(layers, by_hand, size):
    """Against by hand, on one device."""
    variables, x, _ = example(layers, size)
    one = jpipe.sequential(layers)
    y = one.apply(one.place(variables), x)
    assert y.dtype == jnp.float64
    ref.assert_close(y, by_hand(variables, x, False), DOUBLE)


def check_step(layers, by_hand, size, balance, num_microbatches):
    """A step in stages against the same on one device, whose outputs are by hand."""
    variables, x, targets = example(layers, size)
    params = _variables.params(variables)
    tx = optax.sgd(1.0)
    state = jpipe.TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        model_state=_variables.model_state(variables),
        rng=jax.random.key(0),
    )

    def loss_fn(y, t):
        return ref.mse(y, t), y

    def gradients(pipe):
        step = pipe.train_step(loss_fn, tx, has_aux=True, donate=False)
        after, metrics = step(pipe.place(state), x, targets)
        change = jax.tree.map(np.subtract, params, ref.on_host(after.params))
        return change, after.model_state, metrics

    one = gradients(jpipe.sequential(layers, num_microbatches))
    pipe = jpipe.pipeline(layers, num_microbatches, balance=balance, remat="none")
    several = gradients(pipe)
    ref.assert_close(several, one, DOUBLE)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one[0]))
    # Batch norm normalizes each micro-batch by itself.
    parts = [by_hand(variables, p, True) for p in np.split(x, num_microbatches)]
    ref.assert_close(one[2]["aux"], np.stack(parts), DOUBLE)


def example(layers, size):
    """Variables, images and targets."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, size, size, 3))
    return random_variables(layers, size), x, rng.standard_normal((4, 5))


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


def part_of_amoebanet(*numbers, **options):
    """Some of the layers, and the last: what is compiled in seconds."""
    layers = amoebanetd(5, 6, 8, **options)
    return [*(layers[number] for number in numbers), layers[-1]]


class TestAgainstTorch:
    """What both the models and the arithmetic by hand are made of, where torch is."""

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.fixture
    def x(self):
        # Odd and even, so that both kinds of padding are met.
        return np.random.default_rng(2).standard_normal((2, 9, 8, 4))

    def of(self, module, x, *weights):
        """What a torch module makes of images whose channels are last."""
        import torch

        for own, given in zip(module.parameters(), weights, strict=True):
            own.data = torch.from_numpy(np.ascontiguousarray(given))
        y = module.eval()(torch.from_numpy(x).permute(0, 3, 1, 2))
        return y.detach().permute(0, 2, 3, 1).numpy()

    @pytest.mark.parametrize("stride", [1, 2])
    def test_pools(self, double, torch, x, stride):
        average = torch.nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        expected = self.of(average, x)
        ref.assert_close(mean_inside(x, stride), expected, DOUBLE)
        given = amoebanet.average_pool_3x3(jnp.asarray(x), stride, None)
        ref.assert_close(given, expected, DOUBLE)
        for size, padding in ((3, 1), (2, 0)):
            expected = self.of(torch.nn.MaxPool2d(size, stride, padding), x)
            ref.assert_close(largest(x, size, stride, padding), expected, DOUBLE)
            ref.assert_close(max_pool(jnp.asarray(x), size, stride), expected, DOUBLE)

    @pytest.mark.parametrize(
        ("size", "strides", "padding"),
        [
            ((7, 7), (2, 2), (3, 3)),
            ((3, 3), (2, 2), (1, 1)),
            ((1, 1), (2, 2), (0, 0)),
            ((1, 7), (1, 2), (0, 3)),
            ((7, 1), (2, 1), (3, 0)),
        ],
    )
    def test_convolutions(self, double, torch, x, size, strides, padding):
        kernel = np.random.default_rng(3).standard_normal((*size, 4, 6))
        module = torch.nn.Conv2d(4, 6, size, strides, padding, bias=False)
        expected = self.of(module, x, kernel.transpose(3, 2, 0, 1))
        ref.assert_close(conv(x, kernel, strides, padding), expected, DOUBLE)
        given = convolution(6, size, strides).apply({"params": {"kernel": kernel}}, x)
        ref.assert_close(given, expected, DOUBLE)

    @pytest.mark.parametrize("rows", [8, 9])
    def test_factorized_reduce(self, double, torch, rows):
        rng = np.random.default_rng(4)
        x = rng.standard_normal((2, rows, rows, 4))
        first, second = rng.standard_normal((2, 1, 1, 4, 3))
        layer = amoebanet.FactorizedReduce(6)
        one = np.ones(6)
        convs = {"Conv_0": {"kernel": first}, "Conv_1": {"kernel": second}}
        variables = {
            "params": {**convs, "BatchNorm_0": {"scale": one, "bias": one}},
            "batch_stats": {"BatchNorm_0": {"mean": one, "var": one}},
        }
        convs = [torch.nn.Conv2d(4, 3, 1, 2, bias=False) for _ in range(2)]
        shifted = np.zeros_like(x)
        shifted[:, :-1, :-1] = x[:, 1:, 1:]
        halves = [
            self.of(convs[0], relu(x), first.transpose(3, 2, 0, 1)),
            self.of(convs[1], relu(shifted), second.transpose(3, 2, 0, 1)),
        ]
        # What the norm has is 1, whatever it is.
        expected = (np.concatenate(halves, -1) - 1) / np.sqrt(1 + 1e-5) + 1
        ref.assert_close(layer.apply(variables, x, False), expected, DOUBLE)
