"""Small graphs: leaves of three floats, in two places.

Private names are imported because a pipeline builds no graph as small as these.
"""

import jax
import jax.numpy as jnp

from jpipe._instructions._graph import Graph
from jpipe._instructions._program import Program
from jpipe._jaxprs._computation import Computation

SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)


def function(run, *specs, name="function"):
    """A function of such leaves."""
    return Computation.from_function(name, run, *specs)


def arguments(count, place=0, donated=False):
    """A graph with so many arguments."""
    graph = Graph(jax.devices()[:2])
    return graph, [graph.argument(SPEC, place, donated=donated) for _ in range(count)]


def program(graph, outputs):
    return Program(graph, outputs)


def leaf(number, place=0):
    """An argument in its place."""
    return jax.device_put(jnp.full(3, number, jnp.float32), jax.devices()[place])


def calls(made):
    return [i for i in made.instructions if not i.is_move]


def moves(made):
    return [i for i in made.instructions if i.is_move]


ADD = function(lambda x, y: [x + y], SPEC, SPEC, name="add")
DOUBLE = function(lambda x: [2 * x], SPEC, name="double")
BOTH = function(lambda x: [jnp.sin(x), jnp.cos(x)], SPEC, name="both")
