"""Classes of nnx whose calls are seen: nnx has no `flax.linen.intercept_methods`."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A class is the same for all threads.
_lock = threading.RLock()


@contextmanager
def patched(kinds: Iterable[type], around: Callable[..., Any]) -> Iterator[None]:
    """The scope in which ``around(kind, call, module, args, keywords)`` runs calls.

    Args:
      kinds: classes of `flax.nnx` itself.
      around: what runs in the place of their ``__call__``, which it is given.
    """

    def make(kind: type, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(module: Any, *args: Any, **keywords: Any) -> Any:
            return around(kind, call, module, args, keywords)

        return run

    with _lock:
        plain = {kind: kind.__call__ for kind in kinds}
        try:
            for kind, call in plain.items():
                setattr(kind, "__call__", make(kind, call))  # noqa: B010
            yield
        finally:
            for kind, call in plain.items():
                setattr(kind, "__call__", call)  # noqa: B010
