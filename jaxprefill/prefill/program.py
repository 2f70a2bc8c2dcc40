"""A loaded executable as a function of arrays: operands flattened, results put together again.

jit's own call object cannot be had without tracing and lowering, which a warm start leaves out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from jaxprefill.compat import PjrtExecutable
from jaxprefill.errors import StoreError
from jaxprefill.models.sharding import replicated

Outputs = Any  # nested tuples of ShapeDtypeStruct
Shards = Sequence[Sequence[Shaped[Array, "..."]]]  # of each result, on each device
Launch = Callable[[Sequence[Any]], Shards]
Recompile = Callable[[Exception], PjrtExecutable]


class OperandsLostError(Exception):
    """A loaded executable failed and took donated operands with it; it was compiled anew."""


def outputs_as_json(outputs: Outputs) -> Any:
    """Nested lists of {"shape", "dtype"}.

    Raises:
        StoreError: results are nested otherwise than in tuples.
    """
    if type(outputs) in (tuple, list):
        return [outputs_as_json(one) for one in outputs]
    if not hasattr(outputs, "shape"):
        raise StoreError(f"results must be arrays in tuples, got {type(outputs).__name__}")
    return {"shape": list(outputs.shape), "dtype": np.dtype(outputs.dtype).name}


def outputs_of_json(value: Any) -> Outputs:
    """What `outputs_as_json` was given."""
    if isinstance(value, list):
        return tuple(map(outputs_of_json, value))
    return jax.ShapeDtypeStruct(tuple(value["shape"]), jax.numpy.dtype(value["dtype"]))


class LoadedProgram:
    """Calls PJRT's executable; donated operands are gone afterwards, as with jit's.

    The first launch is awaited. Should it fail, another executable takes the loaded one's place.
    """

    def __init__(
        self,
        executable: PjrtExecutable,
        *,
        read: tuple[int, ...],
        outputs: Outputs,
        out_specs: Any,
        mesh: Mesh,
        recompile: Recompile,
    ) -> None:
        """Arguments as in `Compiled`.

        Args:
            executable: loaded onto the devices of `mesh`.
            read: positions of the flattened operands that it takes.
            outputs: shapes of the results over all devices.
            out_specs: how they lie on the mesh; a prefix of their tree.
            mesh: one device, or more.
            recompile: told why the loaded one failed, gives one that XLA compiles now.
        """
        self._executable = executable
        self._recompile = recompile
        self._has_run = False
        self._read = read
        self._is_single = mesh.size == 1
        # Where the host's numbers go.
        self._place = mesh.devices.flat[0] if self._is_single else replicated(mesh)
        shapes, self._tree = jax.tree.flatten(outputs)
        specs = jax.tree.leaves(
            jax.tree.map(
                lambda spec, part: jax.tree.map(lambda _: _Spec(spec), part),
                out_specs,
                outputs,
                is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
            )
        )
        self._results = [
            (shape.shape, jax.sharding.NamedSharding(mesh, spec.value))
            for shape, spec in zip(shapes, specs, strict=True)
        ]

    def __call__(self, *arguments: Any) -> Any:
        """The results of one launch; dispatched, not awaited."""
        leaves, place = jax.tree.leaves(arguments), self._place
        operands = [leaves[index] for index in self._read]
        for index, operand in enumerate(operands):
            if isinstance(operand, (np.ndarray, np.generic)):
                operands[index] = jax.device_put(operand, place)
        shards = self.launch(operands)
        if self._is_single:
            results = [one for (one,) in shards]
        else:
            results = [
                jax.make_array_from_single_device_arrays(shape, sharding, own)
                for (shape, sharding), own in zip(self._results, shards, strict=True)
            ]
        return jax.tree.unflatten(self._tree, results)

    def launch(self, operands: Sequence[Any]) -> Shards:
        """The results of one launch on the operands that the program takes, flattened.

        Raises:
            OperandsLostError: it was the first, and must be repeated on new operands.
            CompileError: the loaded executable failed, and no other could be compiled.
        """
        if self._has_run:
            return launch(self._executable, operands)
        try:
            shards = launch(self._executable, operands)
            jax.block_until_ready(shards)
        except Exception as error:  # XLA's, of whatever kind
            self._executable, self._has_run = self._recompile(error), True
            if any(isinstance(one, jax.Array) and one.is_deleted() for one in operands):
                raise OperandsLostError from error
            return launch(self._executable, operands)
        self._has_run = True
        return shards

    def runtime_executable(self) -> PjrtExecutable:
        """PJRT's own object."""
        return self._executable

    def as_text(self) -> str:
        """HLO after optimisation."""
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())


def launch(executable: PjrtExecutable, operands: Sequence[Any]) -> Shards:
    """The results of one launch, flattened; dispatched, not awaited."""
    return executable.execute_sharded(operands).disassemble_into_single_device_arrays()


class _Spec:
    """A PartitionSpec as a leaf: by itself it may be taken for a tuple."""

    def __init__(self, value: jax.sharding.PartitionSpec) -> None:
        self.value = value
