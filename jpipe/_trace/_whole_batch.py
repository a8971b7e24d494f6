"""Cuts a function where its arrays get the rows of the whole mini-batch.

    z = encode params x                    of a micro-batch
    y = whole_batch[axis=0 rows=8] z       a mark: from here on of the mini-batch
    t = exp params.scale
    loss = clip_loss y t                   once per step

What follows from a mark is the *tail*, a function of its own. It runs once per step, on
the operands of the marks, joined over all micro-batches. All else, the *front*, is what
stages run for each micro-batch; its results are these operands.

    front:  (*params, *batch inputs) -> (*operands of marks, *state, *once)
    tail:   (*weights, *joined)      -> (loss, *aux)

The weights of the tail are parameters, and values that are computed once per step,
which are the last results of the front. What is cheap, such as a cast, is copied into
the tail. The tail reads nothing of a single micro-batch. What is the same for all, as
an argument that is not split, it reads as the first micro-batch has it.

So any loss is exact, for the price of the operands and their cotangents, those of all
micro-batches at once, and of schedules in which each backward follows all forwards: Gao
et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.
"""

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core

from .. import _compat
from .._jaxprs import _dataflow, _jaxpr, _structural_key
from .._layers._text import shape_text
from .._messages import raise_all
from . import _boundaries
from ._traced_function import EqnKind, Tail, TracedFunction

PyTree = Any

_whole_batch_p = core.Primitive("whole_batch")
_MODEL_ADVICE = (
    "; a model that is given to jpipe.pipeline has no marks: type reduction='batch' in "
    "its value_and_grad or train_step"
)


class _Sizes(NamedTuple):
    """The numbers of examples of the trace that is running.

    Attributes:
      microbatch: the number of examples of its micro-batch; ``None``: nothing is split,
        and there is one.
      batch: the number of examples of the mini-batch.
    """

    microbatch: int | None
    batch: int


_sizes: contextvars.ContextVar[_Sizes | None] = contextvars.ContextVar(
    "sizes", default=None
)


@_whole_batch_p.def_abstract_eval
def _whole_batch_aval(x: Any, *, axis: Any, rows: int) -> Any:
    if not isinstance(axis, int):
        return x
    return x.update(shape=(*x.shape[:axis], rows, *x.shape[axis + 1 :]))


def _refuse(transformation: str) -> NoReturn:
    raise ValueError(
        f"jpipe.whole_batch is called inside {transformation}; call it in the loss "
        f"function itself, on arrays with a row for each example, and transform what "
        f"comes before or after it"
    )


_compat.refuse_transformations(_whole_batch_p, _refuse)


def whole_batch(x: PyTree, axis: Any = 0) -> PyTree:
    """Marks where arrays get the rows of the whole mini-batch; returns these arrays.

    Call it in a loss function that `jpipe.value_and_grad` divides, on all that the loss
    reads of examples. What comes before runs for each micro-batch, in stages. What
    follows runs once per step, on the last device: any loss is exact there, as one that
    compares examples. The schedule must run all forwards first: ``"gpipe"``, which a
    pipeline takes by itself, ``"looped_bfs"``, or one of your own.

    Outside of `jpipe.value_and_grad` it returns its argument.

    Args:
      x: any pytree of arrays that have a row for each example.
      axis: the axis of the examples. `jpipe.MEAN` or `jpipe.SUM`: the arrays have no
        rows, and their mean over the examples, or their sum, follows.

    Returns:
      ``x``, with the rows of all micro-batches.

    Raises:
      ValueError: when the function is traced, if an array has not a row for each
        example, or a mark is in a loop, a branch or a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> def loss_fn(w, x, y):
      ...     z, y = jpipe.whole_batch((jnp.tanh(x @ w), y))
      ...     return jnp.sqrt(jnp.mean((z - y) ** 2))  # no mean of a micro-batch
      >>> w, x, y = jnp.ones((3, 1)), jnp.eye(4, 3), jnp.zeros((4, 1))
      >>> grad_fn = jpipe.value_and_grad(loss_fn, num_microbatches=2, num_stages=1)
      >>> loss, grads = grad_fn(grad_fn.place(w, x, y), x, y)
      >>> bool(jnp.isclose(loss, loss_fn(w, x, y)))
      True
    """
    sizes = _sizes.get()
    if sizes is None:
        return x
    if hasattr(axis, "__index__"):  # an integer of NumPy, too
        axis = operator.index(axis)

    def mark(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not isinstance(axis, int):
            return _whole_batch_p.bind(leaf, axis=axis, rows=0)
        rows = leaf.shape[axis] if -leaf.ndim <= axis < leaf.ndim else None
        if sizes.microbatch is None and rows is not None:
            return _whole_batch_p.bind(leaf, axis=axis % leaf.ndim, rows=rows)
        if rows != sizes.microbatch:
            advice = (
                "name their axis, as in jpipe.whole_batch(z, 1); for what has no rows "
                "type jpipe.whole_batch(z, jpipe.MEAN) or jpipe.SUM"
            )
            if rows == sizes.batch:
                advice = f"it has those of all {rows}: mark it once{_MODEL_ADVICE}"
            raise ValueError(
                f"jpipe.whole_batch: an array {shape_text(leaf)} has not one row for "
                f"each of the {sizes.microbatch} examples of a micro-batch on axis "
                f"{axis}; {advice}"
            )
        return _whole_batch_p.bind(leaf, axis=axis % leaf.ndim, rows=sizes.batch)

    return jax.tree.map(mark, x)


@contextlib.contextmanager
def marks_of_sizes(microbatch: int | None, batch: int) -> Iterator[None]:
    """Traces marks in a function of so many examples of a mini-batch of so many."""
    token = _sizes.set(_Sizes(microbatch, batch))
    try:
        yield
    finally:
        _sizes.reset(token)


def has_marks(traced: TracedFunction) -> bool:
    """True if a function has marks.

    Raises:
      ValueError: if one is in a loop, a branch or a call.
    """
    for eqn in traced.closed.jaxpr.eqns:
        for closed in _jaxpr.inner_jaxprs(eqn):
            if _jaxpr.contains(closed, _whole_batch_p.name):
                is_checkpoint = eqn.primitive.name in _jaxpr.CHECKPOINTS
                _refuse("jax.checkpoint" if is_checkpoint else eqn.primitive.name)
    return any(map(_is_mark, traced.closed.jaxpr.eqns))


# ------------------------------------------------------------------------ the division


def split_tails(
    traced_functions: Mapping[int, TracedFunction],
    *,
    is_split: Sequence[bool],
    has_parts: bool,
    aux_of: Callable[[TracedFunction], PyTree],
    without_aux: Callable[[TracedFunction], PyTree],
) -> dict[int, TracedFunction]:
    """Splits a function at its marks, traced on micro-batches of each size.

    Args:
      traced_functions: micro-batch size -> trace; the first micro-batch first.
      is_split: one bool per leaf of the mini-batch; True if it is split by examples.
      has_parts: True if there is more than one micro-batch.
      aux_of: ``trace -> specs of aux``, without the state that is written.
      without_aux: ``trace -> specs of the results behind aux``, as a tree of aux.

    Returns:
      The front by size, with the tail in it.

    Raises:
      ValueError: if the tail reads what differs between micro-batches, or is not the
        same for all sizes.
    """
    fronts = dict[int, TracedFunction]()
    for size, traced in traced_functions.items():
        splitter = _Splitter(traced, is_split, has_parts=has_parts)
        fronts[size] = splitter.split(aux_of(traced), without_aux(traced))
    keys = [_key_of_tail(front.tail) for front in fronts.values()]
    if any(key != keys[0] for key in keys):
        raise ValueError(
            "what follows jpipe.whole_batch, or loss_fn with reduction='batch', runs "
            "once, and differs between micro-batches of different sizes: read the "
            "number of examples of a marked array there, len(z), and not of x"
        )
    return fronts


def _key_of_tail(tail: Tail | None) -> Any:
    assert tail is not None
    return _structural_key.structural_key(tail.closed), tail.axes


class _Splitter:
    """The division of one traced function into a front and a tail.

    Args:
      traced: the function.
      is_split: one bool per leaf of the mini-batch; True if it is split by examples.
      has_parts: True if there is more than one micro-batch.
    """

    def __init__(
        self, traced: TracedFunction, is_split: Sequence[bool], *, has_parts: bool
    ) -> None:
        jaxpr = traced.closed.jaxpr
        self._traced = traced
        self._has_parts = has_parts
        self._eqns = [eqn for eqn in jaxpr.eqns if not _is_mark(eqn)]
        # The variables that differ between micro-batches by their examples.
        roots = list(itertools.compress(traced.batch_inputs, is_split))
        if not any(is_split):  # there is one micro-batch, which has all examples
            roots += traced.batch_inputs
        if traced.captures_batch:
            roots += traced.captured_vars
        roots += _jaxpr.outvars_of(eqn for eqn in jaxpr.eqns if eqn.effects)
        self._of_examples = _dataflow.dependents(jaxpr, roots)
        # result of a mark -> its operand, if that is the same for all micro-batches
        self._unmarked: dict[core.Var, Any] = {}
        # (operand, axis) of other marks -> an input of the tail
        self._joined: dict[tuple[core.Var, Any], core.Var] = {}
        # result of such a mark -> the first mark of the same operand and axis
        self._first_marks: dict[core.Var, core.Var] = {}
        marks = [eqn for eqn in jaxpr.eqns if _is_mark(eqn)]
        behind_any = _jaxpr.descendants(jaxpr, _jaxpr.outvars_of(marks))
        for eqn in marks:
            self._add_mark(eqn, behind_any)
        # The variables that follow from joined arrays.
        self._behind = _jaxpr.descendants(jaxpr, self._first_marks)

    def _add_mark(self, eqn: core.JaxprEqn, behind_any: set[core.Var]) -> None:
        """Adds a mark.

        Args:
          eqn: the mark.
          behind_any: the variables that follow from any mark.
        """
        operand: Any = eqn.invars[0]
        axis = eqn.params["axis"]
        operands = _jaxpr.variables([operand])
        if operands & behind_any:
            raise ValueError(
                f"jpipe.whole_batch: {_describe(operand)} follows from "
                f"jpipe.whole_batch, and has the rows of the whole mini-batch already; "
                f"leave the second mark out{_MODEL_ADVICE}"
            )
        if operands & self._of_examples:
            if axis is None:
                raise ValueError(
                    f"jpipe.whole_batch: {_describe(operand)} has axis None, as what "
                    f"is the same for all examples, and each micro-batch makes "
                    f"another; name the axis of the examples, or type jpipe.MEAN for a "
                    f"mean over them, jpipe.SUM for a sum (of a pipeline in out_axes= "
                    f"and target_axes=)"
                )
        elif not isinstance(axis, int):
            self._unmarked[eqn.outvars[0]] = operand
            return
        elif operand in self._traced.vars_of_params:
            raise ValueError(
                f"jpipe.whole_batch: {_describe(operand)} follows from parameters and "
                f"no example, and would be repeated for each micro-batch; read it "
                f"without a mark, or return it from a model without rows, with None "
                f"in out_axes="
            )
        elif self._has_parts:
            raise ValueError(
                f"jpipe.whole_batch: {_describe(operand)} follows from no example, and "
                f"would be repeated for each micro-batch; make it behind the marks, as "
                f"in jnp.arange(len(z)) of an array z that is marked (of a pipeline "
                f"return it with None in out_axes=, or make it in loss_fn)"
            )
        mark = self._joined.setdefault((operand, axis), eqn.outvars[0])
        self._first_marks[eqn.outvars[0]] = mark

    def split(self, aux: PyTree, state_aux: PyTree) -> TracedFunction:
        """Returns the front, with the tail in it.

        Args:
          aux: specs of aux.
          state_aux: specs of the results behind it, as a tree of aux.
        """
        traced = self._traced
        jaxpr = traced.closed.jaxpr
        end = len(jaxpr.outvars) - len(jax.tree.leaves(state_aux))
        state = [*map(self._read, jaxpr.outvars[end:])]
        if self._behind & _jaxpr.variables(state):
            raise ValueError(
                f"state of the model follows from jpipe.whole_batch, behind which "
                f"nothing runs for each micro-batch{_MODEL_ADVICE}"
            )

        tail, once = self._make_tail([*map(self._read, jaxpr.outvars[:end])], aux)
        front_eqns = list[core.JaxprEqn]()
        for eqn in self._eqns:
            if not self._is_behind(eqn):
                front_eqns.append(self._unmark(eqn))
        joined = [operand for operand, _ in self._joined]
        front = core.ClosedJaxpr(
            jaxpr.replace(
                eqns=front_eqns,
                outvars=[*joined, *state, *once],
                effects=_jaxpr.effects_of(front_eqns),
            ),
            traced.closed.consts,
        )
        return replace(
            traced,
            closed=_boundaries.drop_unread_eqns(front),
            aux=state_aux,
            tail=tail,
        )

    def _make_tail(
        self, ends: Sequence[Any], aux: PyTree
    ) -> tuple[Tail, list[core.Var]]:
        """The tail, and those of its weights that are computed once per step.

        Args:
          ends: the loss and aux.
          aux: specs of aux.
        """
        traced = self._traced
        jaxpr = traced.closed.jaxpr
        needed = _jaxpr.variables(ends)
        eqns = list[core.JaxprEqn]()
        once = list[core.Var]()
        for eqn in reversed(self._eqns):
            is_behind = self._is_behind(eqn)
            is_needed = not needed.isdisjoint(eqn.outvars)
            if not (is_needed or (is_behind and eqn.effects)):
                continue
            if is_behind or self._may_copy(eqn):
                eqn = self._unmark(eqn)
                eqns.append(eqn)
                needed |= _jaxpr.variables(eqn.invars)
            elif traced.vars_of_batch.isdisjoint(eqn.outvars):
                once += [var for var in eqn.outvars if var in needed]
        computed = {*_jaxpr.outvars_of(eqns), *self._first_marks}
        read = needed - computed
        self._check_of_all_examples(read)

        # What is the same for all micro-batches is read of the first.
        weights = [var for var in traced.params if var in read]
        weights += once[::-1]
        constvars = [var for var in jaxpr.constvars if var in read]
        shared = read.difference(weights, constvars)
        for var in [*jaxpr.invars, *_jaxpr.outvars_of(jaxpr.eqns)]:
            if var in shared:
                self._joined[var, None] = var
        consts = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
        tail_jaxpr = jaxpr.replace(
            constvars=constvars,
            invars=[*weights, *self._joined.values()],
            eqns=eqns[::-1],
            outvars=[*ends],
            effects=_jaxpr.effects_of(eqns),
        )
        closed = core.ClosedJaxpr(tail_jaxpr, [consts[var] for var in constvars])
        axes = [axis for _, axis in self._joined]
        return Tail(closed, weights=weights, axes=axes, aux=aux), once[::-1]

    def _may_copy(self, eqn: core.JaxprEqn) -> bool:
        """True if an equation before all marks may run in the tail too."""
        if eqn.effects or not self._of_examples.isdisjoint(eqn.outvars):
            return False
        return self._traced.classify(eqn) == EqnKind.COPY

    def _is_behind(self, eqn: core.JaxprEqn) -> bool:
        return not self._behind.isdisjoint(_jaxpr.variables(eqn.invars))

    def _read(self, atom: Any) -> Any:
        """The atom in whose place one stands in the front and in the tail."""
        while not isinstance(atom, core.Literal) and atom in self._unmarked:
            atom = self._unmarked[atom]
        return atom if isinstance(atom, core.Literal) else self._first(atom)

    def _first(self, var: core.Var) -> core.Var:
        return self._first_marks.get(var, var)

    def _unmark(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        return eqn.replace(invars=[*map(self._read, eqn.invars)])

    def _check_of_all_examples(self, read: set[core.Var]) -> None:
        """Checks that the tail reads nothing that differs between micro-batches."""
        jaxpr = self._traced.closed.jaxpr
        variables = [*jaxpr.invars, *_jaxpr.outvars_of(jaxpr.eqns)]
        faults = [
            _describe(var)
            for var in variables
            if var in read and var in self._of_examples
        ]
        raise_all(
            "what follows jpipe.whole_batch reads arrays of a micro-batch; mark all "
            "that the loss and aux read of examples, targets and weights too, as in "
            "z, y = jpipe.whole_batch((z, y)); for a mean or a sum over examples, such "
            "as an auxiliary loss, type jpipe.whole_batch(loss, jpipe.MEAN)",
            faults,
        )


def _is_mark(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive is _whole_batch_p


def _describe(var: core.Var) -> str:
    return f"an array {shape_text(var.aval)}"
