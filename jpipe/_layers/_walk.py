"""A model met layer by layer on abstract values: what each is given and would make."""

import copy
import reprlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
from flax import errors

from .._faults import refuse
from .._jaxprs import _jaxpr
from .._jaxprs._jaxpr import zeros
from . import _linen, _skip
from ._alike import origin
from ._initialize import init_with, strong
from ._layer import Layer
from ._sharing import Key, Sharing
from ._stage import StageFunction, applied, naming
from ._tree import Names, flat, merged, nested

PyTree = Any


class Visit(NamedTuple):
    """One layer, as it was met on abstract values.

    Attributes:
      stage: the number of its stage.
      layer: the layer.
      x: its input, as `jax.ShapeDtypeStruct` leaves.
      skips: what it may pop, likewise.
      variables: its own variables, likewise.
      borrowed: those that it uses and an earlier layer owns, likewise.
    """

    stage: int
    layer: Layer
    x: PyTree
    skips: dict[_skip.Key, PyTree]
    variables: PyTree
    borrowed: PyTree


def walk(
    stages: Sequence[StageFunction],
    key: chex.PRNGKey,
    spec: PyTree,
    given: Sequence[PyTree] | None = None,
) -> tuple[list[Visit], tuple[_skip.Route, ...]]:
    """Walks the model on abstract values only.

    Args:
      stages: all stages, in order.
      key: any key.
      spec: the input of the model, as `jax.ShapeDtypeStruct` leaves.
      given: variables that the layers are to take as they are, where they cannot make
        such: one entry per layer, ``None`` for one that makes its own.

    Returns:
      What was met at each layer, and the routes of the skip connections.

    Raises:
      ValueError: if the skip connections do not fit, with every fault.
    """
    sharing = Sharing([layer for stage in stages for layer in stage.layers])
    so_far = _Walk(key, spec, sharing, given)
    so_far.through(stages)
    return so_far.visits, _skip.routes(so_far.uses)


class _Outcome(NamedTuple):
    """What a layer would make, variables and output, and what it borrows."""

    variables: PyTree
    y: PyTree
    borrowed: PyTree


class _Taker(NamedTuple):
    """A layer that has a module: as an attribute, or as it took it from elsewhere."""

    number: int
    name: str
    key: Key
    took: bool


class _Walk:
    """How far the walk has come.

    Args:
      key: any key.
      spec: the input of the model.
      sharing: which variables of the layers are one.
      given: variables of the caller.

    Attributes:
      spec: the input of the next layer.
      visits: the layers met.
      uses: what they did with the skip connections.
    """

    def __init__(
        self,
        key: chex.PRNGKey,
        spec: PyTree,
        sharing: Sharing,
        given: Sequence[PyTree] | None,
    ) -> None:
        self.spec = spec
        self.visits: list[Visit] = []
        self.uses: list[_skip.Use] = []
        self._key = key
        self._sharing = sharing
        self._given = given
        self._number = 0  # of the layer that is visited
        self._skips: dict[_skip.Key, PyTree] = {}
        # By the root of their module, the variables of the layers so far.
        self._owned: dict[Hashable, dict[Key, PyTree]] = {}
        # Equal layers on equal inputs are traced once.
        self._known: dict[Hashable, _Outcome] = {}
        # What the layer that is visited took from elsewhere.
        self._took: set[Hashable] = set()
        # By the identity of a module, the first layer that has it.
        self._takers: dict[Hashable, _Taker] = {}

    def through(self, stages: Sequence[StageFunction]) -> None:
        """Goes through all layers."""
        for stage in stages:
            for number, layer in enumerate(stage.layers, stage.first):
                with naming(stage.index, number, layer, self.spec):
                    self.visit(stage.index, number, layer)

    def visit(self, stage: int, number: int, layer: Layer) -> None:
        """Goes through one layer."""
        self._number = number
        before, frames = dict(self._skips), []
        lent = self._lent(number)
        try:
            outcome = self._outcome(layer, lent, frames)
        except Exception as error:
            if lent:
                error.add_note(self._first_use(number))
            self._note(stage, number, layer, frames)
            # After a guess at what an unknown name pops, an error says nothing.
            if any(use.frame.unknown for use in self.uses):
                _skip.routes(self.uses, complete=False)
            raise
        self._note(stage, number, layer, frames[-1:])
        own, borrowed = outcome.variables, outcome.borrowed
        self.visits.append(Visit(stage, layer, self.spec, before, own, borrowed))
        for names, value in flat(own).items():
            key = self._sharing.key(number, names)
            self._owned.setdefault(key.root, {})[key] = value
        self.spec = outcome.y

    def _first_use(self, number: int) -> str:
        """Whose parameters a layer was given, and how it has its own."""
        roots = self._sharing.roots(number)
        first = next(i for i in range(number) if self._sharing.roots(i) & roots)
        name = self.visits[first].layer.name
        return (
            f"its parameters are those of layer {first} ({name}), as both hold one "
            "module; where each is to have its own, make a module for each, as "
            "[nn.Dense(8) for _ in range(2)] does, and [nn.Dense(8)] * 2 does not"
        )

    def _lent(self, number: int) -> dict[Names, PyTree]:
        """What layers before own of the modules of this one."""
        placed = [
            (self._sharing.place(number, key), value)
            for root in self._sharing.roots(number)
            for key, value in self._owned.get(root, {}).items()
        ]
        return {names: value for names, value in placed if names is not None}

    def _note(
        self, stage: int, number: int, layer: Layer, frames: list[_skip.Frame]
    ) -> None:
        self.uses += [_skip.Use(number, layer.name, stage, frame) for frame in frames]

    def _outcome(
        self, layer: Layer, lent: Mapping[Names, PyTree], frames: list[_skip.Frame]
    ) -> _Outcome:
        # Tied layers go their own way, and those with given variables.
        alike = None if lent or self._given else origin(layer.source)
        if alike is None:
            return self._traced(layer, lent, frames)
        leaves, tree = jax.tree.flatten(self.spec)
        key = alike, tree, tuple(leaves)
        if key in self._known:
            # Arrays of its own: what counts bytes tells them apart by identity.
            return jax.tree.map(copy.copy, self._known[key])
        outcome = self._traced(layer, lent, frames)
        # One that stashes or pops is another each time; one that takes a module from
        # elsewhere shares it with its equals.
        if not self._took and not any(
            frame.stashed or frame.popped for frame in frames
        ):
            self._known[key] = outcome
        return outcome

    def _traced(
        self, layer: Layer, lent: Mapping[Names, PyTree], frames: list[_skip.Frame]
    ) -> _Outcome:
        spec, skips, number = self.spec, self._skips, self._number
        names, left = list(skips), []
        # Zeros are what an unknown name pops: something to go on with, to find the
        # other faults too.

        def init(key: chex.PRNGKey) -> PyTree:
            given = nested(lent)
            return init_with(layer, key, spec, skips, given, zeros(spec), frames)

        def apply(values: Sequence[PyTree], own: PyTree, x: PyTree, key: Any, pop: Any):
            variables = merged(own, dict(zip(lent, values, strict=True)))
            popped = dict(zip(names, pop, strict=True))
            y = _output(layer, variables, x, key, popped, frames)
            _check_output(number, layer, y)
            left[:] = popped
            return y, list(popped.values())

        entry = self._given[number] if self._given else None
        with _linen.adopting() as adopted:
            try:
                made = _with_state(jax.eval_shape(init, self._key), entry)
            except Exception:
                if entry is None:
                    raise
                made = entry
        self._check_adopted(layer, adopted)
        given = self._sharing.made(number)
        self._took = {m for m, path in adopted.modules.items() if path not in given}
        own = jax.eval_shape(lambda tree: jax.tree.map(strong, tree), made)
        given = [*lent.values()], own, spec, self._key, [*skips.values()]
        if not lent:
            y, values = jax.eval_shape(apply, *given)
            used = {}
        else:
            closed, (y, values) = _jaxpr.trace(apply, *given)
            needed = _read(lent, _jaxpr.live_inputs(closed)) | self._asked(layer, lent)
            used = {names: value for names, value in lent.items() if names in needed}
        self._skips = dict(zip(left, values, strict=True))
        return _Outcome(own, y, nested(used))

    def _check_adopted(self, layer: Layer, adopted: _linen.Adopted) -> None:
        """Checks that no module is shared in a way that its names do not tell."""
        if adopted.in_place and self._sharing.lends(self._number):
            raise ValueError(
                f"{layer.name} puts a module in its own place (share_scope) that "
                f"another layer has too; list functions of one module that holds both: "
                f"jpipe.layer(module, function)"
            )
        given = self._sharing.made(self._number)
        taken = {path: module for module, path in adopted.modules.items()}
        for path, module in (taken | given).items():
            own = self._sharing.key(self._number, ("params", *path, ""))
            taker = _Taker(self._number, layer.name, own, path not in given)
            first = self._takers.setdefault(module, taker)
            if first.key != own and (first.took or taker.took):
                raise ValueError(
                    f"layers {first.number} ({first.name}) and {taker.number} "
                    f"({taker.name}) take one module, here {'/'.join(path)}, that was "
                    f"made outside of both: under one Flax parent they share its "
                    f"parameters; give it to both as an attribute to share them, or "
                    f"make it in setup"
                )

    def _asked(self, layer: Layer, lent: Mapping[Names, PyTree]) -> set[Names]:
        """The variables that a layer would make by itself.

        Flax looks for them, read or not: those that ``setup`` makes for other methods.
        """
        if layer.extend is None:
            return set(lent)

        def init(key: chex.PRNGKey) -> PyTree:
            return init_with(layer, key, self.spec, self._skips, {}, zeros(self.spec))

        try:
            return set(flat(jax.eval_shape(init, self._key)))
        except Exception:  # it only looks up what other methods made
            return {names for names in lent if names[0] == "params"}


def _with_state(made: PyTree, given: PyTree) -> PyTree:
    """What a layer makes, with what is given in the place of what is no parameter.

    A layer is not held to the shapes that its state has at the start: a cache has room
    for more tokens than the input has.
    """
    structure = jax.tree.structure
    return made | {
        name: given[name]
        for name, own in made.items()
        if given and name != "params" and structure(given.get(name)) == structure(own)
    }


def _output(
    layer: Layer,
    variables: PyTree,
    x: PyTree,
    key: Any,
    popped: dict[_skip.Key, PyTree],
    frames: list[_skip.Frame],
) -> PyTree:
    """What a layer gives in evaluation; in training, if it cannot be evaluated."""
    before, count = dict(popped), len(frames)

    def gives(train: bool) -> PyTree:
        given = layer, variables, x, key, (0, 0), train, popped
        return applied(*given, zeros(x), frames)[0]

    try:
        return gives(train=False)
    except errors.ModifyScopeVariableError as error:
        refusal = error
    # It always writes, as a norm does that takes the batch whoever calls it.
    popped.clear()
    popped.update(before)
    del frames[count:]
    try:
        return gives(train=True)
    except errors.ModifyScopeVariableError:
        raise refusal from None


def _read(lent: Mapping[Names, PyTree], live: Sequence[bool]) -> set[Names]:
    """Of what is lent the variables of which something is read."""
    owners = [names for names, value in lent.items() for _ in jax.tree.leaves(value)]
    return {names for names, is_read in zip(owners, live, strict=False) if is_read}


def _check_output(number: int, layer: Layer, y: PyTree) -> None:
    """Checks that a layer returned arrays: nothing else goes from stage to stage."""
    faults = []
    # JAX warns of a generator among leaves, which says less than we do.
    found = jax.tree_util.tree_leaves_with_path(
        y, is_leaf=lambda node: isinstance(node, Iterator)
    )
    for path, leaf in found:
        try:
            jax.typeof(leaf)
        except TypeError:
            told = f"{reprlib.repr(leaf)}, a {type(leaf).__name__}"
            faults.append(f"output{jax.tree_util.keystr(path)} is {told}")
    refuse(
        f"layer {number} ({layer.name}) must return a pytree of arrays; list a "
        f"function after it that returns arrays in tuples, lists or dicts, or register "
        f"the class of what it returns with jax.tree_util.register_dataclass",
        faults,
        TypeError,
    )
