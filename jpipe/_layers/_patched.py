"""Methods of Flax that are replaced while layers are traced, in one thread.

They are those that `flax.linen.intercept_methods` does not see: the calls of nnx, and
what linen's base class does.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A class is the same for all threads.
_lock = threading.RLock()


@contextmanager
def patched(
    kinds: Iterable[type], around: Callable[..., Any], method: str = "__call__"
) -> Iterator[None]:
    """The scope in which ``around(kind, call, module, args, keywords)`` runs calls.

    Calls in other threads run as ever.

    Args:
      kinds: classes of Flax itself.
      around: what runs in the place of their method, which it is given.
      method: the name of that.
    """
    thread = threading.get_ident()

    def make(kind: type, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(module: Any, *args: Any, **keywords: Any) -> Any:
            if threading.get_ident() != thread:
                return call(module, *args, **keywords)
            return around(kind, call, module, args, keywords)

        return run

    with _lock:
        plain = {kind: getattr(kind, method) for kind in kinds}
        try:
            for kind, call in plain.items():
                setattr(kind, method, make(kind, call))
            yield
        finally:
            for kind, call in plain.items():
                setattr(kind, method, call)
