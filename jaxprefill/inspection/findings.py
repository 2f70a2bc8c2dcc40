"""What should not be in a compiled pass: copies of weights, products in float32, and the like."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxprefill.inspection.cost import Cost, ProgramCost
from jaxprefill.inspection.program import Kernel, Program, scope_of, touches_host

MIN_BYTES = 4096  # what is smaller costs its launch, not its bytes
_MOVING = frozenset(("copy", "copy-start", "transpose", "convert", "slice", "dynamic-slice"))
_CPU_LOOPS = {  # by scope: loops that an engine on a CPU is meant to have
    "layers": "on a CPU the layers are a loop, which compiles four times faster",
    "attention.core": "on a CPU attention takes the context in blocks",
    "moe.experts": "on a CPU experts take their tokens in blocks",
    "sampling.cut": "top-p and top-k halve an interval of logits instead of sorting all",
    "sampling.noise": "JAX's random bits are made in rounds",
}
_MOVES = (
    _MOVING
    | {"parameter", "constant", "bitcast", "reshape", "concatenate", "pad", "iota"}
    | {"add", "clamp", "compare", "select", "broadcast"}  # where to copy from
)
_REDUCTIONS = frozenset(("reduce", "reduce-window"))
_MAX_NORM_KERNELS = 3  # squares and their sum; its root; the scaling
_CPU_TRANSPOSE = "on a CPU products of few rows take the weight first"
_CPU_NORM = "XLA's CPU backend fuses no reduction"
_UPLOAD = "the step's integers come from pinned memory"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs time for nothing.

    Attributes:
        kind: weight copy, transpose, float32 product, host transfer, while or unfused norm.
        what: the instruction, and what it does.
        count: how often a run executes it.
        num_bytes: that it moves in a run.
        expected: why it is meant to be there; empty where it is not.
    """

    kind: str
    what: str
    scope: str = ""
    count: float = 1.0
    num_bytes: int = 0
    expected: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def find(program: Program, cost: ProgramCost, *, platform: str = "") -> list[Finding]:
    """Everything that is found, the unexpected first, like ones together."""
    is_cpu = platform == "cpu"
    found = list(_loops(program, is_cpu=is_cpu))
    is_narrow = _has_narrow_weights(program)
    for kernel, one in zip(program.kernels, cost.by_kernel, strict=True):
        found += _of_kernel(kernel, one, program.weights, is_narrow=is_narrow, is_cpu=is_cpu)
    found += _norms(program, is_cpu=is_cpu)
    merged: dict[tuple[str, ...], Finding] = {}
    for each in found:
        key = (each.kind, each.what, each.scope, each.expected)
        known = merged.get(key)
        merged[key] = each if known is None else _sum(known, each)
    return sorted(merged.values(), key=lambda each: (each.expected != "", each.kind))


def _sum(one: Finding, other: Finding) -> Finding:
    return replace(one, count=one.count + other.count, num_bytes=one.num_bytes + other.num_bytes)


def _of_kernel(
    kernel: Kernel, cost: Cost, weights: frozenset[int], *, is_narrow: bool, is_cpu: bool
) -> Iterator[Finding]:
    shape, opcodes = kernel.instruction.shape, kernel.opcodes

    def finding(kind: str, what: str, expected: str = "") -> Finding:
        num_bytes = round(cost.num_bytes * kernel.count)
        return Finding(
            kind=kind,
            what=what,
            scope=kernel.scope,
            count=kernel.count,
            num_bytes=num_bytes,
            expected=expected,
        )

    if touches_host(kernel):
        target = kernel.instruction.target or kernel.instruction.opcode
        is_upload = kernel.kind == "copy" and "s32" in str(shape)
        yield finding("host transfer", f"{target} {shape}", _UPLOAD if is_upload else "")
        return
    moves = opcodes <= _MOVES and bool(opcodes & _MOVING)
    if cost.written_bytes >= MIN_BYTES:
        matrices = [x for x in kernel.origins if isinstance(x, int) and x in weights]
        is_matrix = sum(size > 1 for size in shape.dims) > 1
        if matrices and is_matrix and (moves or _is_made_of_weights(kernel, weights)):
            verb = "converted" if "convert" in opcodes else "copied" if moves else "computed anew"
            name = kernel.module.parameters[matrices[0]].op_name or f"parameter {matrices[0]}"
            yield finding("weight copy", f"{name} is {verb} to {shape}")
        elif moves and "transpose" in opcodes:
            is_meant = is_cpu and "dot" in opcodes | kernel.read_opcodes
            yield finding("transpose", f"of {shape}", _CPU_TRANSPOSE if is_meant else "")
    if is_narrow and cost.products and "f32" in cost.products:
        yield finding("float32 product", f"{kernel.kind} to {shape}, where weights are narrower")


def _is_made_of_weights(kernel: Kernel, weights: frozenset[int]) -> bool:
    """Whether it makes another matrix from weights alone, which is the same in every pass.

    Of programs whose weights are only guessed nothing is said: what they read may be a batch.
    """
    names = {kernel.module.parameters[x].op_name for x in kernel.origins if x in weights}
    if not all(name.startswith("arguments[0]") for name in names):
        return False
    shapes = [each.shape for each in kernel.computation.operands(kernel.instruction)]
    read = list(zip(kernel.origins, shapes, strict=True))
    own = [shape.size for origin, shape in read if origin in weights]
    others = [x.num_bytes for origin, x in read if origin not in weights]
    is_whole = 2 * kernel.instruction.shape.size >= max(own)
    return is_whole and "dot" not in kernel.opcodes and sum(others) < MIN_BYTES


def _has_narrow_weights(program: Program) -> bool:
    """Whether most bytes of the weights are in 16 bits or fewer."""
    sizes = {True: 0, False: 0}
    for each in program.module.parameters:
        if each.index in program.weights:
            sizes[each.shape.dtype not in ("f32", "f64")] += each.shape.num_bytes
    return sizes[True] > sizes[False]


def _loops(program: Program, *, is_cpu: bool) -> Iterator[Finding]:
    for loop, turns in program.loops:
        often = "an unknown number of turns" if turns is None else f"{turns} turns"
        scope = scope_of(loop.op_name)
        place = "layers" if loop.op_name.endswith("/layers/while") else scope
        expected = _CPU_LOOPS.get(place, "") if is_cpu else ""
        yield Finding(kind="while", what=often, scope=scope, expected=expected)


def _norms(program: Program, *, is_cpu: bool) -> Iterator[Finding]:
    """Norms whose squares, sum, root and scaling are kernels of their own."""
    by_place = {(k.computation.name, k.instruction.name): k for k in program.kernels}
    users: dict[tuple[str, str], list[Kernel]] = {place: [] for place in by_place}
    for kernel in program.kernels:
        for name in dict.fromkeys(kernel.producers):
            users.get((kernel.computation.name, name), []).append(kernel)
    for kernel in program.kernels:
        if "rsqrt" not in kernel.opcodes:
            continue
        chain = [kernel, *_before(kernel, by_place, users)]
        place = (kernel.computation.name, kernel.instruction.name)
        chain += [each for each in users[place] if "multiply" in each.opcodes][:1]
        if len(chain) > _MAX_NORM_KERNELS:
            yield Finding(
                kind="unfused norm",
                what=f"{len(chain)} kernels",
                scope=next((each.scope for each in chain if each.scope), ""),
                count=kernel.count,
                expected=_CPU_NORM if is_cpu else "",
            )


def _before(
    kernel: Kernel,
    by_place: dict[tuple[str, str], Kernel],
    users: dict[tuple[str, str], list[Kernel]],
) -> list[Kernel]:
    """The reductions in front of a root, and the squares that only they read."""
    found: list[Kernel] = []
    for name in dict.fromkeys(kernel.producers):
        place = (kernel.computation.name, name)
        before = by_place.get(place)
        if before is None or "dot" in before.opcodes or len(users[place]) > 1:
            continue
        if before.opcodes & _REDUCTIONS or before.opcodes & {"multiply"}:
            found += [before, *_before(before, by_place, users)]
    return found
