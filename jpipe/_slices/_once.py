"""What follows from parameters once in a step, and its cotangents."""

from jax.extend import core

from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _jaxpr
from .._placed._function import PlacedFunction, Placement
from .._run._pipe import Pipe
from ._stages import Stages, pull_once

Values = list[Value]


class Once:
    """The weights of a program, written into a graph.

    They are its parameters, and after these what follows from them once in a step.

    Args:
      graph: where they are written.
      pipe: the schedule and the devices.
      stages: what runs.
      params: the parameters, as values.
    """

    def __init__(
        self, graph: Graph, pipe: Pipe, stages: Stages, params: Values
    ) -> None:
        self.graph, self.pipe, self.stages, self.params = graph, pipe, stages, params

    def place(self, weight: int) -> Place:
        """Where a weight is."""
        return self.pipe.place(self.stages.owner_stages[weight])

    def values(self) -> Values:
        """What follows from parameters once in a step, each where it is read first."""
        closed, params = self.stages.once, self.params
        if not closed.jaxpr.outvars:
            return []
        at = [self.place(i) for i in range(len(params))]
        ends = [self.place(len(at) + k) for k in range(len(closed.jaxpr.outvars))]
        function = core.jaxpr_as_fun(closed)
        specs = [self.graph.specs[value] for value in params]
        placement = Placement(at, lambda _: (ends, [WHOLE] * len(ends)))
        placed = PlacedFunction(function, specs, placement, "once")
        return placed.into(self.graph, params)

    def pull(self, cotangents: dict[int, Value]) -> dict[int, Value]:
        """What the gradients of values that were computed once add to parameters."""
        stages, count = self.stages, len(self.params)
        if not cotangents:
            return {}
        live = _jaxpr.live_inputs(stages.once)
        pairs = zip(stages.trained[:count], live, strict=True)
        trained = [yes and read for yes, read in pairs]
        wanted = [
            count + k in cotangents for k in range(len(stages.once.jaxpr.outvars))
        ]
        pull = pull_once(stages.once, trained, wanted)
        given = [*cotangents.values()]
        at = [
            [self.place(i) for i in range(count)],
            [self.place(weight) for weight in cotangents],
        ]
        numbers = [i for i, yes in enumerate(trained) if yes]
        ends = [at[0][i] for i in numbers], [*map(self.sharding, numbers)]
        specs = [[self.graph.specs[v] for v in part] for part in (self.params, given)]
        placement = Placement([*at[0], *at[1]], lambda _: ends)
        placed = PlacedFunction(pull, specs, placement, "once_backward")
        grads = placed.into(self.graph, [*self.params, *given])
        return dict(zip(numbers, grads, strict=True))

    def sharding(self, weight: int) -> Sharding:
        """The sharding of the gradient of a weight: that between steps."""
        at_rest = weight < len(self.params)
        return self.graph.shardings[self.params[weight]] if at_rest else WHOLE
