"""What one accelerator shows: run it with ``make bench-gpu``; JSON comes out.

Every part runs in a process of its own, so that each starts with an empty allocator
and one that fails leaves the others alone. What does not fit in the time is left out
and named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .result import SCALES

MODELS = {
    "resnet101": ("resnet101-speed", "pipeline-1", 0.853),
    "unet": ("unet-speed", "pipeline-1", 0.858),
    "amoebanetd": ("amoebanetd-speed", "n2m4", None),
}
MEMORY = {"amoebanetd": "amoebanetd-memory", "unet": "unet-memory"}
# The quick ones first.
PARTS = (
    "overhead",
    "step-resnet101-float32",
    "stages-resnet101",
    *(f"memory-{model}" for model in MEMORY),
    "step-unet-float32",
    "step-amoebanetd-float32",
    *(f"step-{model}-bfloat16" for model in MODELS),
)


def main() -> None:
    """Runs all parts, or one in this process."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--scale", default="full", choices=SCALES)
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--seconds", type=float, default=570, help="for all parts")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"))
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    options = parser.parse_args()
    if options.here:
        (part,) = options.part
        print(json.dumps(run_part(part, options.scale, options.steps)))
        return
    result = run_parts(options.part or PARTS, options)
    for part, reason in result["left out"].items():
        print(f"left out: {part}: {reason}")
    if result["left out"]:
        raise SystemExit(1)


def run_parts(parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs parts one after the other, and keeps what is there after each.

    Args:
      parts: their names.
      options: what was typed.

    Returns:
      What came out of each part, or why it is missing.
    """
    deadline = time.monotonic() + options.seconds
    result: dict[str, Any] = {"parts": {}, "left out": {}}
    with tempfile.TemporaryDirectory() as programs:
        for number, part in enumerate(parts, start=1):
            print(f"[{number}/{len(parts)}] {part}", flush=True)
            # No part may take the time of all others.
            left = min(deadline - time.monotonic(), options.seconds / 3)
            try:
                found = _in_process(part, options, left, programs)
            except RuntimeError as error:
                result["left out"][part] = str(error)
            else:
                result["provenance"] = found.pop("provenance")
                result["parts"][part] = found
                print(f"  {found}", flush=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _in_process(
    part: str, options: argparse.Namespace, seconds: float, programs: str
) -> dict[str, Any]:
    if seconds < 10:
        raise RuntimeError("no time left")
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--part", part]
    command += ["--scale", options.scale, "--steps", str(options.steps)]
    given = {
        # Some parts compile the same programs.
        "JAX_COMPILATION_CACHE_DIR": programs,
        # Plain steps at published batches need nearly all of the memory.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | given,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {seconds:.0f} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_part(part: str, scale: str, steps: int) -> dict[str, Any]:
    """One part, and where it ran."""
    from .provenance import provenance

    kind, _, rest = part.partition("-")
    model, _, dtype = rest.partition("-")
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: one_stage(model, dtype, scale, steps),
        "overhead": dispatch,
        "memory": lambda: memory(model, scale),
        "stages": lambda: eight_stages(scale, steps),
    }
    return runs[kind]() | {"provenance": provenance()}


def one_stage(model: str, dtype: str, scale: str, steps: int) -> dict[str, Any]:
    """Pipeline-1 against the plain jitted step, here on the same mini-batch.

    torchgpipe's ratio is of two mini-batches, each the largest that fitted.
    """
    benchmark, row, published = MODELS[model]
    setting = _setting(benchmark, row, scale, {"dtype": dtype})
    plain = _plain(setting, steps)
    piped = _piped(setting, (len(setting.work.layers),), steps)
    return {
        "batch": setting.batch,
        "micro-batches": setting.microbatches,
        "plain samples/s": plain,
        "pipeline-1 samples/s": piped,
        "ratio": piped / plain,
        "torchgpipe's ratio": published,
    }


def eight_stages(scale: str, steps: int) -> dict[str, Any]:
    """ResNet-101 in eight stages, all on the one device, by one stage."""
    setting = _setting("resnet101-speed", "pipeline-1", scale, {})
    eight = _setting("resnet101-speed", "pipeline-8", scale, {}).balance
    one = _piped(setting, (len(setting.work.layers),), steps)
    several = _piped(setting, eight, steps)
    return {
        "one stage, samples/s": one,
        "eight stages, samples/s": several,
        "ratio": several / one,
    }


def dispatch() -> dict[str, Any]:
    """Microseconds of a step per action: four stages, all on the one device."""
    from .overhead.dispatch import dispatch_cost

    cost = dispatch_cost(16, one_device=True)
    # Nothing moves on one device.
    return {name: us for name, us in cost.items() if "device_put" not in name}


def memory(model: str, scale: str) -> dict[str, Any]:
    """The row pipeline-1 of a memory table: predicted, and the allocator's peak.

    The peak is that of the process: initial values, the search for the fastest
    convolutions and the caller's own copy of the input are in it.
    """
    import jax

    from .cells.compiled import Way, peak

    setting = _setting(MEMORY[model], "pipeline-1", scale, {})
    predicted = peak(setting, Way("gpipe", "except_last"))
    _piped(setting, setting.balance, 2)
    found = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "peak bytes": found,
        "predicted bytes": predicted.devices[0],
        "model bytes": predicted.model,
        "parameters": predicted.parameters,
    }


def _setting(name: str, row: str, scale: str, options: dict[str, Any]) -> Any:
    import dataclasses

    from .published import BY_NAME

    benchmark = BY_NAME[name]
    experiment = benchmark.row(row)
    given = dict(experiment.options) | options
    return benchmark.setting(dataclasses.replace(experiment, options=given), scale)


def _piped(setting: Any, balance: tuple[int, ...], steps: int) -> float:
    import dataclasses

    import jax

    from .cells.compiled import Way
    from .cells.measure import measure

    setting = dataclasses.replace(setting, balance=balance)
    devices = jax.devices()[:1] * len(balance)
    return measure(setting, Way("gpipe", "except_last"), devices, steps).throughput


def _plain(setting: Any, steps: int) -> float:
    """One jit over the same layers and the whole batch: no micro-batches, no remat."""
    import jax
    import optax

    import jpipe
    from jpipe._run import _variables

    from .experiment import random_key

    work = setting.work
    pipe = jpipe.sequential(work.layers)
    (stage,) = pipe._pipe.stages
    x, targets = jax.device_put(work.arrays(setting.batch))
    state = pipe.init_train_state(random_key(), x, work.tx)
    key = random_key(1)

    def step(params: Any, rest: Any, opt_state: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = _variables.merge(params, rest)
            y, changed = stage(variables, x, key, None, True)
            return work.loss(y, targets), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = work.tx.update(grads, opt_state, params)
        merged = tuple({**a, **b} for a, b in zip(rest, changed, strict=True))
        return optax.apply_updates(params, updates), merged, opt_state, value

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    carry = state.params, state.model_state, state.opt_state
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        *carry, value = compiled(*carry)
        jax.block_until_ready((carry, value))
        seconds.append(time.perf_counter() - start)
    return setting.batch / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
