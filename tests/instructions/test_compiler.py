"""Programs that are compiled ahead, side by side, and what is then known.

Models have widths of their own: a program that another test has compiled is compiled.
"""

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.experimental.compilation_cache import compilation_cache

import jpipe

from .. import reference as ref
from ..slow import slow

TX = optax.adam(1e-2)


class Calls(list):
    """The names of what XLA compiles, in which threads; one may fail."""

    error = None

    def __init__(self):
        self.threads = set()
        self.compile = jax.stages.Lowered.compile

    def __call__(self, lowered, **options):
        self.append(lowered.as_text().split("@", 1)[1].split(" ", 1)[0])
        if self[-1].startswith("jit_stage"):
            self.threads.add(threading.current_thread())
        if self.error and len(self) == 2:
            raise self.error
        return self.compile(lowered, **options)


@pytest.fixture
def compiled(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: calls(*a, **k))
    return calls


def layers(width):
    return [ref.dense(width), jnp.tanh, ref.dense(width), ref.dense(4)]


def called(pipe, name, x, targets):
    """A function of a pipeline, what compiles it, and its arguments."""
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    if name == "apply":
        return pipe.apply, pipe.compile, (state.variables, x)
    if name == "value_and_grad":
        find = pipe.value_and_grad(ref.mse)
        return find, find.compile, (state.variables, x, targets)
    step = pipe.train_step(ref.mse, TX)
    return step, step.compile, (state, x, targets)


@pytest.mark.parametrize("name", [slow("apply"), slow("value_and_grad"), "train_step"])
def test_after_compile_by_shapes_the_first_call_compiles_nothing(name, compiled):
    pipe, (x, targets) = jpipe.pipeline(layers(23 + len(name)), 4), ref.regression(8)
    function, compile_ahead, args = called(pipe, name, x, targets)
    compiled.clear()
    report = compile_ahead(*jax.eval_shape(lambda: args))
    stages = [p for p in report.programs if p.name.startswith("stage")]
    assert sum(name.startswith("jit_stage") for name in compiled) == len(stages) > 2
    assert threading.main_thread() not in compiled.threads
    assert all(program.seconds > 0 for program in stages)
    assert report.flops > 0
    calls = sum(p.calls for p in stages if "backward" in p.name)
    assert calls == (0 if name == "apply" else 4 * 4)
    assert [device for device, _ in report.peak_bytes] == [f"cpu:{i}" for i in range(4)]
    assert str(report).splitlines()[0].split()[:2] == ["program", "device"]
    compiled.clear()
    function(*args)
    # The loss alone, which is run once on real targets.
    assert set(compiled) <= {"jit_compare_parts"}


@pytest.fixture
def unsaved():
    """JAX reads no executables from a directory."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def trained():
    """A state after a step on five devices whose norms cross them, and the report."""
    equal = [ref.dense(17), *[nn.Dense(17) for _ in range(3)], ref.dense(4)]
    pipe = jpipe.pipeline(equal, 2)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    x = jax.random.normal(jax.random.key(1), (4, 5))
    given = pipe.init_train_state(jax.random.key(0), x, tx), x, jnp.ones((4, 4))
    step = pipe.train_step(ref.mse, tx)
    report = step.compile(*given)
    return step(*given), report


def test_equal_programs_are_compiled_once_and_loaded_on_each_device(
    compiled, unsaved, tmp_path
):
    found, report = trained()
    assert all(program.seconds > 0 for program in report.programs)
    assert found[0].params[2]["kernel"].devices() == {jax.devices()[2]}
    once = collections.Counter(compiled)
    assert once["jit_stage1_2_3_forward"] == once["jit_stage1_2_3_backward_add_grads"]
    assert once["jit_stage1_2_3_forward"] == 1
    # From a directory XLA for CPU cannot load one for another device: it finds nothing
    # in what it makes of that. Under another setting jpipe asks JAX again.
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    for least in (-1, 0):
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", least)
        compiled.clear()
        ref.assert_equal(trained()[0], found)
        assert collections.Counter(compiled)["jit_stage1_2_3_forward"] == 3


def test_a_program_compiled_for_one_pipeline_is_loaded_on_the_device_of_another(
    compiled, unsaved
):
    x = jnp.ones((4, 5))
    outputs = []
    for device in jax.devices()[:2]:
        pipe = jpipe.pipeline([ref.dense(23)], 2, devices=[device])
        outputs.append(pipe.apply(pipe.init(jax.random.key(0), x), x))
    assert outputs[1].devices() == {jax.devices()[1]}
    ref.assert_equal(outputs[1], outputs[0])
    assert collections.Counter(compiled)["jit_stage0_forward"] == 1


def test_equal_stages_of_a_model_are_compiled_once_whatever_they_draw(
    compiled, unsaved
):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for _ in range(4):
                x = nn.Dropout(0.1, deterministic=not train)(nn.Dense(19)(x))
                x = jpipe.boundary(jnp.tanh(x))
            return nn.Dense(4)(x)

    pipe, (x, targets) = jpipe.pipeline(Model(), 2), ref.regression(4)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    compiled.clear()
    pipe.train_step(ref.mse, TX).compile(state, x, targets)
    stages = [name.removeprefix("jit_stage") for name in compiled]
    assert sorted(name for name in stages if name[0] in "123") == [
        "1_2_3_backward_add_grads",
        "1_2_3_forward",
    ]


@pytest.mark.parametrize("error", [MemoryError("too large"), KeyboardInterrupt()])
def test_programs_compiled_before_an_error_are_kept(error, compiled):
    width = 29 + len(repr(error))
    several = [ref.dense(width + i) for i in range(3)]
    pipe, x = jpipe.pipeline(several, 1), jnp.ones((2, 4))
    compiled.error = error
    with pytest.raises(type(error)):
        pipe.init(jax.random.key(0), x)
    begun = list(compiled)
    compiled.error = None
    compiled.clear()
    assert len(pipe.init(jax.random.key(0), x)) == 3
    # A program draws one array: three kernels, three biases.
    assert 2 <= len(begun) <= 6
    assert len(compiled) == 6 - (len(begun) - 1)


def test_a_program_is_found_again_whatever_its_functions_are_called(compiled):
    x, targets = ref.regression(8)

    def gradients():
        @jax.jit
        def callback(x):
            return jnp.tanh(x)

        def thrice(x):
            return jax.lax.fori_loop(0, 3, lambda _, y: callback(y), x)

        pipe = jpipe.sequential([ref.dense(33), thrice, ref.dense(4)], 2)
        return pipe.value_and_grad(ref.mse)(pipe.init(jax.random.key(0), x), x, targets)

    first = gradients()
    assert any("stage0" in name for name in compiled)
    compiled.clear()
    ref.assert_equal(gradients(), first)
    assert compiled == []


def test_programs_that_differ_by_a_number_are_never_taken_for_each_other():
    x = jnp.ones((2, 4), jnp.float16)
    for factor in (2, 3, 2.0, np.float32(2), -0.0, 0.0):
        apply = jpipe.sequential([lambda x, factor=factor: x / factor]).apply
        ref.assert_equal(apply(({},), x), x / factor)


def test_a_numpy_array_that_was_written_to_is_no_cached_constant():
    x, table = jax.device_put(jnp.ones(4), jax.devices()[0]), np.zeros(4, np.float32)
    for factor in (2, 3):
        table[:] = factor
        times = jpipe.sequential([jnp.abs]).jit(lambda x: x * table)
        ref.assert_equal(times(x), factor * x)


def test_a_program_that_overwrites_is_not_taken_for_one_that_does_not():
    pipe, tree = jpipe.sequential([jnp.abs]), jnp.arange(41.0)
    for donated in (0, ()):
        given = jax.device_put(tree + 1, jax.devices()[0])
        twice = pipe.jit(lambda x: 2 * x, donate_argnums=donated)(given)
        ref.assert_equal(twice, 2 * (tree + 1))
        assert given.is_deleted() == (donated == 0)


def test_a_program_is_compiled_anew_under_other_settings_by_either_way(
    compiled, monkeypatch
):
    x = jnp.ones((2, 4))
    pipe = jpipe.sequential([ref.dense(37)])
    variables = pipe.init(jax.random.key(0), x)
    for has_values, precision in ((True, "high"), (False, "highest")):
        if not has_values:
            monkeypatch.setattr(type(jax.config), "values", None)
        for context in (precision, "default", precision):
            with jax.default_matmul_precision(context):
                jpipe.sequential([ref.dense(37)]).apply(variables, x)
    stages = [name for name in compiled if "stage0" in name]
    assert len(stages) == 4


def test_programs_that_compute_in_python_are_never_taken_for_each_other():
    x = ref.regression(8)[0]
    for factor in (2, 3):

        def times(x, factor=factor):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(lambda x: factor * np.asarray(x), like, x)

        pipe = jpipe.pipeline([times, jnp.abs], 2, balance=[2])
        ref.assert_equal(pipe.apply(({}, {}), x), abs(factor * x))


def test_programs_that_call_python_are_never_taken_for_each_other(capfd):
    x, targets = ref.regression(8)
    for word in ("first", "second"):

        def printing(x, word=word):
            jax.debug.callback(lambda: print(word))
            return x

        pipe = jpipe.pipeline([ref.dense(4), printing], 2, balance=[2])
        variables = pipe.init(jax.random.key(0), x)
        capfd.readouterr()
        pipe.value_and_grad(ref.mse)(variables, x, targets)
        jax.effects_barrier()
        assert set(capfd.readouterr().out.split()) == {word}


class Quantized(nn.Module):
    """A frozen matrix of a small type, and a scale that is trained."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        def init():
            return (jnp.arange(25).reshape(5, 5) % 2).astype(self.dtype)

        matrix = self.variable("frozen", "matrix", init)
        scale = self.param("scale", nn.initializers.ones, (5,))
        return x @ matrix.value.astype(x.dtype) * scale


@pytest.mark.parametrize("dtype", ["int4", slow("uint2"), slow("float4_e2m1fn")])
def test_elements_smaller_than_a_byte_are_computed_with(dtype):
    model = nn.Sequential([Quantized(dtype), Quantized(dtype), ref.dense(4)])
    (x, targets), tx = ref.regression(8), optax.sgd(0.1)
    variables = model.init(jax.random.key(0), x)
    frozen, params = variables["frozen"], variables["params"]

    def loss_fn(params, frozen, x, targets):
        y = model.apply({"params": params, "frozen": frozen}, x)
        return ref.mse(y, targets)

    expected = jax.value_and_grad(loss_fn)(params, frozen, x, targets)
    value_and_grad = jpipe.value_and_grad(
        loss_fn, 4, num_stages=2, in_axes=(None, 0, 0), devices=jax.devices()[:2]
    )
    placed = value_and_grad.place(params, frozen, x, targets)
    ref.assert_close(value_and_grad(placed, frozen, x, targets), expected, ref.FLOAT32)

    pipe = jpipe.pipeline(model, 4, num_stages=2, devices=jax.devices()[:2])
    step = pipe.train_step(ref.mse, tx)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    before = ref.on_host(state.params)
    state, metrics = step(state, x, targets)
    loss, grads = jax.value_and_grad(loss_fn)(before, frozen, x, targets)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)
    ref.assert_close((metrics["loss"], state.params), (loss, updated), ref.FLOAT32)
    ref.assert_equal(state.variables["frozen"], frozen)
