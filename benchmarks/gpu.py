"""What one accelerator shows: run it with ``make bench-gpu``; JSON comes out.

Every part runs in a process of its own, so that each starts with an empty allocator
and one that fails leaves the others alone. What does not fit in the time is left out
and named.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = {
    "resnet101": ("resnet101-speed", "pipeline-1", 0.853),
    "unet": ("unet-speed", "pipeline-1", 0.858),
    "amoebanetd": ("amoebanetd-speed", "n2m4", None),
}
DTYPES = ("float32", "bfloat16")
MEMORY = {"amoebanetd": "amoebanetd-memory", "unet": "unet-memory"}
PARTS = (
    *(f"step-{model}-{dtype}" for dtype in DTYPES for model in MODELS),
    "overhead",
    *(f"memory-{model}" for model in MEMORY),
    "stages-resnet101",
)


def main() -> None:
    """Runs all parts, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", default="full", choices=["full", "small", "tiny"])
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
    deadline = time.monotonic() + options.seconds
    result: dict[str, Any] = {"parts": {}, "left out": {}}
    for number, part in enumerate(options.part or PARTS, start=1):
        print(f"[{number}/{len(options.part or PARTS)}] {part}", flush=True)
        left = deadline - time.monotonic()
        if left < 10:
            result["left out"][part] = "no time left"
            continue
        command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--part", part]
        command += ["--scale", options.scale, "--steps", str(options.steps)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            result["left out"][part] = f"not done after {left:.0f} s"
            continue
        if done.returncode:
            result["left out"][part] = done.stderr.strip().splitlines()[-1:]
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        result["provenance"] = found.pop("provenance")
        result["parts"][part] = found
        print(f"  {found}", flush=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for part, reason in result["left out"].items():
        print(f"left out: {part}: {reason}")


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
    """Pipeline-1 against the plain jitted step on the same mini-batch."""
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
    from .overhead import dispatch_cost

    return dict(dispatch_cost(16, one_device=True))


def memory(model: str, scale: str) -> dict[str, Any]:
    """The row pipeline-1 of a memory table: predicted, and the allocator's peak."""
    import jax

    from .compiled import Way, peak

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

    from .compiled import Way
    from .measure import measure

    setting = dataclasses.replace(setting, balance=balance)
    devices = jax.devices()[:1] * len(balance)
    return measure(setting, Way("gpipe", "except_last"), devices, steps).throughput


def _plain(setting: Any, steps: int) -> float:
    """The step that a user writes by hand: one jit, no micro-batches, no remat."""
    import jax
    import optax

    import jpipe
    from jpipe import _variables

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
            y, changed = stage(variables, x, key, 0, True)
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
