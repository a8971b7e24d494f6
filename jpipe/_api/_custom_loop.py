"""The methods with which users write a training loop of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from .._placed import _jit
from .._train import _transformation


class CustomLoop:
    """Functions and optimizers of trees that are spread over some devices.

    Args:
      devices: all different devices.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices

    def jit(
        self,
        f: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
    ) -> Callable[..., Any]:
        """Compiles a function of trees that are spread over the pipeline, as `jax.jit`.

        It is evaluated where the leaves of its arguments are: a global norm moves one
        scalar per device, a moving average of the parameters nothing. Each operation
        runs where most bytes of its operands are. Arrays on the host, uncommitted
        arrays and arrays on other devices than the pipeline's are copied to where they
        are needed.

        It gives the numbers that `jax.jit` gives on one device: the operations and
        their order are the same. XLA compiles one program per device instead of one
        for all, so that an operation which it fuses differently may differ by an ulp.

        Args:
          f: a function of any pytrees, which `jax.jit` could trace. A
            `jax.lax.while_loop` or `jax.lax.scan` over leaves of several devices runs
            on one of them, to which it brings them all. A `jax.lax.cond` over such
            leaves computes all branches, unless a while loop is in one: then it runs
            on one device too.
          donate_argnums: the positions of arguments whose memory results may take.
            Leaves that were donated cannot be used again.
          static_argnums: the positions of arguments that are hashable values, not
            arrays; each value is compiled anew.

        Returns:
          The function. Its results stay where they are computed. A result that follows
          from no leaf on a device of the pipeline, such as ``zeros_like(params)``, is
          on the device of an argument leaf whose path has the same end, else on the
          first.

        Raises:
          TypeError: if ``f`` is not a function; from the function, if a leaf is not an
            array or number, or belongs to a trace.
          ValueError: from the function, if an array was overwritten, is sharded, or is
            donated and given twice.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([lambda x: 2 * x], num_microbatches=2)
          >>> @pipe.jit
          ... def accuracy(logits, labels):
          ...     return jnp.mean(logits.argmax(-1) == labels)
          >>> logits = pipe.apply(({},), jnp.eye(4))
          >>> float(accuracy(logits, jnp.array([0, 1, 2, 0])))
          0.75
        """
        return _jit.jit(f, self._devices, donate_argnums, static_argnums)

    def optimizer(
        self, tx: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Makes an optax optimizer for parameters that are spread over the pipeline.

        Its ``init`` and ``update`` compute what those of ``tx`` compute on one device,
        each leaf where the parameter is, as `train_step` does. Nothing is overwritten.
        As under `jax.jit`, values that ``tx`` itself holds are read when it is traced.
        Leaves of integers are not parameters: ``tx`` does not see them, and their
        updates are zeros.

        Args:
          tx: the optax optimizer, such as ``optax.adamw(1e-3)``.

        Returns:
          The optimizer. ``init(params)`` returns the state of ``tx.init(params)``, as
          in a train state of `init_train_state`. ``update(grads, state, params,
          **extra)`` passes on arguments by name, such as ``value=loss``.

        Raises:
          TypeError: if ``tx`` is not an optax transformation.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> pipe = jpipe.pipeline([lambda x: 2 * x], num_microbatches=2)
          >>> tx = pipe.optimizer(optax.polyak_sgd())
          >>> params = [{"w": jnp.ones(2)}]
          >>> opt_state = tx.init(params)
          >>> updates, opt_state = tx.update(params, opt_state, params, value=1.0)
          >>> optax.apply_updates(params, updates)[0]["w"]
          Array([0.5, 0.5], dtype=float32)
        """
        return _transformation.optimizer(tx, self._devices)
