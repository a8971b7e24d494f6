"""Programs that are compiled ahead, side by side, and what is then known."""

import collections
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.experimental.compilation_cache import compilation_cache

import jpipe
from jpipe._instructions import _compile, _progress
from jpipe._run import _initialize

from .. import reference as ref


def made(schedule="1f1b"):
    layers = [ref.dense(6), jnp.tanh, ref.dense(6), ref.dense(4)]
    return jpipe.pipeline(layers, 4, balance=[2, 1, 1], schedule=schedule)


@pytest.fixture
def compiled(monkeypatch):
    """What XLA compiles, by name, with nothing compiled before."""
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    names = []
    timed = _compile._timed

    def noting(lowered, *options):
        names.append(lowered.as_text().split("@", 1)[1].split(" ", 1)[0])
        return timed(lowered, *options)

    monkeypatch.setattr(_compile, "_timed", noting)
    return names


def calls(pipe, x, targets):
    """All that can be compiled ahead, with arguments."""
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    return {
        "apply": (pipe.apply, (state.variables, x)),
        "value_and_grad": (
            pipe.value_and_grad(ref.mse),
            (state.variables, x, targets),
        ),
        "train_step": (pipe.train_step(ref.mse, tx), (state, x, targets)),
    }


@pytest.mark.parametrize("name", ["apply", "value_and_grad", "train_step"])
def test_the_first_call_compiles_nothing_more(name, compiled):
    pipe, (x, targets) = made(), ref.regression(8)
    function, args = calls(pipe, x, targets)[name]
    compiled.clear()
    report = pipe.compile(function, *args)
    assert len(compiled) == len(report.programs) > 2
    assert all(program.seconds > 0 for program in report.programs)
    assert report.flops > 0
    assert report.seconds > 0
    assert [device for device, _ in report.peak_bytes] == ["cpu:0", "cpu:1", "cpu:2"]
    assert str(report).splitlines()[0].split()[:2] == ["program", "device"]
    compiled.clear()
    function(*args)
    assert not compiled


def test_what_was_called_can_be_asked_for_what_is_known(compiled):
    pipe, (x, targets) = made(), ref.regression(8)
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    state, _ = step(state, x, targets)
    compiled.clear()
    assert pipe.compile(step, state, x, targets).flops > 0
    assert compiled == []


def test_shapes_are_enough():
    pipe, (x, targets) = made(), ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    specs = jax.eval_shape(lambda: (variables, x, targets))
    gradient = pipe.value_and_grad(ref.mse)
    report = pipe.compile(gradient, *specs)
    backwards = [p for p in report.programs if "backward" in p.name]
    assert sum(program.calls for program in backwards) == 3 * 4
    value = gradient(variables, x, targets)
    layers = [ref.dense(6), jnp.tanh, ref.dense(6), ref.dense(4)]
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets)
    ref.assert_close(value, expected, ref.FLOAT32)


def test_the_same_step_made_again_compiles_nothing(compiled):
    """As a cell of a notebook does."""
    x, targets = ref.regression(8)
    results = []
    for _ in range(2):
        compiled.clear()
        pipe = made()
        function, args = calls(pipe, x, targets)["train_step"]
        results.append(function(*args))
    assert not compiled
    ref.assert_equal(*results)


@pytest.fixture
def unsaved():
    """JAX reads no executables from a directory."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def trained():
    """A state after a step on five devices whose norms cross them, and the report."""
    layers = [ref.dense(6), *[nn.Dense(6) for _ in range(3)], ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:5])
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    x = jax.random.normal(jax.random.key(1), (4, 6))
    given = pipe.init_train_state(jax.random.key(0), x, tx), x, jnp.ones((4, 4))
    step = pipe.train_step(ref.mse, tx)
    report = pipe.compile(step, *given)
    return step(*given), report


def test_equal_programs_of_several_devices_are_compiled_once(
    compiled, unsaved, monkeypatch
):
    """Those of equal stages, and of an optimizer: other devices load the first."""
    found, report = trained()
    assert all(program.seconds > 0 for program in report.programs)
    assert found[0].params[2]["kernel"].devices() == {jax.devices()[2]}
    once = collections.Counter(compiled)
    assert once["jit_stage1_2_3_forward"] == once["jit_stage1_2_3_backward_add_grads"]
    assert once["jit_stage1_2_3_forward"] == 1
    compiled.clear()
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    monkeypatch.setattr(_compile._compat, "can_load", lambda *_: False)
    expected, _ = trained()
    ref.assert_equal(found, expected)
    each = collections.Counter(compiled)
    assert each["jit_stage1_2_3_forward"] == 3
    assert each["jit_optimizer_update"] == 13
    assert once["jit_optimizer_update"] == 6


def test_what_jax_keeps_in_a_directory_is_not_loaded_for_another_device(
    compiled, unsaved, tmp_path, monkeypatch
):
    """XLA for CPU loads it once, and finds nothing in what it makes of that."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    found = []
    for _ in range(2):
        monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
        found.append(trained()[0])
    ref.assert_equal(*found)


def test_what_cannot_be_loaded_is_compiled(compiled, unsaved, monkeypatch):
    expected, _ = trained()
    assert compiled.count("jit_stage1_2_3_forward") == 1
    compiled.clear()
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    name = "jax.experimental.serialize_executable.serialize"
    monkeypatch.setattr(name, lambda compiled: 1 / 0)
    found, _ = trained()
    assert compiled.count("jit_stage1_2_3_forward") == 3
    ref.assert_equal(found, expected)


def test_variables_are_compiled_side_by_side_equal_ones_once(monkeypatch):
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    timed, threads, options = _compile._timed, [], []

    def noting(lowered, given):
        threads.append(threading.current_thread())
        options.append(given)
        return timed(lowered, given)

    monkeypatch.setattr(_compile, "_timed", noting)
    layers = [ref.dense(6), ref.dense(6), ref.dense(6), jnp.tanh, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 4, devices=jax.devices()[:1] * 5)
    pipe.init(jax.random.key(0), ref.regression(8)[0])
    assert len(threads) == 3  # of five inputs, of six, and the last
    assert threading.main_thread() not in threads
    assert options == [{"xla_backend_optimization_level": 1}] * 3


def test_what_draws_them_gives_the_bits_of_a_program_that_is_optimized(monkeypatch):
    layers = [nn.Conv(8, (3, 3)), nn.Conv(5, (3, 3)), nn.Dense(7), nn.Dense(300)]
    x = jax.ShapeDtypeStruct((2, 6, 6, 5), jnp.float32)
    found = []
    for _ in range(2):
        monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
        pipe = jpipe.pipeline(layers, 1, devices=jax.devices()[:1] * 4)
        found.append(pipe.init(jax.random.key(0), x))
        monkeypatch.setattr(_initialize, "drawing_options", lambda device: None)
    ref.assert_equal(*found)


@pytest.fixture
def one_by_one(monkeypatch):
    """What XLA begins to compile; the first waits until a pool takes no more."""
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    monkeypatch.setattr(_compile.os, "cpu_count", lambda: 1)
    timed, begun, over = _compile._timed, [], threading.Event()

    class Pool(_compile.ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            over.set()
            super().shutdown(wait=wait)

    def waiting(lowered, options):
        begun.append(lowered)
        assert over.wait(600)
        return timed(lowered, options)

    monkeypatch.setattr(_compile, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(_compile, "_timed", waiting)
    return begun


def test_where_something_is_raised_what_has_not_begun_is_left(one_by_one, monkeypatch):
    layers = [ref.dense(width) for width in (5, 6, 7, 8)]
    pipe = jpipe.pipeline(layers, 1, devices=jax.devices()[:1] * 4)
    x, made = jnp.ones((2, 4)), []
    init_with = _initialize.init_with

    def interrupted(*args):
        made.append(args)
        if len(made) == 4:
            raise KeyboardInterrupt
        return init_with(*args)

    monkeypatch.setattr(_initialize, "init_with", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.init(jax.random.key(0), x)
    # Of three, one was compiled, and is kept.
    assert len(one_by_one) == len(_compile._executables) == 1


def test_what_xla_cannot_compile_is_raised_and_the_rest_is_kept(monkeypatch):
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    timed, begun = _compile._timed, []

    def failing(lowered, options):
        begun.append(lowered)
        if len(begun) == 2:
            raise MemoryError("too large")
        return timed(lowered, options)

    layers = [ref.dense(width) for width in (5, 6, 7)]
    pipe = jpipe.pipeline(layers, 1, devices=jax.devices()[:1] * 3)
    x = jnp.ones((2, 4))
    with monkeypatch.context() as patched:
        patched.setattr(_compile, "_timed", failing)
        with pytest.raises(MemoryError, match="too large"):
            pipe.init(jax.random.key(0), x)
    assert len(_compile._executables) == len(begun) - 1
    assert len(pipe.init(jax.random.key(0), x)) == 3


def test_two_ways_to_compile_one_text_are_two_executables(monkeypatch):
    monkeypatch.setattr(_compile, "_executables", _compile.OrderedDict())
    traced = jax.jit(jnp.sin).trace(1.0)
    with _compile.compiling() as add:
        made = [
            add(traced, jax.devices()[0], options)
            for options in (None, {"xla_backend_optimization_level": 1}, None)
        ]
    assert made[0] is made[2] is not made[1]
    assert all(each.run(1.0) == pytest.approx(jnp.sin(1.0)) for each in made)


def test_what_calls_python_is_compiled_for_each(compiled, capfd):
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


def test_executables_are_not_kept_without_end(compiled, monkeypatch):
    monkeypatch.setattr(_compile, "_MOST", 3)
    pipe, (x, targets) = made(), ref.regression(8)
    function, args = calls(pipe, x, targets)["train_step"]
    function(*args)
    assert len(_compile._executables) == 3


def test_what_cannot_be_compiled_is_refused():
    pipe, (x, _) = made(), ref.regression(8)
    with pytest.raises(TypeError, match=r"pipe\.compile takes what"):
        pipe.compile(lambda x: x, x)
    with pytest.raises(TypeError, match="and its arguments; not <bound method"):
        pipe.compile(pipe.init, x)


def test_it_is_said_on_a_terminal_how_far_compiling_has_come(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "_LONG", -1.0)
    monkeypatch.setattr(_progress.sys.stderr, "isatty", lambda: True, raising=False)
    with _progress.Progress("programs compiled") as progress:
        progress.say(1, 2)
        progress.say(2, 2)
    said = capsys.readouterr().err
    assert "jpipe: 1 of 2 programs compiled in 0 s" in said
    assert said.endswith("\r\x1b[K")
