"""Follows a program from its entry: which kernels run, how often, and where weights flow.

A loop counts as often as XLA knows that it turns, a conditional as the mean of its branches.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxprefill.inspection.hlo import Computation, Instruction, Module

# What a value is: an entry parameter by its number, a tuple of such, or something computed.
Origin = int | tuple["Origin", ...] | None

_FREE = frozenset(("constant", "after-all", "partition-id", "replica-id", "iota", "add-dependency"))
_LIBRARY = re.compile(r"__cublas|__cudnn\$|__onednn|__ynn|__eigen|__acl", re.IGNORECASE)
_PALLAS = re.compile(r"__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic", re.IGNORECASE)
_CALLBACK = re.compile(r"callback|SendToHost|RecvFromHost", re.IGNORECASE)
_HOST_OPCODES = frozenset(["infeed", "outfeed", "send", "recv", "send-done", "recv-done"])
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-")
_HOST_MEMORY = 5
_LOOP = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(\d+)"?\}')
_FUSION_KIND = re.compile(r'"kind":\s*"(\w+)"')
_PALLAS_NAME = re.compile(r'\bname\s*=\s*\\?"([\w.-]+)|"name":\s*"([\w.-]+)"')
# Names that tracing puts into a path, beside those of the model's own scopes.
_STRUCTURE = re.compile(
    r"[\w.<>-]*\(.*\)?|layers|while|body|cond|closed_call|eval_jaxpr|branch_\d+_fun|shard_map|"
    r"checkpoint|custom_[jv][vj]p_call|pallas_call|.*<locals>.*|.*\)"
)


@dataclass(frozen=True)
class Kernel:
    """One instruction that does something when the program runs.

    Attributes:
        count: how often a run executes it.
        origins: what each operand is.
        body: what a fusion computes.
        module: where fusions inside the body are found.
        read_in: the one scope of all that read it, if they agree.
    """

    instruction: Instruction
    computation: Computation
    count: float
    origins: tuple[Origin, ...]
    body: Computation | None
    module: Module = field(repr=False)
    read_in: str = ""

    @property
    def kind(self) -> str:
        """GEMM library, GEMM Triton, Pallas NAME, fusion, copy, collective, host or an opcode."""
        kind = kind_of(self.instruction)
        if self.body is None or not kind.startswith("GEMM") or "dot" in self.opcodes:
            return kind
        return "fusion"  # a library's reduction

    @property
    def opcodes(self) -> frozenset[str]:
        """Its own, or those of what is fused, at any depth."""
        return frozenset(each.opcode for each in _fused(self.instruction, self.body, self.module))

    @property
    def read_opcodes(self) -> frozenset[str]:
        """Those of all whose results it reads."""
        makers = [self.computation.instructions[name] for name in self.producers]
        fused = (_fused(each, _body(each, self.module), self.module) for each in makers)
        return frozenset(each.opcode for some in fused for each in some)

    @property
    def producers(self) -> list[str]:
        """Names of the instructions whose results it reads, whatever their views are called."""
        return [_viewed(name, self.computation) for name in self.instruction.operands]

    @property
    def scope(self) -> str:
        """The model's named scope, such as `attention.qkv`; empty where there is none.

        What XLA makes itself, it leaves without: products of one row on a CPU, for one. There the
        scope is that of the kernels that read it.
        """
        return _own_scope(self.instruction, self.body) or self.read_in


@dataclass
class Program:
    """What a module runs.

    Attributes:
        loops: each `while`, and how often it turns; None where XLA does not know.
        num_conditionals: of all computations that run.
    """

    module: Module
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    loops: list[tuple[Instruction, int | None]] = field(
        default_factory=list[tuple[Instruction, int | None]]
    )
    num_conditionals: int = 0

    @property
    def weights(self) -> frozenset[int]:
        """Entry parameters that hold weights.

        Executables of jaxprefill take them as their first argument; of other programs every matrix
        of floats counts that is not donated.
        """
        parameters = self.module.parameters
        first = {x.index for x in parameters if x.op_name.startswith("arguments[0]")}
        return frozenset(
            x.index
            for x in parameters
            if x.index not in self.module.aliases
            and len(x.shape.dims) > 1
            and (x.index in first if first else x.shape.is_float)
        )


def follow(module: Module) -> Program:
    """The kernels of a module in the order in which they run."""
    program = Program(module)
    entry = tuple(range(len(module.parameters)))
    _Walk(program).run(module.entry, entry, 1.0)
    return program


class _Walk:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._module = program.module
        self._read_in: dict[str, dict[str, str]] = {}  # by computation and instruction

    def run(self, computation: Computation, arguments: tuple[Origin, ...], count: float) -> Origin:
        """Adds what a computation runs; returns what its result is."""
        known: dict[str, Origin] = {}
        for each in computation.instructions.values():
            known[each.name] = self._step(each, computation, known, arguments, count)
        return known[computation.root.name]

    def _step(
        self,
        each: Instruction,
        computation: Computation,
        known: dict[str, Origin],
        arguments: tuple[Origin, ...],
        count: float,
    ) -> Origin:
        operands = tuple(known.get(name) for name in each.operands)
        if each.opcode == "parameter":
            return arguments[each.index] if each.index < len(arguments) else None
        if each.opcode == "tuple":
            return operands
        if each.opcode == "get-tuple-element":
            whole = operands[0]
            return whole[each.index] if isinstance(whole, tuple) else None
        if each.opcode in ("bitcast", "optimization-barrier"):
            return operands[0]
        if each.opcode == "while":
            return self._loop(each, operands[0], count)
        if each.opcode in ("call", "conditional"):
            return self._branches(each, operands, count)
        if each.opcode not in _FREE and not each.opcode.endswith(("-done", "-update")):
            if computation.name not in self._read_in:
                self._read_in[computation.name] = _scopes_of_readers(computation, self._module)
            read_in = self._read_in[computation.name].get(each.name, "")
            body = _body(each, self._module)
            kernel = Kernel(each, computation, count, operands, body, self._module, read_in)
            self._program.kernels.append(kernel)
        return None

    def _loop(self, each: Instruction, state: Origin, count: float) -> Origin:
        found = _LOOP.search(each.attributes)
        turns = int(found[1]) if found else None
        self._program.loops.append((each, turns))
        body = self._module.computations[each.called["body"][0]]
        kept = _kept(body, state)
        self.run(body, (kept,), count * (turns or 1))
        return kept

    def _branches(self, each: Instruction, operands: tuple[Origin, ...], count: float) -> Origin:
        if each.opcode == "call":
            return self.run(self._module.computations[each.called["to_apply"][0]], operands, count)
        self._program.num_conditionals += 1
        names = [
            name
            for kind in ("branch_computations", "true_computation", "false_computation")
            for name in each.called.get(kind, ())
        ]
        for name, argument in zip(names, operands[1:], strict=True):
            self.run(self._module.computations[name], (argument,), count / len(names))
        return None


def _fused(each: Instruction, body: Computation | None, module: Module) -> Iterator[Instruction]:
    if body is None:
        yield each
        return
    for inner in body.instructions.values():
        yield from _fused(inner, _body(inner, module), module)


def _body(each: Instruction, module: Module) -> Computation | None:
    """What a fusion computes."""
    called = each.called.get("calls", ())
    return module.computations[called[0]] if called else None


def _own_scope(each: Instruction, body: Computation | None) -> str:
    names = [each.op_name]
    if body is not None:
        inside = body.instructions.values()
        names += [body.root.op_name, *(x.op_name for x in inside if x.opcode == "dot")]
        names += [x.op_name for x in inside]
    return next((scope for scope in map(scope_of, names) if scope), "")


def _scopes_that_read(body: Computation, at: int) -> set[str]:
    """Of what in a fusion reads its operand `at`."""
    inside = body.instructions.values()
    names = {each.name for each in inside if each.opcode == "parameter" and each.index == at}
    return {scope_of(each.op_name) for each in inside if names & set(each.operands)} - {""}


def _scopes_of_readers(computation: Computation, module: Module) -> dict[str, str]:
    """The scope of all that read an instruction's result, where there is just one."""
    readers: dict[str, set[str]] = {}
    for each in reversed(computation.instructions.values()):
        theirs = readers.get(each.name, set())
        body = _body(each, module)
        own = _own_scope(each, body)
        scope = own or (next(iter(theirs)) if len(theirs) == 1 else "")
        for at, name in enumerate(each.operands):
            inside = set[str]() if body is None else _scopes_that_read(body, at)
            readers.setdefault(name, set()).update(inside or ({scope} - {""}))
    return {name: next(iter(scopes)) for name, scopes in readers.items() if len(scopes) == 1}


def _viewed(name: str, computation: Computation) -> str:
    each = computation.instructions[name]
    return _viewed(each.operands[0], computation) if each.opcode == "bitcast" else name


def _kept(body: Computation, state: Origin) -> Origin:
    """The loop's state without what its body replaces."""
    root = body.root
    if not isinstance(state, tuple) or root.opcode != "tuple":
        return None
    passed = zip(state, body.operands(root), strict=True)
    return tuple(
        origin if each.opcode == "get-tuple-element" and each.index == at else None
        for at, (origin, each) in enumerate(passed)
    )


def kind_of(instruction: Instruction) -> str:
    """See `Kernel.kind`."""
    opcode, target = instruction.opcode, instruction.target
    if opcode == "custom-call":
        if _CALLBACK.search(target):
            return "host"
        if _LIBRARY.search(target):
            return "GEMM library"
        return f"Pallas {pallas_name(instruction)}" if _PALLAS.search(target) else target
    if opcode == "fusion":
        found = _FUSION_KIND.search(instruction.attributes)
        kind = found[1] if found else ""
        if _LIBRARY.search(kind):
            return "GEMM library"
        return "GEMM Triton" if "gemm" in kind else "fusion"
    if opcode in _HOST_OPCODES:
        return "host"
    if opcode == "dot":
        return "GEMM library"  # of a CPU: a call of its matrix library, or a loop of LLVM
    if opcode.startswith("copy"):
        return "copy"
    return "collective" if opcode.startswith(_COLLECTIVES) else opcode


def pallas_name(instruction: Instruction) -> str:
    """The kernel's own name, or the last of its path; Mosaic kernels keep none."""
    if "mosaic" in instruction.target:
        return instruction.target
    config = instruction.attributes.partition("backend_config=")[2]
    found = _PALLAS_NAME.search(config)
    return (found[1] or found[2]) if found else instruction.op_name.rsplit("/", 1)[-1]


def scope_of(op_name: str) -> str:
    """`jit(prefill)/jit(layer)/mlp.down/dot_general` is in `mlp.down`.

    What XLA made of several operations has their paths, with semicolons between: the first that
    has a scope counts.
    """
    paths = (_path(each)[:-1] for each in op_name.split(";"))
    scopes = ("/".join(p for p in path if not _STRUCTURE.fullmatch(p)) for path in paths)
    return next(filter(None, scopes), "")


def _path(op_name: str) -> list[str]:
    """Split at slashes outside parentheses."""
    return re.split(r"/(?![^(]*\))", op_name)


def touches_host(kernel: Kernel) -> bool:
    """A callback, a feed, or a copy from or to the host's memory."""
    shapes = [kernel.instruction.shape, *kernel.instruction.shape.elements]
    shapes += [each.shape for each in kernel.computation.operands(kernel.instruction)]
    return kernel.kind == "host" or any(shape.memory_space == _HOST_MEMORY for shape in shapes)
