"""Two processes of one core each: how fast arrays pass, plans tuned, and steps timed.

    process 0, a core    stage 0  ──activations──▶  stage 1    process 1, a core
                                  ◀───gradients───

`python -m jpipe launch` starts them. Both tune the model under each limit, compile all
ways with the tuned plans among them, and take steps of these in turns: one that is not
timed, as another way ran before it, and some as a training loop takes them, which waits
for the last one alone. Each writes what it has measured to a file.
"""

import argparse
import dataclasses
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.experimental import multihost_utils

import jpipe
from jpipe._api._process_link import measure_process_link

from ..peers.measure import pin
from ..steps import take_turns
from .models import MODELS
from .ways import Tuned, Way, add_way, plan_way, square

# A visit of the slowest way is predicted to take so many seconds. All ways take as many
# steps in a visit.
VISIT_SECONDS = 0.4
MOST_STEPS = 20


class Runner:
    """One way, compiled, and ready to be visited.

    A process that runs no stage of it only waits for the other.

    Args:
      way: the way.
      layers: the model.
      x: the mini-batch.

    Attributes:
      num_bytes: name of a device -> the most bytes that it holds, with the workspace of
        its largest program as far as this process compiles it.
      loss: that of the first step; ``None`` if this process runs no stage.
    """

    def __init__(self, way: Way, layers: list[Any], x: jax.Array) -> None:
        self.num_bytes: dict[str, int] = {}
        self.loss: float | None = None
        pipe = way.build(layers)
        self._x = x
        self._takes_part = not set(jax.local_devices()).isdisjoint(pipe.devices)
        if not self._takes_part:
            return
        tx = optax.sgd(1e-3)
        self._state = pipe.init_train_state(jax.random.key(0), x, tx)
        self._step = pipe.train_step(square, tx)
        report = self._step.compile(self._state, x, ())
        workspace: dict[str, int] = defaultdict(int)
        for program in report.programs:
            num_bytes = program.workspace_bytes or 0
            workspace[program.device] = max(workspace[program.device], num_bytes)
        self.num_bytes = {
            device: peak + workspace[device] for device, peak in report.peak_bytes
        }
        self.loss = float(self._take_steps(1)["loss"])

    def visit(self, num_steps: int) -> float:
        """The seconds of a step, of so many in a row."""
        seconds = 0.0
        if self._takes_part:
            self._take_steps(1)
            begin = time.perf_counter()
            self._take_steps(num_steps)
            seconds = (time.perf_counter() - begin) / num_steps
        multihost_utils.sync_global_devices("visit")
        return seconds

    def _take_steps(self, num_steps: int) -> dict[str, Any]:
        """The metrics of the last of some steps, when all is done."""
        metrics: dict[str, Any] = {}
        for _ in range(num_steps):
            self._state, metrics = self._step(self._state, self._x, ())
        jax.block_until_ready((self._state, metrics))
        return metrics


class TunedPlans:
    """Plans of `jpipe.tune`, as users type it, in this pair of processes.

    Args:
      name: of the model.
      layers: the model.
      x: the mini-batch.
      ways: the ways to run it; plans that no way equals are added.
    """

    def __init__(self, name: str, layers: list[Any], x: Any, ways: list[Way]) -> None:
        self._name = name
        self._layers = layers
        self._x = x
        self._ways = ways

    def tune(self, limit: int | None) -> Tuned:
        """Tunes the model under a limit of bytes."""
        tx = optax.sgd(1e-3)
        multihost_utils.sync_global_devices("tune")
        start = time.perf_counter()
        try:
            plan = jpipe.tune(self._layers, self._x, (), square, tx, memory_limit=limit)
        except ValueError as error:
            seconds = time.perf_counter() - start
            say(f"{self._name}: nothing fits {limit} bytes, {seconds:.0f} s")
            return Tuned(limit, seconds, refusal=str(error))
        seconds = time.perf_counter() - start
        way = plan_way(plan)
        say(f"{self._name}: tuned for {limit} bytes, {seconds:.0f} s: {way}")
        assert plan.forecast is not None
        trials = [
            (trial.predicted, trial.seconds)
            for trial in plan.forecast.trials
            if trial.seconds is not None
        ]
        return Tuned(limit, seconds, add_way(self._ways, way), way.seconds, trials)

    def tune_all(self, limits: Sequence[int | None]) -> list[Tuned]:
        """Tunes the model under limits, the largest first.

        Where nothing fits, nothing fits a smaller limit: that is not tried.
        """
        tuned: list[Tuned] = []
        for limit in limits:
            if any(earlier.refusal for earlier in tuned):
                tuned.append(Tuned(limit, None))
            else:
                tuned.append(self.tune(limit))
        return tuned


def measure_model(name: str, path: Path, rounds: int) -> dict[str, Any]:
    """Tunes a model, and times all ways to run it in turns.

    Args:
      name: of the model.
      path: the file of `ways`; or of an earlier result, whose tuned plans are kept.
      rounds: how many count.

    Returns:
      ``"tuned"``: the fields of each `Tuned`, ``"ways"``: those of each `Way`, and
      ``"measured"``: for each way the seconds of its steps, one number a round, the
      loss of its first step, and the bytes of devices by their names.
    """
    layers, x = MODELS[name]()
    fields = json.loads(path.read_text())
    ways = [Way(**way_fields) for way_fields in fields["ways"]]
    if "tuned" in fields:
        tuned = [Tuned(**tuned_fields) for tuned_fields in fields["tuned"]]
    else:
        limits = [planned["limit"] for planned in fields["planned"]]
        tuned = TunedPlans(name, layers, x, ways).tune_all(limits)

    start = time.perf_counter()
    runners = [Runner(way, layers, x) for way in ways]
    say(f"{name}: {len(ways)} ways compiled, {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    slowest = max(way.seconds for way in ways)
    num_steps = min(max(1, round(VISIT_SECONDS / slowest)), MOST_STEPS)
    visits = {
        str(index): functools.partial(runner.visit, num_steps)
        for index, runner in enumerate(runners)
    }
    seconds = take_turns(visits, rounds)
    say(f"{name}: {rounds} rounds, {time.perf_counter() - start:.0f} s")
    measured = [
        {
            "seconds": seconds[str(index)],
            "loss": runner.loss,
            "bytes": runner.num_bytes,
        }
        for index, runner in enumerate(runners)
    ]
    return {
        "tuned": list(map(dataclasses.asdict, tuned)),
        "ways": list(map(dataclasses.asdict, ways)),
        "measured": measured,
    }


def say(text: str) -> None:
    """Prints how far the first process is."""
    if jax.process_index() == 0:
        print(text, flush=True)


def main() -> None:
    """Runs one process of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=json.loads, default=[])
    parser.add_argument(
        "--model", help="is tuned and timed; left out, the link is timed"
    )
    parser.add_argument("--ways", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    number = int(os.environ["JPIPE_PROCESS"])
    pin(options.cores[number : number + 1])
    jpipe.distributed()
    if options.model is None:
        link = measure_process_link(*jax.devices()[:2])
        # The first process knows it.
        result: Any = link and {"latency": link.latency, "bandwidth": link.bandwidth}
    else:
        result = measure_model(options.model, options.ways, options.rounds)
    (options.out / f"{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
