"""The user's loss function as one jaxpr, and what each of its equations follows from.

Equations that follow from parameters alone, or cheaply from what a micro-batch is given
alone, belong to no stage: each stage that reads what they make computes it. All others
are divided among the stages.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _cheapest, _jaxpr
from .._jaxprs._primitives import REDUCTIONS
from .._layers._stage import shapes

PyTree = Any

# Random bits of so few bytes, as of a key that is folded, are drawn again.
_FEW = 1024
_boundary = "jpipe boundary"
_user_context = jax.make_user_context()


@dataclass(frozen=True)
class LossProgram:
    """A loss function on micro-batches of one size.

    Attributes:
      closed: its jaxpr: ``(*params, *batch, number) -> (loss, *aux, *rest)``. The loss
        is that of examples; the rest are summands that depend on none, if there are.
      num_params: how many of its inputs are the same for all micro-batches: the
        parameters, and then the arrays that the function closes over.
      aux: specs of what it returns beside the loss.
      constants: those arrays.
    """

    closed: core.ClosedJaxpr
    num_params: int
    aux: PyTree
    constants: Sequence[Any] = ()

    @property
    def rest(self) -> list[core.Var]:
        """The sum of the summands of the loss that depend on no example, if any."""
        return self.closed.jaxpr.outvars[1 + len(jax.tree.leaves(self.aux)) :]

    @property
    def outputs(self) -> list[Any]:
        """The loss and what is returned beside it, which stages make."""
        return self.closed.jaxpr.outvars[: 1 + len(jax.tree.leaves(self.aux))]

    @cached_property
    def params(self) -> list[core.Var]:
        """The inputs that are the same for all micro-batches."""
        return self.closed.jaxpr.invars[: self.num_params]

    @cached_property
    def given(self) -> list[core.Var]:
        """The inputs that a micro-batch brings."""
        return self.closed.jaxpr.invars[self.num_params :]

    @cached_property
    def of_batch(self) -> set[core.Var]:
        """All that follows from what a micro-batch brings."""
        return self.reached(self.given)

    @cached_property
    def of_params(self) -> set[core.Var]:
        """All that follows from parameters."""
        return self.reached(self.params)

    def reached(self, inputs: Sequence[core.Var]) -> set[core.Var]:
        """All that follows from some inputs, and these."""
        found = set(inputs)
        for eqn in self.closed.jaxpr.eqns:
            if not found.isdisjoint(_jaxpr.variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    @cached_property
    def producer(self) -> dict[core.Var, int]:
        """The number of the equation that makes each variable."""
        eqns = enumerate(self.closed.jaxpr.eqns)
        return {var: i for i, eqn in eqns for var in eqn.outvars}

    @cached_property
    def kinds(self) -> list[str]:
        """Of each equation what it is.

        ``"stage"``: one stage computes it. ``"copy"``: each stage that reads it does.
        ``"once"``: it follows from parameters and is dear, or a reduction, and is
        computed once in a step, where they are.
        """
        return [*map(self._kind, self.closed.jaxpr.eqns)]

    def _kind(self, eqn: core.JaxprEqn) -> str:
        read = _jaxpr.variables(eqn.invars)
        if eqn.effects:
            return "stage"
        is_small = all(_cheapest.nbytes(var) <= _FEW for var in eqn.outvars)
        is_cheap = _cheapest.is_cheap(eqn) or is_small
        if not read.isdisjoint(self.of_batch):
            # A copy must follow from the batch through copies.
            return "copy" if is_cheap and read <= self._copied else "stage"
        if read.isdisjoint(self.of_params):
            return "copy"
        return "copy" if is_cheap and eqn.primitive.name not in REDUCTIONS else "once"

    @cached_property
    def _copied(self) -> set[core.Var]:
        """What follows from the batch by cheap equations, without parameters."""
        found = set(self.closed.jaxpr.constvars) | set(self.given)
        for eqn in self.closed.jaxpr.eqns:
            read = _jaxpr.variables(eqn.invars)
            is_small = all(_cheapest.nbytes(var) <= _FEW for var in eqn.outvars)
            is_cheap = _cheapest.is_cheap(eqn) or is_small
            of_params = not read.isdisjoint(self.of_params)
            constant = read.isdisjoint(self.of_batch) and not of_params
            if not eqn.effects and (constant or (is_cheap and read <= found)):
                found.update(eqn.outvars)
        return found


def traced(
    function: Callable[..., Any],
    params: PyTree,
    args: Sequence[PyTree],
    has_aux: bool,
    scale: float,
    split: Sequence[bool],
    share: float,
) -> LossProgram:
    """Traces a loss function on a micro-batch.

    Args:
      function: ``(params, *args) -> loss``, or ``(loss, aux)``.
      params: specs of its first argument.
      args: specs of the others, of a micro-batch.
      has_aux: whether it returns something beside the loss.
      scale: by what the loss is multiplied.
      split: of each leaf of ``args`` whether it is of the examples, and not whole.
      share: one over how many micro-batches there are.

    Returns:
      The function, with all keys folded with the number of the micro-batch.
    """

    def whole(params: PyTree, args: Sequence[PyTree], number: jax.Array) -> Any:
        def fold(leaf: Any) -> Any:
            return microbatch_key(leaf, number) if is_single_key(leaf) else leaf

        params, args = jax.tree.map(fold, (params, tuple(args)))
        result = function(params, *args)
        loss, aux = result if has_aux else (result, ())
        if not hasattr(loss, "dtype") or loss.shape or not _is_floating(loss):
            raise TypeError(
                f"the function must return a scalar loss of a floating dtype; it "
                f"returned {shapes(loss)}"
            )
        return loss, jax.tree.map(jnp.asarray, aux)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    with _user_context(object()):
        closed, (_, aux) = _jaxpr.trace(whole, params, tuple(args), number)
    closed = _with_raw_keys_folded(closed)
    count, constants = len(jax.tree.leaves(params)), closed.consts
    jaxpr = closed.jaxpr
    invars = [*jaxpr.invars[:count], *jaxpr.constvars, *jaxpr.invars[count:]]
    closed = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars), [])
    program = LossProgram(closed, count + len(constants), aux, constants)
    return replace(program, closed=_with_summands(program, scale, split, share))


def _with_raw_keys_folded(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same, where an input that is wrapped as a key is folded as typed ones are."""
    inputs = set(closed.jaxpr.invars)
    raw = {
        id(eqn)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "random_wrap" and eqn.invars[0] in inputs
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

    return jax.make_jaxpr(run)(*map(_jaxpr.spec, closed.in_avals))


# How what a loss may be summed up of is computed, of scalars.
_SUMS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "convert_element_type": lambda x: x,
}
_SCALES: dict[str, Callable[..., Any]] = {
    "mul": operator.mul,
    "div": operator.truediv,
}


def _with_summands(
    program: LossProgram, scale: float, split: Sequence[bool], share: float
) -> core.ClosedJaxpr:
    """The program whose loss is scaled, its summands without examples apart.

    Such a summand, a penalty on weights, counts once, whatever the reduction. One that
    reads what each micro-batch is given whole, or a key, is its mean over them.
    """
    closed = program.closed
    examples = [v for v, yes in zip(program.given, split, strict=False) if yes]
    of_examples = program.reached(examples)
    eqns, producer = closed.jaxpr.eqns, program.producer
    outvars: list[Any] = closed.jaxpr.outvars
    loss, *aux = outvars

    def follows(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in of_examples

    def summands(atom: Any) -> list[Any]:
        """The operands whose sum, perhaps scaled, a value is; none if it is no sum."""
        if not follows(atom) or atom not in producer or atom.aval.shape:
            return []
        eqn = eqns[producer[atom]]
        name, read = eqn.primitive.name, eqn.invars
        if name in _SUMS:
            return list(read)
        if name in _SCALES and sum(map(follows, read)) == 1:
            scaled = read[0] if follows(read[0]) else read[1]
            return [scaled] if name == "mul" or scaled is read[0] else []
        return []

    def parts(atom: Any) -> list[Any]:
        """What a sum ends in."""
        inner = summands(atom)
        return [part for a in inner for part in parts(a)] if inner else [atom]

    def value(atom: Any, known: dict[Any, Any], of_examples: bool) -> Any:
        """Of a sum the part that follows from examples, or the rest."""
        inner = summands(atom)
        if not inner:
            is_own = follows(atom) == of_examples
            return read(atom, known) if is_own else jnp.zeros((), _dtype(atom))
        eqn = eqns[producer[atom]]
        operands = [
            value(a, known, of_examples)
            if any(a is one for one in inner)
            else read(a, known)
            for a in eqn.invars
        ]
        made = (_SUMS | _SCALES)[eqn.primitive.name](*operands)
        return made.astype(_dtype(atom))

    def read(atom: Any, known: dict[Any, Any]) -> Any:
        is_literal = isinstance(atom, core.Literal)
        return jnp.asarray(atom.val, _dtype(atom)) if is_literal else known[atom]

    has_rest = not all(map(follows, parts(loss)))
    needed, todo = dict[Any, None](), [loss]
    while todo:
        atom = todo.pop()
        if not isinstance(atom, core.Literal):
            needed[atom] = None
        if summands(atom):
            todo += eqns[producer[atom]].invars
    is_once = program.of_batch.isdisjoint(needed.keys() - of_examples)
    own = closed.jaxpr.replace(outvars=[*needed, *aux])

    def run(*args: Any) -> list[Any]:
        results = _jaxpr.as_traced(core.ClosedJaxpr(own, closed.consts))(*args)
        known = dict(zip(needed, results, strict=False))
        data = value(loss, known, True) if has_rest else read(loss, known)
        rest = [value(loss, known, False)] if has_rest else []
        data *= jnp.asarray(scale, data.dtype)
        if rest and not is_once:
            data += rest.pop() * jnp.asarray(share, data.dtype)
        return [data, *results[len(needed) :], *rest]

    return jax.make_jaxpr(run)(*map(_jaxpr.spec, closed.in_avals))


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_single_key(leaf: Any) -> bool:
    """Whether a leaf is one typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.shape == ()


def microbatch_key(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """The key that a micro-batch is given in place of the key of the mini-batch.

    Args:
      key: a key of `jax.random.key`.
      number: the number of the micro-batch.

    Returns:
      A key.

    Example:
      >>> import jax, jpipe
      >>> key = jpipe.microbatch_key(jax.random.key(0), 3)
      >>> key.shape
      ()
    """
    return jax.random.fold_in(key, number)
