"""Marks the ends of stages in a jaxpr, by an identity primitive with a name.

    b = name[name=jpipe boundary ] a         a mark of a user: a stage ends here
    d = name[name=jpipe boundary 0 mask] c   c leaves stage 0 of a list as its "mask"

A user's mark, `boundary`, ends a stage where it stands. The marks of a list of layers
have the number of the stage that they end, and the name of what leaves it: the entry of
a dictionary, or the name under which it was stashed.

What a stage of a list hands on unchanged has a mark at each end that it passes. Whoever
reads it reads the first of these, and is sent it straight from the stage that made it.
That is all there is to a skip connection.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.tree_util import keystr, tree_map_with_path

from .._jaxprs import _jaxpr

PyTree = Any
_MARK = "jpipe boundary "
_SCAN_ADVICE = (
    "; a scan over stacked layers is divided between its iterations without any mark: "
    "leave jpipe.boundary out, and type the number of stages, num_stages="
)


def boundary(x: PyTree) -> PyTree:
    """Marks the place between two stages; returns its argument.

    Call it in a loss function that `jpipe.value_and_grad` divides, or in a model that
    `jpipe.pipeline` does. Where there are marks, the stages are what is between them: a
    scan over layers, which is divided between its iterations elsewhere, is in one.

    Args:
      x: any pytree of arrays, such as the output of a block.

    Returns:
      ``x``.

    Raises:
      ValueError: when the function is traced, if a mark is in a loop or a branch.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> jpipe.boundary(jnp.ones(3)).shape
      (3,)
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _MARK), x)


def mark_stage_end(stage: int, trees: Sequence[PyTree]) -> Sequence[PyTree]:
    """Marks what leaves a stage; its end has a mark even if there are no leaves.

    Args:
      stage: the number of the stage.
      trees: the trees that leave it; the name of a leaf is that of the entry of its
        tree.
    """

    def mark(path: Any, leaf: Any) -> Any:
        name = keystr(path[1:2], simple=True)
        return checkpoint_name(leaf, f"{_MARK}{stage} {name}")

    checkpoint_name(np.zeros((), np.float32), f"{_MARK}{stage} ")
    return tree_map_with_path(mark, trees)


def is_mark(eqn: core.JaxprEqn) -> bool:
    """True if an equation marks a value."""
    return eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK)


def read_first_marks(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The jaxpr of a list whose equations read outputs at the first of their marks.

    The other marks stay where they are, and nobody reads them.
    """
    # marked value -> the value of its first mark
    first_marks: dict[core.Var, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else first_marks.get(atom, atom)

    eqns = list[core.JaxprEqn]()
    for eqn in closed.jaxpr.eqns:
        eqn = eqn.replace(invars=[*map(read, eqn.invars)])
        eqns.append(eqn)
        if _ends_stage_of_list(eqn):
            marked: Any = eqn.outvars[0]
            value: Any = eqn.invars[0]
            was_marked = not isinstance(value, core.Literal) and value in first_marks
            first_marks[marked] = value if was_marked else marked
    outvars = [*map(read, closed.jaxpr.outvars)]
    jaxpr = closed.jaxpr.replace(eqns=eqns, outvars=outvars)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def boundary_positions(closed: core.ClosedJaxpr) -> list[int]:
    """The indices of the equations right behind each group of a user's marks.

    Raises:
      ValueError: if a mark is in a loop or a branch.
    """
    eqns = closed.jaxpr.eqns
    for eqn in eqns:
        if has_inner_marks(eqn):
            advice = _SCAN_ADVICE if eqn.primitive.name == "scan" else ""
            raise ValueError(
                f"jpipe.boundary is called inside {eqn.primitive.name}; a stage "
                f"ends between two operations of the whole function: call it outside "
                f"of loops and branches{advice}"
            )
    return [
        index + 1
        for index in range(len(eqns) - 1)
        if is_mark(eqns[index]) and not is_mark(eqns[index + 1])
    ]


def has_inner_marks(eqn: core.JaxprEqn) -> bool:
    """True if there are marks in the jaxprs of an equation."""
    for closed in _jaxpr.inner_jaxprs(eqn):
        for inner_eqn in closed.jaxpr.eqns:
            if is_mark(inner_eqn) or has_inner_marks(inner_eqn):
                return True
    return False


def drop_unread_eqns(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation, without equations that neither results nor marks need."""
    outvars = closed.jaxpr.outvars
    marks = [eqn for eqn in closed.jaxpr.eqns if is_mark(eqn) or has_inner_marks(eqn)]
    needed = _jaxpr.dce_jaxpr(closed, [*outvars, *_jaxpr.outvars_of(marks)])
    jaxpr = needed.jaxpr.replace(outvars=outvars)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def without_marks(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
    """The rule for `_jaxpr.evaluate` by which marks do nothing."""
    return list if is_mark(eqn) else None


def stage_ends(closed: core.ClosedJaxpr) -> dict[int, int]:
    """Number of a stage -> the index of the first equation behind its end."""
    ends = dict[int, int]()
    for index, eqn in enumerate(closed.jaxpr.eqns):
        if _ends_stage_of_list(eqn):
            stage, _ = _mark_words(eqn)
            ends[int(stage)] = index + 1
    return ends


def entry_names(closed: core.ClosedJaxpr) -> dict[core.Var, str]:
    """Variable that leaves a stage of a list -> its first name that is not empty.

    What leaves one stage as its whole output may leave the next as a part of it.
    """
    names = dict[core.Var, str]()
    for eqn in filter(_ends_stage_of_list, closed.jaxpr.eqns):
        _, name = _mark_words(eqn)
        for var in _jaxpr.variables([*eqn.invars, *eqn.outvars]):
            names[var] = names.get(var) or name
    return names


def _ends_stage_of_list(eqn: core.JaxprEqn) -> bool:
    return is_mark(eqn) and eqn.params["name"] != _MARK


def _mark_words(eqn: core.JaxprEqn) -> list[str]:
    """The number of the stage and the name in a mark of a list of layers."""
    return eqn.params["name"].removeprefix(_MARK).split(" ", 1)
