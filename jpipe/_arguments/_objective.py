"""A loss function, its results, and how the losses of micro-batches combine."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._layers._text import shape_text
from ._wrong_call import binding_fault, check_flag, note_arguments, signature_of

PyTree = Any

REDUCTIONS = ("mean", "sum", "weighted", "microbatch_mean", "batch")
# (is weighted, has aux) -> the results of a loss function in words
_RETURNS = {
    (False, False): "a scalar loss",
    (False, True): "(loss, aux)",
    (True, False): "(total, weight), two scalars",
    (True, True): "((total, weight), aux)",
}
# The names that users give to parameters.
_PARAMETER_NAMES = ("params", "variables", "state", "model")


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss function and how micro-batches combine.

    Attributes:
      loss_fn: ``(outputs, targets) -> loss``, or ``(loss, aux)`` with ``has_aux``;
        for ``"weighted"`` the loss is a pair ``(total, loss weight)``.
      has_aux: True if ``loss_fn`` returns aux beside the loss.
      reduction: ``"mean"``: each micro-batch weighs its share of the examples;
        ``"sum"``: the losses add up; ``"weighted"``: the loss is the sum of totals
        over the sum of loss weights; ``"microbatch_mean"``: each micro-batch weighs
        the same; ``"batch"``: ``loss_fn`` runs once, on the outputs of all.
      aux_axes: the axes on which aux of micro-batches are joined, as a prefix of aux;
        ``None``: a new one.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool = False
    reduction: str = "mean"
    aux_axes: Any = None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn={reprlib.repr(self.loss_fn)}: needs a function "
                f"(outputs, targets) -> scalar"
            )
        check_results(self.has_aux, self.reduction, self.aux_axes)

    def of_part(self, outputs: PyTree, targets: PyTree) -> tuple[Any, PyTree]:
        """The loss of a micro-batch, or ``(total, weight)``, and aux; checked."""
        try:
            result = self.loss_fn(outputs, targets)
        except Exception as error:
            note_arguments(
                error,
                "loss_fn",
                self.loss_fn,
                {"outputs": outputs, "targets": targets},
                examples=self._examples,
                advice=explain_arguments(self.loss_fn),
            )
            raise
        loss, aux = self._split_aux(result)
        if self.reduction != "weighted":
            return _scalar(loss, "loss_fn must return a scalar loss", outputs), aux
        total, weight = loss
        total = _scalar(total, "the total must be a scalar", outputs)
        return (total, weight), aux

    @property
    def _examples(self) -> str:
        """The words for the examples that ``loss_fn`` sees."""
        return "the mini-batch" if self.reduction == "batch" else "a micro-batch"

    def _split_aux(self, result: Any) -> tuple[Any, PyTree]:
        """Splits a result into the loss, or ``(total, weight)``, and aux."""
        is_weighted = self.reduction == "weighted"
        loss = result
        aux = ()
        is_complete = True
        if self.has_aux:
            is_complete = _is_pair(result)
            if is_complete:
                loss, aux = result
        has_loss = _is_pair(loss) if is_weighted else not isinstance(loss, Sequence)
        if not (is_complete and has_loss):
            raise TypeError(
                f"reduction={self.reduction!r}, has_aux={self.has_aux}: loss_fn must "
                f"return {_RETURNS[is_weighted, self.has_aux]}; it returned "
                f"{shape_text(result)}. For (loss, aux) type has_aux=True, for (total, "
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


def check_results(has_aux: Any, reduction: Any, aux_axes: Any) -> None:
    """Checks the options that say what a loss function returns: see `Objective`.

    Raises:
      TypeError: if ``has_aux`` is no bool.
      ValueError: if the reduction is unknown, or there are axes and no aux.
    """
    check_flag("has_aux", has_aux)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"unknown reduction {reduction!r}: choose "
            f"{', '.join(map(repr, REDUCTIONS))}"
        )
    if aux_axes is not None and not has_aux:
        raise ValueError(f"aux_axes={aux_axes!r} needs has_aux=True")
    if aux_axes is not None and reduction == "batch":
        raise ValueError(
            f"aux_axes={aux_axes!r} joins the aux of micro-batches, and with "
            f"reduction='batch' loss_fn runs once, on the whole mini-batch: leave it "
            f"out"
        )


def explain_arguments(loss_fn: Callable[..., Any]) -> str:
    """The end of an error of a loss whose arguments are others; empty if they are not.

    They are, if it does not take two, or calls the first one as parameters are called.
    """
    signature = signature_of(loss_fn)
    if signature is None:
        return ""
    first = next(iter(signature.parameters), "")
    if first not in _PARAMETER_NAMES and not binding_fault(loss_fn, (0, 0), {}):
        return ""
    return (
        f"; it takes {signature}, and a pipeline calls loss_fn(outputs, targets); a "
        f"loss of parameters and a batch is for jpipe.value_and_grad"
    )


def as_loss_weight(weight: Any, total: jax.Array) -> jax.Array:
    """The loss weight, in a dtype that sums of it fit.

    Raises:
      TypeError: if it is no scalar.
    """
    weight = jnp.asarray(weight)
    if weight.ndim:
        raise TypeError(
            f"the weight must be a scalar; it returned {shape_text(weight)}"
        )
    return weight.astype(jnp.promote_types(jnp.float32, total.dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2


def _scalar(value: Any, requirement: str, outputs: PyTree) -> jax.Array:
    """Checks that a value is a scalar of a floating dtype."""
    dtype = getattr(value, "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if is_floating and jnp.shape(value) == ():
        return value
    if isinstance(value, int | float):
        description = f"the Python number {value}"
    else:
        description = shape_text(value)
    advice = "; type .mean(), or .sum() with reduction='sum'" if is_floating else ""
    raise TypeError(
        f"{requirement} of a floating dtype; it returned {description} for outputs "
        f"{shape_text(outputs)}{advice}"
    )
