"""What is known of an executable, as plain values: for text, JSON, pages and notebooks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxprefill.errors import InspectionError

Stage = Literal["jaxpr", "stablehlo", "hlo", "thunks", "ptx"]
_SHAPE = re.compile(r"\b(\d+)x(\d+)x(\d+)\b")


@dataclass(frozen=True)
class Missing:
    """Why a text cannot be had."""

    reason: str


# What no source has of an executable for a CPU.
_NOT_ON_CPU: Mapping[Stage, Missing] = {
    "ptx": Missing("a CPU runs LLVM's machine code, not PTX"),
    "thunks": Missing(
        "XLA's CPU backend does not write its thunks down; the hlo is in their order"
    ),
}


@dataclass(frozen=True)
class Chip:
    """Where executables run, as far as a roofline needs to know.

    Attributes:
        kind: the driver's name; empty where nobody says.
        bytes_per_s, flops_per_s: None and nothing where they are not known.
        source: where the rates are from, or why there are none.
    """

    platform: str
    kind: str
    bytes_per_s: float | None = None
    flops_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    source: str = ""

    def seconds(self, products: Mapping[str, float], num_bytes: float) -> float | None:
        """The roofline's floor: the longer of moving the bytes and computing the products."""
        if self.bytes_per_s is None:
            return None
        slowest = min(self.flops_per_s.values())
        computing = sum(
            flops / self.flops_per_s.get(dtype, slowest) for dtype, flops in products.items()
        )
        return max(num_bytes / self.bytes_per_s, computing)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """An executable's name and numbers; None where they are not known.

    Attributes:
        name: as the engine calls it: `prefill 256x16x8192`, `greedy 4`.
        measured_s: of one run.
    """

    name: str
    temp_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    code_bytes: int | None = None
    compile_s: float | None = None
    fingerprint: str | None = None
    measured_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inspected(Numbers):
    """An executable, its numbers and its texts.

    Attributes:
        facts: what it was compiled for: model, versions, options.
        read_text: the text of a stage, or why there is none; asked for what such a chip can have.
    """

    chip: Chip
    read_text: Callable[[Stage], str | Missing] = field(repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def text(self, stage: Stage) -> str:
        """The text of a stage.

        Raises:
            InspectionError: it cannot be had; says why.
        """
        never = _NOT_ON_CPU.get(stage) if self.chip.platform == "cpu" else None
        found = never or self.read_text(stage)
        if isinstance(found, Missing):
            raise InspectionError(f"{self.name}: there is no {stage} text: {found.reason}")
        return found

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(tokens, request slots, max context), of executables that have these."""
        found = _SHAPE.search(self.name)
        return (int(found[1]), int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One line of `list`.

    Attributes:
        flops: of matrix products in a run; two a multiply-add.
        num_bytes: what all kernels read and write in a run.
        needed_bytes: what no schedule can save.
        floor_s: the roofline's; None where the chip's rates are not known.
        bound: what the floor is bound by, "memory" or "compute".
        kernels: launches of a run, by kind.
        num_graphs, graph_nodes: CUDA graphs and the launches in them; None: see `graph_note`.
        code_bytes: None where XLA counts none.
        notes: what the numbers leave out.
    """

    name: str
    shape: tuple[int, int, int] | None
    flops: float
    num_bytes: int
    needed_bytes: int
    floor_s: float | None
    bound: str
    measured_s: float | None
    temp_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None
    code_bytes: int | None
    kernels: Mapping[str, int]
    num_graphs: int | None
    graph_nodes: int | None
    graph_note: str
    compile_s: float | None
    fingerprint: str | None
    notes: tuple[str, ...] = ()

    @property
    def intensity(self) -> float | None:
        """Products a needed byte."""
        return self.flops / self.needed_bytes if self.needed_bytes else None

    @property
    def ratio(self) -> float | None:
        """Measured time to the floor."""
        if self.measured_s is None or not self.floor_s:
            return None
        return self.measured_s / self.floor_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"intensity": self.intensity, "ratio_to_floor": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What like kernels of one scope cost in a run.

    Attributes:
        count: how often they run.
        flops: None where a kernel does not tell its products.
        floor_share: their own floor as a part of the executable's; all of them together exceed 1
            by what results in between cost.
    """

    kind: str
    what: str
    scope: str
    count: float
    flops: float | None
    num_bytes: int
    floor_share: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
