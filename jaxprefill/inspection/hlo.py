"""Reads XLA's text of an optimised program: computations, instructions, shapes, and who calls whom.

The text is the one form that every jax has, that a store keeps and that a server sends (jaxlib's
`HloModule` shows shapes from 0.12 on only); a test compares what is read here with jaxlib's own
objects. Whatever is not understood is an error, never a guess.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxprefill.errors import InspectionError

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+)(?: \(.*\) -> .*)? \{")
_ASSIGNED = re.compile(r"\s+(ROOT )?%?([\w.$-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w-]*)\(")
_OPERAND = re.compile(r"%([\w.$-]+)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%[\w.$-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+),")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Shape:
    """An array, or a tuple of shapes.

    Attributes:
        memory_space: 0 where the device computes; 5 is the host's memory.
        elements: of a tuple; an array has none.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    memory_space: int = 0
    elements: tuple["Shape", ...] = ()

    @property
    def size(self) -> int:
        """Numbers of an array."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Of all that it holds."""
        if self.dtype == "tuple":
            return sum(element.num_bytes for element in self.elements)
        return -(-self.size * _bits(self.dtype) // 8)

    @property
    def is_float(self) -> bool:
        """Floating point of any width."""
        return self.dtype[0] == "f" or self.dtype.startswith("bf")

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        operands: names of instructions of the same computation.
        called: computations it runs, by the attribute that names them.
        argument: the text between its parentheses: a constant's value, a parameter's number.
        attributes: the text behind them.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    argument: str
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from: `jit(f)/scope/primitive`, or nothing."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls; empty for other instructions."""
        return self.text_of("custom_call_target")

    @property
    def index(self) -> int:
        """Of a get-tuple-element or a parameter."""
        return int(self.argument) if self.opcode == "parameter" else self.number_of("index") or 0

    def text_of(self, attribute: str) -> str:
        """A quoted attribute, or nothing."""
        found = re.search(rf'\b{attribute}="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def number_of(self, attribute: str) -> int | None:
        """An attribute that is one number."""
        found = re.search(rf"\b{attribute}=(\d+)", self.attributes)
        return int(found[1]) if found else None

    def numbers_of(self, attribute: str) -> tuple[int, ...]:
        """An attribute that lists numbers, `name={0,1}`."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(part) for part in found[1].split(",") if part) if found else ()


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are printed; operands come first."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """What it returns."""
        return next(each for each in self.instructions.values() if each.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results it takes."""
        return [self.instructions[name] for name in instruction.operands]

    def users(self) -> dict[str, list[Instruction]]:
        """Who takes each instruction's result."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self.instructions.values():
            for name in dict.fromkeys(each.operands):
                found[name].append(each)
        return found


@dataclass(frozen=True)
class Module:
    """A program as XLA runs it.

    Attributes:
        aliases: entry parameters whose memory a result takes over: donated ones.
    """

    name: str
    computations: dict[str, Computation]
    entry: Computation
    aliases: frozenset[int] = field(default_factory=frozenset[int])

    @property
    def parameters(self) -> list[Instruction]:
        """Of the entry, in order."""
        found = [x for x in self.entry.instructions.values() if x.opcode == "parameter"]
        return sorted(found, key=lambda each: each.index)


def parse_module(text: str) -> Module:
    """The program that `text` describes.

    Raises:
        InspectionError: a line is not one of XLA's.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    if header is None:
        raise InspectionError(
            f"an HLO text must hold a line 'HloModule NAME', got {text[:40]!r}; "
            "give the text after optimisation"
        )
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for line in lines:
        head = _COMPUTATION.match(line) if line and line[0] not in " }" else None
        if head is not None and line.endswith("{"):
            computation = Computation(head[2], dict(_instructions(lines)))
            computations[computation.name] = computation
            entry = computation if head[1] else entry
    if entry is None:
        raise InspectionError(
            f"an HLO module must have an ENTRY computation; {header[:60]} has none"
        )
    aliases = frozenset(int(number) for _, number in _ALIAS.findall(_aliases(header)))
    return Module(re.split(r"[ ,]", header)[1], computations, entry, aliases)


def _aliases(header: str) -> str:
    at = header.find("input_output_alias={")
    return "" if at < 0 else header[at : header.find(") }", at) + 1]


def _instructions(lines: Iterator[str]) -> Iterator[tuple[str, Instruction]]:
    for line in lines:
        if line.startswith("}"):
            return
        if line.strip():
            found = parse_instruction(line)
            yield found.name, found
    raise InspectionError("an HLO computation must end with '}'; the text is cut off")


def parse_instruction(line: str) -> Instruction:
    """One line of a computation.

    Raises:
        InspectionError: it is not `%name = shape opcode(operands), attributes`.
    """
    assigned = _ASSIGNED.match(line)
    if assigned is None:
        raise _not_read(line)
    shape, at = _parse_shape(line, assigned.end())
    opcode = _OPCODE.match(line, at)
    if opcode is None:
        raise _not_read(line)
    end = _closing(line, opcode.end() - 1)
    argument, attributes = line[opcode.end() : end], line[end + 1 :]
    is_plain = opcode[1] not in ("constant", "parameter")
    return Instruction(
        name=assigned[2],
        opcode=opcode[1],
        shape=shape,
        operands=tuple(_OPERAND.findall(argument)) if is_plain else (),
        called={kind: tuple(_OPERAND.findall(at)) for kind, at in _CALLED.findall(attributes)},
        argument=argument,
        attributes=attributes,
        is_root=assigned[1] is not None,
    )


def _parse_shape(line: str, at: int) -> tuple[Shape, int]:
    """A shape, and where it ends."""
    if line[at : at + 1] == "(":
        elements: list[Shape] = []
        at += 1
        while line[at : at + 1] != ")":
            comment = _COMMENT.match(line, at)
            if comment is not None:
                at = comment.end()
            elif line[at : at + 1] in (",", " "):
                at += 1
            else:
                element, at = _parse_shape(line, at)
                elements.append(element)
        return Shape("tuple", elements=tuple(elements)), at + 1
    found = _SHAPE.match(line, at)
    if found is None or not _is_dtype(found[1]):
        raise _not_read(line)
    dims = tuple(int(part.lstrip("<=")) for part in found[2].split(",") if part)
    space = re.search(r"S\((\d+)\)", found[3] or "")
    return Shape(found[1], dims, int(space[1]) if space else 0), found.end()


def _closing(line: str, at: int) -> int:
    """Where the parenthesis that opens at `at` is closed; text in quotes does not count."""
    depth, is_quoted = 0, False
    for place in range(at, len(line)):
        letter = line[place]
        if letter == '"' and line[place - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted and letter in "({[":
            depth += 1
        elif not is_quoted and letter in ")}]":
            depth -= 1
            if depth == 0:
                return place
    raise _not_read(line)


def _is_dtype(name: str) -> bool:
    return name in _BITS or re.search(r"\d", name) is not None


def _bits(dtype: str) -> int:
    """`f8e4m3fn` has 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0


def _not_read(line: str) -> InspectionError:
    return InspectionError(
        f"an HLO instruction must read '%name = shape opcode(operands)', got {line.strip()[:120]!r}"
    )
