"""The layers' weights as one array a parameter [layers, ...], and each layer's own as a view of it.

Every operand of a launch costs the host a microsecond or two: a pass whose kernels pick the layer
takes the stacks. Whatever takes layers one by one has views: the same memory, not a copy.

    layers.*.qkv   | layer 0 | layer 1 | layer 2 | ...
                     ^ leaf    ^ leaf    ^ leaf
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxprefill.models.sharding import replicated
from jaxprefill.models.tree import AnyLeaf, Leaves, ModelTree

Stack = Callable[..., Shaped[Array, "layers ..."]]  # of each layer's array, in their order
_INT64_BYTES = 8
_ALIGNMENT = 128  # bytes: XLA has operands of a GPU begin at multiples (kEntryParameterAlignBytes)


def stacked_shapes(tree: ModelTree) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a stacked pass's operands: the leaves outside layers, and the layers' parameters.

    The layers must be of one form, on one device.
    """
    shapes, parts = _by_name(tree, tree.shapes), layer_parts(tree)
    return tuple(
        _stack_shape(shape, len(parts[name])) if name in parts else shape
        for name, shape in shapes.items()
    )


def layer_parts(tree: ModelTree) -> dict[str, tuple[int, ...]]:
    """Stack name -> positions of the leaves that are its layers, in their order."""
    parts: dict[str, dict[int, int]] = {}
    for index, path in enumerate(tree.paths):
        if _stack_name(path) != path:
            parts.setdefault(_stack_name(path), {})[int(path.split(".")[1])] = index
    return {name: tuple(own[layer] for layer in sorted(own)) for name, own in parts.items()}


def largest_stack_bytes(tree: ModelTree) -> int:
    """What stacking takes beside the weights, for a moment."""
    shapes = _by_name(tree, tree.shapes)
    return max(len(own) * _num_bytes(shapes[name]) for name, own in layer_parts(tree).items())


def weight_bytes(tree: ModelTree) -> int:
    """Of all leaves."""
    return sum(map(_num_bytes, tree.shapes))


def spread(tree: ModelTree, stacked: Leaves) -> Leaves:
    """The tree's leaves with the whole stack in each layer's place: kernels pick the layer."""
    by_name = dict(zip(_by_name(tree, tree.shapes), stacked, strict=True))
    return tuple(by_name[_stack_name(path)] for path in tree.paths)


def stack_leaves(
    tree: ModelTree, leaves: Leaves, stack_of: Callable[[str], Stack]
) -> tuple[Leaves, Leaves]:
    """(the leaves, those of layers now views; the operands of a stacked pass).

    The arrays of layers are gone afterwards. `stack_of` gives what stacks the arrays of a name.
    """
    found, by_name = list(leaves), _by_name(tree, leaves)
    for name, indices in layer_parts(tree).items():
        own = [leaves[index] for index in indices]
        by_name[name] = stack_of(name)(*own)
        jax.block_until_ready(by_name[name])
        for layer, index in enumerate(indices):
            found[index] = view(by_name[name], layer)
            own[layer].delete()
    return tuple(found), tuple(by_name.values())


def can_view(tree: ModelTree, device: Any) -> bool:
    """Whether jax gives arrays of this device that are part of another's memory, as layers are."""
    parts = layer_parts(tree).values()
    if any(_num_bytes(tree.shapes[index]) % _ALIGNMENT for own in parts for index in own):
        return False
    whole = jax.device_put(np.arange(256, dtype=np.int32).reshape(2, 128), device)
    try:
        return np.asarray(view(whole, 1)).tolist() == list(range(128, 256))
    except (BufferError, TypeError, ValueError, RuntimeError):
        return False


def view(stack: Shaped[Array, "layers ..."], layer: int) -> Shaped[Array, "..."]:
    """One layer of an array on one device, in the same memory, which lives as long as it does.

    Raises:
        BufferError: jax made a copy.
    """
    own = jax.dlpack.from_dlpack(_Part(stack, layer))
    offset = layer * (stack.nbytes // len(stack))
    if own.unsafe_buffer_pointer() != stack.unsafe_buffer_pointer() + offset:
        raise BufferError(f"layer {layer} of an array of {stack.shape} must be a view, not a copy")
    return jax.make_array_from_single_device_arrays(own.shape, stack.sharding, [own])


class _Part:
    """A layer of an array as DLPack's protocol hands it on: the array's own capsule, moved."""

    def __init__(self, stack: Shaped[Array, "layers ..."], layer: int) -> None:
        self._stack: Any = stack  # jax does not type the protocol
        self._layer = layer

    def __dlpack_device__(self) -> Any:
        return self._stack.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        capsule = self._stack.__dlpack__(stream=stream)
        tensor = _Tensor.from_address(_POINTER_OF(capsule, b"dltensor"))
        tensor.data += self._layer * (self._stack.nbytes // len(self._stack))
        tensor.num_axes -= 1
        tensor.shape += _INT64_BYTES
        tensor.strides = tensor.strides and tensor.strides + _INT64_BYTES
        return capsule


class _Tensor(ctypes.Structure):
    """The DLTensor that a capsule's memory begins with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("num_axes", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_POINTER_OF = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _stack_name(path: str) -> str:
    """Path of a leaf, its layer left open."""
    outer, *rest = path.split(".", 2)
    return f"{outer}.*.{rest[1]}" if outer == "layers" else path


def _by_name(tree: ModelTree, leaves: tuple[AnyLeaf, ...]) -> dict[str, AnyLeaf]:
    """Those outside layers, and one of each parameter of layers, in the order of the leaves."""
    return dict(zip(map(_stack_name, tree.paths), leaves, strict=True))


def _num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _stack_shape(shape: jax.ShapeDtypeStruct, num_layers: int) -> jax.ShapeDtypeStruct:
    sharding: Any = shape.sharding  # a NamedSharding: leaves lie on a mesh
    whole = replicated(sharding.mesh)
    return jax.ShapeDtypeStruct((num_layers, *shape.shape), shape.dtype, sharding=whole)
