"""Parameters in pieces: as users hold them, and as they are inside of the library.

A parameter that a scan over layers goes along is in pieces, each on the device of its
stage. Inside, its leaf is a node, `PieceNode`, whose leaves are the pieces. A user has
one leaf, as the model has:

* one `jax.Array`, sharded over the devices, if the pieces are equal and each is on one
  device of its own;
* a `Stacked` otherwise.

A piece of another process is a non-addressable array, as any parameter there is.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import serialization
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from .._jaxprs._axis_maps import with_size
from .._jaxprs._host_memory import in_memory_of
from .._jaxprs._pieces import Pieces
from .._processes._arrays import is_non_addressable, local_copy, placeholder

PyTree = Any
# The axis of the mesh over which a leaf is sharded: its devices are those of stages.
_AXIS = "jpipe_stages"


class Stacked:
    """An array in pieces along an axis, on several devices: a leaf of a pytree.

    It stands for a parameter of stacked layers whose stages hold different numbers of
    these. It has the shape and the dtype of the whole, and becomes an array of NumPy by
    `numpy.asarray`. One computes with it by ``pipe.jit`` or ``grad_fn.jit``.

    Args:
      arrays: the pieces, in order.
      axis: the axis along which they are cut.

    Attributes:
      arrays: the pieces.
      axis: the axis.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> leaf = Stacked([jnp.zeros((3, 2)), jnp.ones((1, 2))], axis=0)
      >>> leaf
      Stacked(float32[4,2], axis 0 in pieces of 3, 1)
      >>> float(np.asarray(leaf).sum())
      2.0
    """

    def __init__(self, arrays: Sequence[Any], axis: int) -> None:
        self.arrays = tuple(arrays)
        self.axis = axis

    @property
    def pieces(self) -> Pieces:
        """The axis, and the size of each piece along it."""
        return Pieces(self.axis, tuple(x.shape[self.axis] for x in self.arrays))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return with_size(self.arrays[0].shape, self.axis, self.pieces.length)

    @property
    def dtype(self) -> Any:
        """The dtype of the pieces."""
        return self.arrays[0].dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def _signature(self) -> Any:
        """The types and the places of the pieces: what a compiled program is for."""
        return self.axis, tuple((x.aval, x.sharding) for x in self.arrays)

    @property
    def memory_space(self) -> Any:
        """The memory in which the pieces are, as the type of an array of JAX has it."""
        return jax.typeof(self.arrays[0]).memory_space

    @property
    def weak_type(self) -> bool:
        """False: no parameter in pieces is weakly typed."""
        return False

    def devices(self) -> set[Any]:
        """Returns the devices of all pieces."""
        return set[Any]().union(*[array.devices() for array in self.arrays])

    def is_deleted(self) -> bool:
        """Returns True if a step has overwritten it."""
        return any(array.is_deleted() for array in self.arrays)

    def block_until_ready(self) -> "Stacked":
        """Waits until all pieces are computed."""
        jax.block_until_ready(self.arrays)
        return self

    def __array__(
        self,
        dtype: Any = None,
        copy: bool | None = None,  # noqa: FBT001
    ) -> np.ndarray:
        if any(map(is_non_addressable, self.arrays)):
            raise RuntimeError(
                f"{self!r} has pieces in other processes; compute with it in "
                f"pipe.jit(f)(tree) or grad_fn.jit(f)(tree), or save it by "
                f"jpipe.checkpoint.save"
            )
        whole = np.concatenate([np.asarray(x) for x in self.arrays], self.axis)
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        """Indexes the whole, on the host."""
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        sizes = ", ".join(map(str, self.pieces.sizes))
        return f"Stacked({self.dtype}[{shape}], axis {self.axis} in pieces of {sizes})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as those that copies and pickles ask for
            raise AttributeError(name)
        raise AttributeError(f"no attribute {name!r}: {self._advice()}")

    def _advice(self) -> str:
        return (
            f"{self!r} lies on several devices; compute with it in pipe.jit(f)(tree) "
            f"or grad_fn.jit(f)(tree), such as pipe.jit(optax.apply_updates)(params, "
            f"updates), or on the host with numpy.asarray(leaf); a tree comes to one "
            f"device by jpipe.sequential(layers).place(tree)"
        )

    def _refuse_arithmetic(self, *operands: Any) -> Any:
        del operands
        raise TypeError(self._advice())

    @property
    def __jax_array__(self) -> Any:
        """The array of one device, which JAX asks an object of another class for."""
        # `jax.jit` would replace a `TypeError` by one of its own.
        raise ValueError(self._advice())

    __add__ = __radd__ = __sub__ = __rsub__ = _refuse_arithmetic
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse_arithmetic
    __neg__ = __abs__ = _refuse_arithmetic


class PieceNode:
    """The pieces of a leaf, each of which is a leaf.

    Attributes:
      arrays: the pieces: arrays, specs, or ``None``.
      axis: the axis along which they are cut.
    """

    def __init__(self, arrays: Sequence[Any], axis: int) -> None:
        self.arrays = tuple(arrays)
        self.axis = axis

    def __repr__(self) -> str:
        return f"PieceNode({list(self.arrays)}, axis={self.axis})"


@dataclass(frozen=True)
class PieceKey:
    """The key of a piece in the path of a leaf.

    Attributes:
      index: the index of the piece.
      axis: the axis along which the leaf is cut.
    """

    index: int
    axis: int

    def __str__(self) -> str:
        return f"[piece {self.index}]"


def _flatten_with_keys(node: PieceNode) -> tuple[list[tuple[Any, Any]], int]:
    keys = [PieceKey(i, node.axis) for i in range(len(node.arrays))]
    return list(zip(keys, node.arrays, strict=True)), node.axis


def _unflatten(axis: int, arrays: Iterable[Any]) -> PieceNode:
    return PieceNode(list(arrays), axis)


jax.tree_util.register_pytree_with_keys(PieceNode, _flatten_with_keys, _unflatten)


def is_node(x: Any) -> bool:
    """True if something is a node of pieces."""
    return isinstance(x, PieceNode)


def drop_empty_nodes(tree: PyTree) -> PyTree:
    """A tree with ``None`` in place of nodes whose pieces are ``None``."""
    return jax.tree.map(
        lambda x: None if is_node(x) and None in x.arrays else x, tree, is_leaf=is_node
    )


def split_pieces(tree: PyTree, pieces: Mapping[int, Pieces]) -> PyTree:
    """A user's tree as it is inside.

    Args:
      tree: arrays or specs.
      pieces: index of a leaf -> its pieces.
    """
    if not pieces:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf_pieces in pieces.items():
        arrays = _split(leaves[i], leaf_pieces)
        leaves[i] = PieceNode(arrays, leaf_pieces.axis)
    return structure.unflatten(leaves)


def split_placed(tree: PyTree) -> PyTree:
    """A user's tree as it is inside; its leaves tell in which pieces they are."""
    pieces: dict[int, Pieces] = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if (leaf_pieces := _pieces_of(leaf)) is not None:
            pieces[i] = leaf_pieces
    return split_pieces(tree, pieces)


def _pieces_of(leaf: Any) -> Pieces | None:
    """The pieces in which a user's leaf is; ``None`` if it is whole."""
    if isinstance(leaf, Stacked):
        return leaf.pieces
    if not isinstance(leaf, jax.Array) or not _is_over_stages(leaf):
        return None
    sharding: Any = leaf.sharding
    axis = sharding.spec.index(_AXIS)
    num_pieces = len(leaf.devices())
    return Pieces(axis, (leaf.shape[axis] // num_pieces,) * num_pieces)


def pieces_of_leaves(tree: PyTree) -> dict[int, Pieces]:
    """Index of a leaf of the user's tree -> its pieces, for a tree as it is inside."""
    pieces: dict[int, Pieces] = {}
    for i, node in enumerate(jax.tree.leaves(tree, is_leaf=is_node)):
        if is_node(node):
            pieces[i] = Stacked(node.arrays, node.axis).pieces
    return pieces


def repeat_for_pieces(values: Sequence[Any], pieces: Mapping[int, Pieces]) -> list[Any]:
    """One value for each leaf inside, from one for each leaf of a user.

    Args:
      values: the values.
      pieces: index of a leaf of the user's tree -> its pieces.
    """
    repeated = list[Any]()
    for i, value in enumerate(values):
        repeated += [value] * (len(pieces[i].sizes) if i in pieces else 1)
    return repeated


def join_specs(tree: PyTree) -> PyTree:
    """Specs of the leaves of a user, from specs with nodes of pieces."""
    return jax.tree.map(
        lambda x: _join_spec(x) if is_node(x) else x, tree, is_leaf=is_node
    )


def _join_spec(node: PieceNode) -> jax.ShapeDtypeStruct:
    """The spec of a user's leaf, from those of its pieces."""
    whole = Stacked(node.arrays, node.axis)
    weak_type = node.arrays[0].weak_type
    spec = jax.ShapeDtypeStruct(whole.shape, whole.dtype, weak_type=weak_type)
    return in_memory_of(spec, node.arrays[0])


def gather_tree(tree: PyTree) -> PyTree:
    """A user's tree with arrays of NumPy in place of `Stacked` leaves."""
    return jax.tree.map(gather, tree)


def gather(leaf: Any) -> Any:
    """An array of NumPy for a `Stacked` leaf; any other leaf as it is."""
    return np.asarray(leaf) if isinstance(leaf, Stacked) else leaf


# `flax.serialization` saves the whole, and restores an array of NumPy, as it does for
# an array of JAX; `Pipeline.place` puts it in place.
serialization.register_serialization_state(
    Stacked, ty_to_state_dict=gather, ty_from_state_dict=lambda leaf, whole: whole
)


def fill_like(whole: np.ndarray, like: Stacked) -> Stacked:
    """A leaf with the pieces of another one, and the values of an array of the host."""
    arrays = list[Any]()
    for part, piece in zip(_split(whole, like.pieces), like.arrays, strict=True):
        array = piece
        if not is_non_addressable(piece):
            array = jax.make_array_from_callback(
                piece.shape, piece.sharding, lambda index, part=part: part[index]
            )
        arrays.append(array)
    return Stacked(arrays, like.axis)


def join_pieces(tree: PyTree) -> PyTree:
    """A tree as its user has it: one leaf for each node."""
    return jax.tree.map(lambda x: _join(x) if is_node(x) else x, tree, is_leaf=is_node)


def _split(leaf: Any, pieces: Pieces) -> list[Any]:
    """The pieces of a user's leaf, or of a spec."""
    pieces.check_shape(leaf.shape, "an array")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return list(pieces.specs(leaf))
    placed_pieces = _pieces_of(leaf)
    if placed_pieces == pieces:
        return _placed_arrays(leaf, pieces)
    leaf = local_copy(leaf)
    _check_local(leaf)
    if placed_pieces is not None:
        leaf = np.asarray(leaf)
    before = (slice(None),) * pieces.axis
    return [
        leaf[(*before, slice(begin, end))]
        for begin, end in zip(pieces.starts, pieces.ends, strict=True)
    ]


def _check_local(leaf: Any) -> None:
    """Checks that all of a leaf, which is to be cut in other pieces, is here."""
    arrays = leaf.arrays if isinstance(leaf, Stacked) else [leaf]
    if all(getattr(array, "is_fully_addressable", True) for array in arrays):
        return
    raise ValueError(
        f"an array of shape {leaf.shape} is in pieces for other stages, some of them "
        f"in other processes; to change who has what, save the state and restore it: "
        f"jpipe.checkpoint.save, jpipe.checkpoint.restore"
    )


def _placed_arrays(leaf: Any, pieces: Pieces) -> list[jax.Array]:
    """The pieces of a leaf that lies in pieces."""
    if isinstance(leaf, Stacked):
        return list(leaf.arrays)
    shards = sorted(
        leaf.global_shards, key=lambda shard: shard.index[pieces.axis].start or 0
    )
    arrays = list[jax.Array]()
    for shard, size in zip(shards, pieces.sizes, strict=True):
        array = shard.data
        if array is None:  # it is in another process
            shape = with_size(leaf.shape, pieces.axis, size)
            memory_kind = leaf.sharding.memory_kind
            sharding = SingleDeviceSharding(shard.device, memory_kind=memory_kind)
            array = placeholder(shape, leaf.dtype, sharding)
        arrays.append(array)
    return arrays


def _is_over_stages(array: jax.Array) -> bool:
    """True if an array is sharded over stages.

    What a user computes from such arrays, as their sum, may be replicated over them.
    """
    sharding = array.sharding
    is_named = isinstance(sharding, NamedSharding)
    return is_named and sharding.mesh.axis_names == (_AXIS,) and _AXIS in sharding.spec


def _join(node: PieceNode) -> Any:
    """The leaf of a user for a node of pieces."""
    arrays = node.arrays
    if any(array is None for array in arrays):
        return None
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return _join_spec(node)
    if isinstance(arrays[0], np.ndarray):  # such as the gradient of integers
        return np.concatenate(arrays, node.axis)
    device_sets = [array.devices() for array in arrays]
    devices = tuple(device for devices in device_sets for device in devices)
    are_equal = len({array.shape for array in arrays}) == 1
    is_one_each = len(set(devices)) == len(arrays) == len(devices)
    if not (are_equal and is_one_each):
        return Stacked(arrays, node.axis)
    return jax.make_array_from_single_device_arrays(
        Stacked(arrays, node.axis).shape,
        _stages_sharding(devices, node.axis, arrays[0].sharding.memory_kind),
        [array for array in arrays if not is_non_addressable(array)],
        dtype=arrays[0].dtype,
    )


@functools.lru_cache(maxsize=256)
def _stages_sharding(
    devices: tuple[Any, ...], axis: int, memory_kind: str | None
) -> NamedSharding:
    mesh = Mesh(np.array(devices), (_AXIS,))
    return NamedSharding(mesh, P(*[None] * axis, _AXIS), memory_kind=memory_kind)
