"""A loss function, what it returns, and how the losses of micro-batches combine."""

import reprlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs._alike import Same
from .._layers._stage import shapes

PyTree = Any

REDUCTIONS = ("mean", "sum", "weighted", "microbatch_mean")
# What a loss function returns, by whether it is weighted and whether it has aux.
_RETURNS = {
    (False, False): "a scalar loss",
    (False, True): "(loss, aux)",
    (True, False): "(total, weight), two scalars",
    (True, True): "((total, weight), aux)",
}


@dataclass(frozen=True)
class Objective:
    """A loss function and how micro-batches combine.

    Attributes:
      loss_fn: ``(outputs, targets) -> loss``, or ``(loss, aux)`` with ``has_aux``;
        for ``"weighted"`` the loss is a pair ``(total, weight)``.
      has_aux: whether ``loss_fn`` returns something besides the loss.
      reduction: ``"mean"``: each micro-batch weighs its share of the examples;
        ``"sum"``: the losses add up; ``"weighted"``: the totals add up, the weights
        add up, and the loss is their quotient.
      aux_axes: on which axes aux of micro-batches are joined, as a prefix of aux;
        ``None``: on a new one.
      identity: what tells ``loss_fn`` apart, as for `jax.jit`: its hash and equality,
        or which object it is.
    """

    loss_fn: Callable[..., Any] = field(compare=False)
    has_aux: bool = False
    reduction: str = "mean"
    aux_axes: Any = None
    identity: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn={reprlib.repr(self.loss_fn)}: needs a function "
                f"(outputs, targets) -> scalar"
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"unknown reduction {self.reduction!r}: choose "
                f"{', '.join(map(repr, REDUCTIONS))}"
            )
        if self.aux_axes is not None and not self.has_aux:
            raise ValueError(f"aux_axes={self.aux_axes!r} needs has_aux=True")

        try:
            hash(self.loss_fn)
            object.__setattr__(self, "identity", self.loss_fn)
        except TypeError:
            object.__setattr__(self, "identity", Same(self.loss_fn))

    def __hash__(self) -> int:
        return hash((self.identity, self.has_aux, self.reduction))

    def of_part(self, outputs: PyTree, targets: PyTree) -> tuple[Any, PyTree]:
        """The loss of a micro-batch, or ``(total, weight)``, and aux; checked."""
        try:
            result = self.loss_fn(outputs, targets)
        except Exception as error:
            error.add_note(
                f"raised by loss_fn on outputs {shapes(outputs)} and "
                f"targets {shapes(targets)}, those of a micro-batch"
            )
            raise
        result, aux = self._without_aux(result)
        if self.reduction != "weighted":
            return _scalar(result, "loss_fn must return a scalar loss", outputs), aux
        total = _scalar(result[0], "the total must be a scalar", outputs)
        return (total, result[1]), aux

    def _without_aux(self, result: Any) -> tuple[Any, PyTree]:
        is_weighted = self.reduction == "weighted"
        fits = _is_pair(result) or not self.has_aux
        loss, aux = result if fits and self.has_aux else (result, ())
        fits &= _is_pair(loss) if is_weighted else not isinstance(loss, Sequence)
        if not fits:
            raise TypeError(
                f"reduction={self.reduction!r}, has_aux={self.has_aux}: loss_fn must "
                f"return {_RETURNS[is_weighted, self.has_aux]}; it returned "
                f"{shapes(result)}. For (loss, aux) type has_aux=True, for (total, "
                f"weight) reduction='weighted', for ((total, weight), aux) both"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
            if hasattr(leaf, "__jax_array__"):
                continue
            try:
                jax.typeof(leaf)
            except TypeError:
                raise TypeError(
                    f"has_aux=True: aux{jax.tree_util.keystr(path)} is {leaf!r}, a "
                    f"{type(leaf).__name__}; needs arrays or numbers"
                ) from None
        return loss, aux


def as_weight(weight: Any, total: jax.Array) -> jax.Array:
    """The weight of a weighted loss, in a dtype that sums of it fit.

    Raises:
      TypeError: if it is no scalar.
    """
    weight = jnp.asarray(weight)
    if weight.ndim:
        raise TypeError(f"the weight must be a scalar; it returned {shapes(weight)}")
    return weight.astype(jnp.promote_types(jnp.float32, total.dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2


def _scalar(value: Any, needed: str, outputs: PyTree) -> jax.Array:
    dtype = getattr(value, "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or jnp.shape(value) != ():
        given = (
            f"the Python number {value}"
            if isinstance(value, int | float)
            else shapes(value)
        )
        raise TypeError(
            f"{needed} of a floating dtype; it returned {given} for outputs "
            f"{shapes(outputs)}"
        )
    return value
