"""The strictest JAX, on eight CPU devices, before anything touches a device.

And what makes it quick: two thirds of the time would go to compiling what another test
has compiled already. XLA compiles with flags that users do not set; with
``JPIPE_TESTS_FLAGS=`` it compiles as it does for them.

`_compat.copier` is imported because a move by it calls no function of JAX that can be
counted instead.
"""

import gc
import os
import shutil
from pathlib import Path

import jax
import jaxlib
import pytest
from hypothesis import settings

from jpipe import _compat

from .reference import unoptimized

# XLA reads its flags when it starts, in this process and in those that tests start.
# With the emitters that it had before, which later ones have not, and one part of a
# program at a time, it compiles `stage/test_remat_modes` in a third of the time.
_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if jaxlib.version.__version_info__ < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
flags = os.environ.get("JPIPE_TESTS_FLAGS", " ".join(_FLAGS))
# A blank alone would be the name of a file.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

# Random examples of one test; `make test-all` takes the profile "all".
settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("all", max_examples=300, deadline=None)
settings.load_profile("default")

jax.config.update("jax_num_cpu_devices", 8)
# No silent promotion of dtypes: a library that mixes them by accident is caught.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_default_matmul_precision", "highest")

# Programs that are equal to the letter, for the same devices and options, are compiled
# once: many tests run the same few layers, and the next run reads what this one left.
# Tracing and lowering are not saved, and log the same. Each worker of pytest-xdist has
# a folder of its own, as entries are not written at one stroke.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "jax"
LARGEST = 2**30
if "PYTEST_XDIST_WORKER" not in os.environ:
    sizes = [path.stat().st_size for path in PROGRAMS.rglob("*-cache")]
    if sum(sizes) > LARGEST:
        shutil.rmtree(PROGRAMS)
worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS / worker))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# The Python lines that an operation comes from, which only a profile of XLA shows.
jax.config.update("jax_traceback_in_locations_limit", 0)
# JAX keeps all that it traced: to look through it every 700 objects takes a tenth of
# the time. Arrays do not wait for that, as they are in no cycle.
gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def forgetting():
    """What JAX traced for one file is not kept for the next: 3 GiB in 500 tests."""
    yield
    jax.clear_caches()


@pytest.fixture
def double():
    """Double precision, where the arithmetic allows comparisons at 1e-12.

    XLA leaves out most of its optimizations, which halves the time to compile: these
    tests ask for the numbers of many programs, the others for the programs.
    """
    with unoptimized(), jax.enable_x64(True):
        yield


@pytest.fixture
def quick():
    """Single precision as it is, by programs that XLA hardly optimizes."""
    with unoptimized():
        yield


@pytest.fixture
def small_heap():
    """For `jax.check_tracer_leaks`, which collects all garbage after each trace.

    What was there before the test holds no tracer of it, and need not be looked
    through: what the tests of an hour have left takes longer than the test.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def moved(monkeypatch):
    """The size and the target of every array that pipelines move, made after this."""
    moved = []
    put, copier = jax.device_put, _compat.copier

    def counting_put(tree, device=None, **options):
        # A Python number is not of a pipeline: it finds out how devices copy.
        leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size")]
        target = getattr(device, "device_set", {device})
        moved.extend((leaf.size, *target) for leaf in leaves)
        return put(tree, device, **options)

    def counting_copier(source, targets):
        copy = copier(source, targets)
        assert copy is not None

        def counting(*leaves):
            for leaf, target in zip(leaves, targets, strict=True):
                moved.append((leaf.size, *target.device_set))
            return copy(*leaves)

        return counting

    monkeypatch.setattr(jax, "device_put", counting_put)
    monkeypatch.setattr(_compat, "copier", counting_copier)
    return moved
