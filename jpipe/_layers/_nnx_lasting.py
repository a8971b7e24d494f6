"""What a call of an nnx module changes, though nothing of it lasts.

A pipeline makes a new module in each trace and carries the values of its Variables on.
What a call leaves in Python is gone with that module: so that it is looked for, and
refused. What it writes to Variables the jaxpr tells.
"""

from typing import Any

from flax import nnx

from . import _nnx_watch
from ._nnx_held import MISSING, differences, form, is_own, is_passing, told
from ._nnx_rngs import Path, dotted


class Lasting:
    """A module as it is before a call in training.

    Args:
      module: the module.
    """

    def __init__(self, module: nnx.Module) -> None:
        self._module = module
        self._variables: dict[Path, Any] = {}
        self._attributes: dict[Path, dict[str, Any]] = {}
        for path, node in _nodes(module).items():
            if isinstance(node, nnx.Pytree):
                self._attributes[path] = _attributes(node)
            elif isinstance(node, nnx.Variable) and not is_passing(node):
                self._variables[path] = form(node)

    def faults(self) -> list[str]:
        """What the call has changed that would not last, one sentence for each kind."""
        now = _nodes(self._module)
        deleted = [
            f"{was.kind.__name__} {dotted(path)}"
            for path, was in self._variables.items()
            if not isinstance(now.get(path), nnx.Variable)
        ]
        found = {
            "it deletes the {}; keep it, and hold in another nnx.Variable whether it "
            "is used": deleted,
            "it changes the {}; keep what a call changes in an nnx.Variable that "
            "__init__ makes, and choose by its value with jnp.where or "
            "jax.lax.cond": self._lost_attributes(now),
        }
        return [text.format(", the ".join(at)) for text, at in found.items() if at]

    def _lost_attributes(self, now: dict[Path, Any]) -> list[str]:
        found: list[str] = []
        for path, before in self._attributes.items():
            node = now.get(path)
            after = _attributes(node) if isinstance(node, nnx.Pytree) else {}
            found += [
                f"attribute {dotted(at)}, which {told(old, new)}"
                for name in {**before, **after}
                for at, old, new in differences(
                    (*path, name), before.get(name, MISSING), after.get(name, MISSING)
                )
            ]
        for path, before in self._variables.items():
            if isinstance(node := now.get(path), nnx.Variable):
                found += [
                    f"metadata {dotted(at)}, which {told(old, new)}"
                    for at, old, new in differences(path, before, form(node))
                ]
        return found


def refusal(called: str, faults: list[str]) -> ValueError:
    """The refusal of a module whose call changes what would not last."""
    return ValueError(
        f"a call of this {called} changes in training what is lost when it ends: every "
        f"step would start as the first one did:\n"
        + "\n".join(f"  * {fault}" for fault in faults)
    )


def _nodes(module: nnx.Module) -> dict[Path, Any]:
    """The nodes of a module by their paths, but those in a linen module that it holds.

    Linen makes new Variables of what it returns, and refuses itself what would be lost.
    """
    nodes = {tuple(path): node for path, node in nnx.iter_graph(module, graph=True)}
    linen = [path for path, node in nodes.items() if isinstance(node, nnx.bridge.ToNNX)]
    return {
        path: node
        for path, node in nodes.items()
        if not any(path[: len(start)] == start for start in linen)
    }


def _attributes(node: nnx.Pytree) -> dict[str, Any]:
    """The attributes of a node that hold no Variable, and do not say how it runs.

    Whether it is trained is set anew before each call.
    """
    return {
        name: form(value)
        for name, value in vars(node).items()
        if is_own(name)
        and name not in _nnx_watch.SWITCHES
        and not isinstance(value, nnx.Variable)
    }
