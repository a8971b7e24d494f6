"""Methods of Flax that are replaced in one thread while layers are traced.

These are the methods that `flax.linen.intercept_methods` does not see: the calls of
nnx, and methods of linen's base class.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# All threads share a class.
_lock = threading.RLock()


@contextmanager
def patched(
    classes: Iterable[type], replacement: Callable[..., Any], method: str = "__call__"
) -> Iterator[None]:
    """The scope in which a method of some classes is replaced.

    Calls in other threads run as ever.

    Args:
      classes: classes of Flax itself.
      replacement: ``(class, original, module, args, kwargs) -> result``, which runs in
        place of the method; ``original(module, *args, **kwargs)`` is the method.
      method: the name of the method.
    """
    thread = threading.get_ident()

    def replaced(module_class: type, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            return replacement(module_class, original, module, args, kwargs)

        return run

    with _lock:
        # class -> the method before
        originals = {
            module_class: getattr(module_class, method) for module_class in classes
        }
        try:
            for module_class, original in originals.items():
                setattr(module_class, method, replaced(module_class, original))
            yield
        finally:
            for module_class, original in originals.items():
                setattr(module_class, method, original)
