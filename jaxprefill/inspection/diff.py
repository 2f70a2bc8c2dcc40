"""What sets two executables apart: operations by what they do, and numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxprefill.inspection.program import Kernel
from jaxprefill.inspection.records import Summary
from jaxprefill.inspection.summary import Analysis, describe, summarise

_NUMBERS = (
    *("flops", "num_bytes", "needed_bytes", "temp_bytes", "argument_bytes", "output_bytes"),
    *("code_bytes", "num_graphs", "graph_nodes"),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Operations of one kind that one program runs more often, or otherwise, than the other.

    Attributes:
        what: kind, scope and what it makes; of a changed one before and after.
        before, after: how often a run executes it.
    """

    kind: str
    scope: str
    what: str
    before: int
    after: int
    status: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of a pair of executables.

    Attributes:
        changes: operations and fusions added, gone and changed.
        numbers: (before, after) of cost and memory, where they differ.
        facts: (before, after) of what they were compiled for, where that differs.
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    numbers: dict[str, tuple[float | None, float | None]]
    facts: dict[str, tuple[Any, Any]]

    @property
    def is_empty(self) -> bool:
        """Whether both run the same operations at the same cost, whatever they were made for."""
        return not self.changes and not self.numbers

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(before: Analysis, after: Analysis) -> Difference:
    """The difference between two executables."""
    one, other = summarise(before), summarise(after)
    pair = (before.inspected, after.inspected)
    return Difference(
        before=one.name,
        after=other.name,
        changes=tuple(_changes(_signatures(before), _signatures(after))),
        numbers=_numbers(one, other),
        facts=_differing(pair[0].facts, pair[1].facts),
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Values that are not equal, by name; of mappings in them the parts, as `versions.jax`."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*one, *other]):
        both = (one.get(name), other.get(name))
        if isinstance(both[0], Mapping) and isinstance(both[1], Mapping):
            parts = _differing(both[0], both[1])
            found |= {f"{name}.{part}": values for part, values in parts.items()}
        elif both[0] != both[1]:
            found[name] = both
    return found


def _numbers(one: Summary, other: Summary) -> dict[str, tuple[float | None, float | None]]:
    known = {item.name for item in fields(Summary)}
    assert known.issuperset(_NUMBERS), "the names above are the summary's"
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in _NUMBERS}
    return {name: both for name, both in pairs.items() if both[0] != both[1]}


_Signature = tuple[str, str, str, str]  # kind, scope, what it makes, how


def _signatures(analysis: Analysis) -> Counter[_Signature]:
    found = Counter[_Signature]()
    for kernel in analysis.program.kernels:
        key = (kernel.kind, kernel.scope, describe(kernel), _how(kernel))
        found[key] += max(round(kernel.count), 1)
    return found


def _how(kernel: Kernel) -> str:
    """What is fused, and from which shapes."""
    shapes = ", ".join(str(each.shape) for each in kernel.computation.operands(kernel.instruction))
    inside: list[str] = []
    if kernel.body is not None:
        counted = Counter(each.opcode for each in kernel.body.instructions.values())
        inside = [f"{op} {count}" for op, count in sorted(counted.items()) if op != "parameter"]
    return f"({shapes}) {' '.join(inside)}".strip()


def _changes(before: Counter[_Signature], after: Counter[_Signature]) -> list[Change]:
    gone, added = before - after, after - before
    changes = [_change(old, new, gone, added) for old, new in _paired(list(gone), list(added))]
    paired_old = {old for old, _ in _paired(list(gone), list(added))}
    paired_new = {new for _, new in _paired(list(gone), list(added))}
    for key in gone:
        if key not in paired_old:
            status = "gone" if key not in after else "fewer"
            changes.append(_single(key, before[key], after[key], status))
    for key in added:
        if key not in paired_new:
            status = "added" if key not in before else "more"
            changes.append(_single(key, before[key], after[key], status))
    return sorted(changes, key=lambda each: (each.scope, each.kind, each.what))


def _paired(
    gone: Sequence[_Signature], added: Sequence[_Signature]
) -> list[tuple[_Signature, _Signature]]:
    """Those of one kind and scope are one operation that changed: first what is most alike."""
    left, free = [old for old in gone if old[1]], list(added)
    pairs: list[tuple[_Signature, _Signature]] = []
    for depth in (4, 3, 2):
        for old in list(left):
            likeness = _likeness(old)[:depth]
            match = next((new for new in free if _likeness(new)[:depth] == likeness), None)
            if match is not None:
                left.remove(old)
                free.remove(match)
                pairs.append((old, match))
    return pairs


def _likeness(signature: _Signature) -> _Signature:
    """Kind, scope, operation and what is fused, without shapes."""
    kind, scope, what, how = signature
    return kind, scope, what.partition(" -> ")[0], how.rpartition(")")[2]


def _change(
    old: _Signature, new: _Signature, gone: Counter[_Signature], added: Counter[_Signature]
) -> Change:
    both = (old[2], new[2]) if old[2] != new[2] else (f"{old[2]} of {old[3]}", new[3])
    return Change(
        kind=old[0],
        scope=old[1],
        what=f"{both[0]}  =>  {both[1]}",
        before=gone[old],
        after=added[new],
        status="changed",
    )


def _single(key: _Signature, before: int, after: int, status: str) -> Change:
    kind, scope, what, how = key
    return Change(
        kind=kind, scope=scope, what=f"{what} of {how}", before=before, after=after, status=status
    )
