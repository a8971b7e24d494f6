"""The user's function as one jaxpr, and what each of its equations follows from.

Equations that follow from parameters alone, or cheaply from what a micro-batch is given
alone, belong to no stage: each stage that reads what they make computes it. All others
are divided among the stages.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._functions._objective import as_weight
from .._jaxprs import _cheapest, _jaxpr
from .._jaxprs._jaxpr import is_inexact
from .._jaxprs._primitives import REDUCTIONS
from .._layers import _rng
from .._layers._stage import shapes
from . import _checkpoints, _marks
from ._folds import lifted

PyTree = Any

# What makes so few bytes of so few, as a key that is folded, is cheap whatever it is.
_FEW = 1024
_user_context = jax.make_user_context()
OTHER_READS = (
    "the function reads other parameters, or other arrays from outside, for "
    "micro-batches of another size; give a batch that num_microbatches divides"
)


class EqnKind(enum.StrEnum):
    """The stages that run an equation."""

    STAGE = "stage"  # one
    COPY = "copy"  # each one that reads its results, since it is cheap
    ONCE = "once"  # none: it runs once per step, where its parameters are


@dataclass(frozen=True)
class Traced:
    """A function on micro-batches of one size.

    Attributes:
      closed: its jaxpr: ``(*params, *batch, number, *numbers) -> (*loss, *weight, *aux,
        *rest)``. The loss is that of examples; the rest are summands that depend on
        none, if there are.
      num_params: how many of its inputs are the same for all micro-batches: the
        parameters, and then the arrays that the function closes over.
      aux: specs of what it returns besides the loss.
      constants: those arrays.
      has_loss: whether its first result is a loss.
      is_weighted: whether the next is the weight by whose sum the loss is divided.
      numbers: those that are folded into keys: see `_folds`.
      known_kinds: what each equation is, where that is known: see `kinds`.
      num_inputs: how many of the inputs after the parameters are those of a model.
      num_local: how many of these inputs are not given to all stages: the first reads
        the input of a list, the last the targets.
      is_split: whether a micro-batch is a part of a mini-batch. Where it is the whole,
        the arrays that the function closes over may be what it computes with.
    """

    closed: core.ClosedJaxpr
    num_params: int
    aux: PyTree
    constants: Sequence[Any] = ()
    has_loss: bool = True
    is_weighted: bool = False
    numbers: Sequence[Any] = ()
    known_kinds: Sequence[EqnKind] | None = None
    num_inputs: int = 0
    num_local: int = 0
    is_split: bool = True

    @property
    def loss(self) -> list[Any]:
        """The loss, if there is one."""
        return self.closed.jaxpr.outvars[: self.has_loss]

    @property
    def weight(self) -> list[Any]:
        """The weight of a weighted loss."""
        return self.closed.jaxpr.outvars[self.has_loss : self._num_first]

    @property
    def aux_vars(self) -> list[Any]:
        """What is returned besides the loss and its weight."""
        end = self._num_first + len(jax.tree.leaves(self.aux))
        return self.closed.jaxpr.outvars[self._num_first : end]

    @property
    def _num_first(self) -> int:
        return self.has_loss + self.is_weighted

    @property
    def outputs(self) -> list[Any]:
        """The loss, its weight and what is returned besides it, which stages make."""
        return [*self.loss, *self.weight, *self.aux_vars]

    @property
    def rest(self) -> list[core.Var]:
        """The sum of the summands of the loss that depend on no example, if any."""
        return self.closed.jaxpr.outvars[len(self.outputs) :]

    @cached_property
    def params(self) -> list[core.Var]:
        """The inputs that are the same for all micro-batches."""
        return self.closed.jaxpr.invars[: self.num_params]

    @cached_property
    def given(self) -> list[core.Var]:
        """The inputs that a micro-batch brings."""
        return self.closed.jaxpr.invars[self.num_params :]

    @cached_property
    def inputs(self) -> set[core.Var]:
        """Those of them that are the input of a model."""
        return set(self.given[: self.num_inputs])

    @cached_property
    def closed_over(self) -> list[core.Var]:
        """The inputs that are arrays which the function closes over."""
        return self.params[self.num_params - len(self.constants) :]

    @cached_property
    def of_batch(self) -> set[core.Var]:
        """All that follows from what a micro-batch brings."""
        brought = [] if self.is_split else self.closed_over
        return self.reached([*self.given, *brought])

    @cached_property
    def of_params(self) -> set[core.Var]:
        """All that follows from parameters."""
        return self.reached(self.params)

    def reached(self, inputs: Sequence[core.Var]) -> set[core.Var]:
        """All that follows from some inputs, and these."""
        return _jaxpr.descendants(self.closed.jaxpr, inputs)

    def constant(self, atom: Any) -> core.ClosedJaxpr | None:
        """``() -> value`` of what follows from no input; ``None`` if it follows."""
        jaxpr = self.closed.jaxpr
        computed = _jaxpr.computable_from(
            jaxpr, jaxpr.constvars, lambda eqn: not eqn.effects
        )
        if not _jaxpr.variables([atom]) <= computed:
            return None
        eqns = [eqn for eqn in jaxpr.eqns if not eqn.effects]
        jaxpr = jaxpr.replace(invars=[], eqns=eqns, outvars=[atom], effects=set())
        return _jaxpr.prune(core.ClosedJaxpr(jaxpr, self.closed.consts), [atom])

    @cached_property
    def producer(self) -> dict[core.Var, int]:
        """The number of the equation that makes each variable."""
        return _jaxpr.producers(self.closed.jaxpr)

    @cached_property
    def kinds(self) -> Sequence[EqnKind]:
        """The stages that run each equation.

        An equation with effects, or one that follows from the batch at some cost, runs
        in one stage. One that follows from parameters at some cost, or reduces them,
        runs once per step. All others are cheap enough for each stage that reads them.
        """
        if self.known_kinds is not None:
            return self.known_kinds
        return [self._kind_of(eqn) for eqn in self.closed.jaxpr.eqns]

    def _kind_of(self, eqn: core.JaxprEqn) -> EqnKind:
        operands = _jaxpr.variables(eqn.invars)
        if eqn.effects:
            return EqnKind.STAGE
        if not operands.isdisjoint(self.of_batch):
            # A copy must follow from the batch through copies.
            is_copied = is_cheap(eqn) and operands <= self._copied
            return EqnKind.COPY if is_copied else EqnKind.STAGE
        if operands.isdisjoint(self.of_params):
            return EqnKind.COPY
        is_copied = is_cheap(eqn) and eqn.primitive.name not in REDUCTIONS
        return EqnKind.COPY if is_copied else EqnKind.ONCE

    @cached_property
    def _copied(self) -> set[core.Var]:
        """What follows from the batch by cheap equations, without parameters."""
        jaxpr = self.closed.jaxpr
        sources = [*jaxpr.constvars, *self.given[self.num_local :]]
        if not self.is_split:
            sources += self.closed_over
        of_inputs = self.of_batch | self.of_params

        def may_copy(eqn: core.JaxprEqn) -> bool:
            is_constant = of_inputs.isdisjoint(_jaxpr.variables(eqn.invars))
            return not eqn.effects and (is_constant or is_cheap(eqn))

        return _jaxpr.computable_from(jaxpr, sources, may_copy)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Whether each stage may compute it for itself."""
    atoms = [*eqn.invars, *eqn.outvars]
    return _cheapest.is_cheap(eqn) or sum(map(_cheapest.nbytes, atoms)) <= _FEW


def traced(
    function: Callable[..., Any],
    params: PyTree,
    args: Sequence[PyTree],
    num_stages: int,
    has_aux: bool,
    has_loss: bool = True,
    is_weighted: bool = False,
    folds_params: bool = True,
) -> Traced:
    """Traces a function on a micro-batch.

    Args:
      function: ``(params, *args) -> loss``, or ``(loss, aux)``.
      params: specs of its first argument.
      args: specs of the others, of a micro-batch.
      num_stages: in about how many stages it is to be divided.
      has_aux: whether it returns something besides the loss.
      has_loss: whether it returns a loss; else what it returns is aux.
      is_weighted: whether this is a pair, of a total and a weight.
      folds_params: whether keys among the parameters are folded too.

    Returns:
      The function, with keys folded with the number of the micro-batch, and a loss
      that is not scaled yet: see `_summands`.
    """

    def whole(params: PyTree, args: Sequence[PyTree], number: jax.Array) -> Any:
        def fold(leaf: Any) -> Any:
            return microbatch_key(leaf, number) if is_single_key(leaf) else leaf

        args = jax.tree.map(fold, tuple(args))
        params = jax.tree.map(fold, params) if folds_params else params
        result = function(params, *args)
        if not has_loss:
            return (), (), jax.tree.map(jnp.asarray, result)
        loss, aux = pair(result, "(loss, aux)") if has_aux else (result, ())
        weight = []
        if is_weighted:
            loss, *weight = pair(loss, "(total, weight) in place of a loss")
        if not hasattr(loss, "dtype") or loss.shape or not _is_floating(loss):
            raise TypeError(
                f"the function must return a scalar loss of a floating dtype; it "
                f"returned {shapes(loss)}; for (loss, aux) type has_aux=True, for "
                f"(total, weight) reduction='weighted'"
            )
        weight = [as_weight(x, loss) for x in weight]
        return loss, weight, jax.tree.map(jnp.asarray, aux)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    with _user_context(object()):
        closed, (_, _, aux) = _jaxpr.trace(whole, params, tuple(args), number)
    closed = _checkpoints.opened(closed, num_stages)
    count = len(jax.tree.leaves(params))
    closed = _with_raw_keys_folded(closed, 0 if folds_params else count)
    closed, numbers = lifted(closed)
    jaxpr = closed.jaxpr
    # Keys and refs stay in the programs that read them.
    pairs = [*zip(jaxpr.constvars, closed.consts, strict=True)]
    arrays = {var: value for var, value in pairs if _is_array(value)}
    others = {var: value for var, value in pairs if var not in arrays}
    invars = [*jaxpr.invars[:count], *arrays, *jaxpr.invars[count:]]
    jaxpr = jaxpr.replace(constvars=[*others], invars=invars)
    closed, constants = core.ClosedJaxpr(jaxpr, [*others.values()]), [*arrays.values()]
    kind = has_loss, is_weighted
    return Traced(closed, count + len(constants), aux, constants, *kind, numbers)


def _is_array(constant: Any) -> bool:
    is_array = isinstance(constant, jax.Array | np.ndarray)
    return is_array and not jnp.issubdtype(constant.dtype, jax.dtypes.extended)


def with_equal_arrays(programs: Mapping[int, Traced]) -> Mapping[int, Traced]:
    """Programs of several sizes, which close over equal arrays, in the same order.

    Raises:
      ValueError: if they do not, but for arrays of NumPy, which are put inside.
    """
    if _have_equal_arrays([*programs.values()]):
        return programs
    found = {size: _with_numpy_inside(one) for size, one in programs.items()}
    if not _have_equal_arrays([*found.values()]):
        raise ValueError(OTHER_READS)
    return found


def _have_equal_arrays(programs: Sequence[Traced]) -> bool:
    first, *others = (one.constants for one in programs)
    return all(len(own) == len(first) for own in others) and all(
        a is b or np.array_equal(a, b, equal_nan=is_inexact(a))
        for own in others
        for a, b in zip(first, own, strict=True)
    )


def _with_numpy_inside(program: Traced) -> Traced:
    """The same, with the arrays of NumPy in the programs that read them."""
    jaxpr, first = program.closed.jaxpr, program.num_params - len(program.constants)
    hoisted = jaxpr.invars[first : program.num_params]
    pairs = [*zip(hoisted, program.constants, strict=True)]
    inner = {var: array for var, array in pairs if isinstance(array, np.ndarray)}
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.constvars, *inner],
        invars=[var for var in jaxpr.invars if var not in inner],
    )
    return replace(
        program,
        closed=core.ClosedJaxpr(jaxpr, [*program.closed.consts, *inner.values()]),
        num_params=program.num_params - len(inner),
        constants=[array for var, array in pairs if var not in inner],
    )


def _with_raw_keys_folded(closed: core.ClosedJaxpr, first: int) -> core.ClosedJaxpr:
    """The same, where an input that is wrapped as a key is folded as typed ones are.

    Args:
      closed: the jaxpr.
      first: the number of the first such input.
    """
    # Inputs, and what hands them on to the next stage.
    inputs = _jaxpr.descendants(
        closed.jaxpr, closed.jaxpr.invars[first:], lambda eqn, _: _marks.is_mark(eqn)
    )
    raw = {
        id(eqn)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "random_wrap"
        and eqn.invars[0] in inputs
        and is_single_key(eqn.outvars[0].aval)
    }
    if not raw:
        return closed

    def run(*args: Any) -> list[Any]:
        def folded(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
            (key,) = _jaxpr.bind(closed.jaxpr, eqn, operands)
            return [microbatch_key(key, args[-1])]

        def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
            return functools.partial(folded, eqn) if id(eqn) in raw else None

        return _jaxpr.evaluate(closed, args, rule)

    return _jaxpr.retrace(closed, run)


def pair(result: Any, needed: str) -> Any:
    """Checks that a function returned a pair; gives it back.

    Raises:
      TypeError: if it did not, with what it needed to return.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"the function must return {needed}; it returned {shapes(result)}"
        )
    return result


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_single_key(leaf: Any) -> bool:
    """Whether a leaf is one typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.shape == ()


def microbatch_key(key: jax.Array, microbatch: jax.Array | int) -> jax.Array:
    """The key that a micro-batch is given in place of the key of the mini-batch.

    Args:
      key: a key of `jax.random.key`.
      microbatch: the index of the micro-batch, from 0 on.

    Returns:
      A key.

    Raises:
      TypeError: if it is given no key.

    Example:
      >>> import jax, jpipe
      >>> key = jpipe.microbatch_key(jax.random.key(0), 3)
      >>> key.shape
      ()
    """
    _rng.check_key(key, "microbatch_key(key, microbatch): key")
    return jax.random.fold_in(key, microbatch)
