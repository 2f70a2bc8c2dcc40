"""What a kernel costs at least: products by dtype, and bytes between it and memory.

XLA's own cost analysis counts a loop's body once and a donated pool whole; this counts loops as
often as they turn, and of what is sliced, gathered or updated in place only the rows in question.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from jaxprefill.inspection.hlo import Computation, Instruction
from jaxprefill.inspection.program import Kernel, Program

_SLICING = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATING = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds the new rows
_ALIASED = re.compile(r"\((\d+), \{")
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\["(\d+)"')


@dataclass(frozen=True)
class Cost:
    """Of one execution.

    Attributes:
        products: floating-point operations of matrix products (two a multiply-add), by the
            operands' dtype; None where a kernel does not tell them.
        read_bytes: by operand.
    """

    products: dict[str, float] | None
    read_bytes: tuple[int, ...]
    written_bytes: int

    @property
    def flops(self) -> float | None:
        """All products."""
        return None if self.products is None else sum(self.products.values())

    @property
    def num_bytes(self) -> int:
        """Read and written."""
        return sum(self.read_bytes) + self.written_bytes


@dataclass(frozen=True)
class ProgramCost:
    """Of one run of a program.

    Attributes:
        by_kernel: beside `Program.kernels`; of one execution each.
        num_bytes: what all kernels read and write.
        needed_bytes: what no schedule can save: each argument as far as it is read, once, and
            each new result.
        num_untold: kernels whose products are not known; theirs are not in `products`.
    """

    by_kernel: list[Cost]
    products: dict[str, float] = field(default_factory=dict[str, float])
    num_bytes: int = 0
    needed_bytes: int = 0
    num_untold: int = 0

    @property
    def flops(self) -> float:
        """All products."""
        return sum(self.products.values())


def cost_program(program: Program) -> ProgramCost:
    """The cost of each kernel, and of all."""
    weights = program.weights
    costs = [cost_kernel(kernel, weights) for kernel in program.kernels]
    products: dict[str, float] = {}
    reads = Counter[int]()
    num_bytes, untold = 0.0, 0
    for kernel, cost in zip(program.kernels, costs, strict=True):
        num_bytes += cost.num_bytes * kernel.count
        untold += cost.products is None
        for dtype, flops in (cost.products or {}).items():
            products[dtype] = products.get(dtype, 0.0) + flops * kernel.count
        for origin, read in zip(kernel.origins, cost.read_bytes, strict=True):
            if isinstance(origin, int):
                reads[origin] += math.ceil(read * kernel.count)
    return ProgramCost(
        by_kernel=costs,
        products=products,
        num_bytes=round(num_bytes),
        needed_bytes=_needed(program, reads),
        num_untold=untold,
    )


def _needed(program: Program, reads: Counter[int]) -> int:
    module = program.module
    read = sum(min(reads[x.index], x.shape.num_bytes) for x in module.parameters)
    results = module.entry.root.shape
    donated = sum(x.shape.num_bytes for x in module.parameters if x.index in module.aliases)
    return read + max(results.num_bytes - donated, 0)


def cost_kernel(kernel: Kernel, weights: frozenset[int]) -> Cost:
    """Of one execution; `weights` tells which entry parameters are."""
    each, body = kernel.instruction, kernel.body
    operands = kernel.computation.operands(each)
    if each.opcode == "fusion" and body is not None:
        parameters = sorted(
            (x for x in body.instructions.values() if x.opcode == "parameter"),
            key=lambda x: x.index,
        )
        users = body.users()
        read = tuple(_read(x, body, users) for x in parameters)
        return Cost(_products_of_body(kernel, body), read, _written(body.root, body))
    if each.opcode == "custom-call":
        return _custom_call(kernel, operands, weights)
    sizes = [x.shape.num_bytes for x in operands]
    if each.opcode in _SLICING:
        sizes[0] = each.shape.num_bytes
    if each.opcode in _UPDATING:
        sizes[0] = 0
    products = _dot(each, kernel.computation)
    return Cost(products, tuple(sizes), _written(each, kernel.computation))


def _read(value: Instruction, body: Computation, users: dict[str, list[Instruction]]) -> int:
    """Bytes that a fusion reads of one of its parameters."""
    if value.is_root:
        return value.shape.num_bytes
    total = 0
    for user in users[value.name]:
        is_first = user.operands[0] == value.name
        if user.opcode == "bitcast" or (user.opcode in _SLICING and is_first):
            total += _read(user, body, users)
        elif not (user.opcode in _UPDATING and is_first):
            return value.shape.num_bytes
    return min(total, value.shape.num_bytes)


def _written(result: Instruction, body: Computation) -> int:
    """Bytes that a kernel writes; what is updated in place keeps the rest."""
    if result.opcode == "tuple":
        return sum(_written(part, body) for part in body.operands(result))
    if result.opcode == "bitcast":
        return _written(body.operands(result)[0], body)
    if result.opcode in _UPDATING and len(result.operands) > _UPDATING[result.opcode]:
        return body.operands(result)[_UPDATING[result.opcode]].shape.num_bytes
    return result.shape.num_bytes


def _products_of_body(kernel: Kernel, body: Computation) -> dict[str, float]:
    found = Counter[str]()
    for each in body.instructions.values():
        found.update(_dot(each, body))
        for name in each.called.get("calls", ()):
            found.update(_products_of_body(kernel, kernel.module.computations[name]))
    return dict(found)


def _dot(each: Instruction, computation: Computation) -> dict[str, float]:
    """Two operations for each number of the result and of the axes summed over."""
    if each.opcode != "dot":
        return {}
    left = computation.operands(each)[0].shape
    summed = math.prod(left.dims[axis] for axis in each.numbers_of("lhs_contracting_dims"))
    return {left.dtype: 2.0 * each.shape.size * summed}


def _custom_call(kernel: Kernel, operands: list[Instruction], weights: frozenset[int]) -> Cost:
    """Of a library's product, or of a kernel; a pool that it updates in place is not counted."""
    each = kernel.instruction
    shared = {int(number) for number in _ALIASED.findall(_aliasing(each))}
    read = tuple(0 if at in shared else x.shape.num_bytes for at, x in enumerate(operands))
    written = each.shape.num_bytes - sum(operands[at].shape.num_bytes for at in shared)
    return Cost(_custom_products(kernel, operands, weights), read, max(written, 0))


def _aliasing(each: Instruction) -> str:
    at = each.attributes.find("output_to_operand_aliasing={")
    return "" if at < 0 else each.attributes[at : each.attributes.find(")}", at)]


def _custom_products(
    kernel: Kernel, operands: list[Instruction], weights: frozenset[int]
) -> dict[str, float] | None:
    if kernel.kind == "GEMM library" and operands:
        left, result = operands[0].shape, kernel.instruction.shape
        result = result.elements[0] if result.elements else result
        found = _CONTRACTING.search(kernel.instruction.attributes)
        axis = int(found[1]) if found else -1
        return {left.dtype: 2.0 * result.size * left.dims[axis]}
    if not kernel.kind.startswith("Pallas"):
        return {}
    # A kernel that reads a weight multiplies all of it by every row of its result.
    matrices = [
        x.shape
        for x, origin in zip(operands, kernel.origins, strict=True)
        if isinstance(origin, int) and origin in weights and "norm" not in x.op_name
    ]
    results = kernel.instruction.shape.elements or (kernel.instruction.shape,)
    rows = next((shape.dims[0] for shape in results if len(shape.dims) == 2), 0)
    products = [shape for shape in matrices if shape.size > 4 * rows * max(shape.dims)] or matrices
    if not products or not rows:
        return None
    largest = max(products, key=lambda shape: shape.size)
    return {largest.dtype: 2.0 * rows * largest.size}
