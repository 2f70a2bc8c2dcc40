"""Folds what repeats in a program's text: 36 like layers are printed once, with their number.

Two stretches are alike if they differ in the names of their values, and in integers that stand
alone, such as a layer's index, and if each value is read at the same place of both. Nothing is
known of layers.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxprefill.inspection.records import Stage

_MIN_SAVED = 3  # lines
_MAX_PERIODS = 48  # tried at a place
_NAME = re.compile(r"%[\w.$#:-]+")
_METADATA = re.compile(r",? ?(?:metadata=\{[^{}]*\}|stack_frame_id=\d+)")
_FRAME = re.compile(r" stack_frame_id=\d+")  # of tables that are not printed
_NUMBER = re.compile(r"\b(parameter|constant)\(-?\d+\)|dense<-?\d+> : tensor<i32>|index=\d+\*/")
_VARIABLE = re.compile(r"\b([a-z]{1,4}):[a-z]\w*\[")
_INTEGER = re.compile(r"\b\d+:i32\[\]")
_PTX_NAME = re.compile(r"[%$@]*[\w$.]*\d+\b")


@dataclass(frozen=True)
class _Line:
    """A line, the same without what names its values, and the values: first the one it makes."""

    text: str
    skeleton: str
    names: tuple[str, ...]


def fold(text: str, stage: Stage, *, op: str | None = None) -> str:
    """The text with repetitions counted instead of printed; with `op` only its lines."""
    if stage == "hlo":
        return "\n".join(_fold_hlo(text, op)).lstrip("\n")
    lines = _unwrapped(text) if stage == "jaxpr" else text.splitlines()
    return "\n".join(_fold_lines([_line(line, stage, text) for line in lines], op))


def lines_of(text: str, op: str | None) -> str:
    """The text as it is; with `op` only its lines."""
    if op is None:
        return text
    return "\n".join(line for line in text.splitlines() if has_op(line, op))


def has_op(line: str, op: str) -> bool:
    """Whether a line runs an operation of that name."""
    plain = _NAME.sub("%", _METADATA.sub("", line))
    return re.search(rf"(?<![\w-])(?:\w+\.)?{re.escape(op)}(?![\w-])", plain) is not None


def _fold_hlo(text: str, op: str | None) -> Iterator[str]:
    """Like computations once; in each of them like stretches once. Tables of files are left out."""
    blocks = _computations(text)
    classes: dict[str, str] = {}  # of a computation's name
    members: dict[str, list[str]] = {}  # names by class
    bodies: dict[str, tuple[str, list[_Line]]] = {}
    for head, body in blocks:
        name = _NAME.findall(head)[0] if _NAME.search(head) else head.split()[0]
        lines = [_line(line, "hlo", text, classes) for line in body]
        is_entry = head.startswith("ENTRY")
        key = f"{name if is_entry else ''}\n" + "\n".join(line.skeleton for line in lines)
        classes[name] = f"@{len(members)}" if key not in members else classes[members[key][0]]
        members.setdefault(key, []).append(name)
        bodies.setdefault(key, (head, lines))
    if op is None:
        yield text.splitlines()[0]
    for key, (head, lines) in bodies.items():
        shown = list(_fold_lines(lines, op))
        if shown or op is None:
            others = members[key][1:]
            alike = f"  // x{len(others) + 1}, the others: {_few(others)}" if others else ""
            yield ""
            yield (head if op is None else f"{head.partition(' (')[0]} {{") + alike
            yield from shown
            yield "}"


def _few(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _computations(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    body: list[str] | None = None
    for line in text.splitlines()[1:]:
        if body is not None and line.startswith("}"):
            body = None
        elif body is not None:
            body.append(line)
        elif line.endswith("{") and line[0] not in " }":
            body = []
            found.append((line, body))
    return found


def _line(text: str, stage: Stage, whole: str, classes: dict[str, str] | None = None) -> _Line:
    plain = _METADATA.sub("", text)
    if stage == "jaxpr":
        variables = set(_VARIABLE.findall(whole))
        names = [x for x in re.findall(r"\b[a-z]{1,4}\b", plain) if x in variables]
        skeleton = re.sub(r"\b[a-z]{1,4}\b", lambda m: "%" if m[0] in variables else m[0], plain)
        return _Line(text, _INTEGER.sub("#", skeleton), tuple(names))
    if stage == "ptx":
        return _Line(text, _PTX_NAME.sub("%", plain), ())
    found = _NAME.findall(plain)
    known = classes or {}
    skeleton = _NAME.sub(lambda m: known.get(m[0], "%"), plain)
    names = tuple(name for name in found if name not in known)
    skeleton = _NUMBER.sub("#", skeleton).replace("ROOT ", "")
    return _Line(_FRAME.sub("", text), skeleton, names)


def _unwrapped(text: str) -> list[str]:
    """A jaxpr's lines, those joined that were wrapped for their width."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        is_new = re.match(r"\s*(?:[a-z]+:|let|in|\{|\}|\w+ = |_:)", line) or not lines
        if is_new or indent == 0:
            lines.append(line)
        else:
            lines[-1] += " " + line.strip()
    return lines


def _fold_lines(lines: list[_Line], op: str | None) -> Iterator[str]:
    shown = lines if op is None else [line for line in lines if has_op(line.text, op)]
    yield from _folded(shown)


def _folded(lines: list[_Line]) -> Iterator[str]:
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(line.skeleton, len(numbers)) for line in lines]
    places: dict[int, list[int]] = {}
    for at, one in enumerate(ids):
        places.setdefault(one, []).append(at)
    at = 0
    while at < len(lines):
        period, times = _repetition(lines, ids, places[ids[at]], at)
        if times == 1:
            yield lines[at].text
            at += 1
            continue
        yield f"  // x{times}, {period} lines each:"
        yield from _folded(lines[at : at + period]) if period > 1 else [lines[at].text]
        yield f"  // end of x{times}"
        at += period * times


def _repetition(lines: list[_Line], ids: list[int], places: list[int], at: int) -> tuple[int, int]:
    """(lines, times) of what begins at `at` and saves most lines; times 1: nothing does."""
    best = (1, 1)
    later = [place for place in places if place > at][:_MAX_PERIODS]
    for place in later:
        period, times = place - at, 1
        first = ids[at:place]
        while ids[at + times * period : at + (times + 1) * period] == first:
            times += 1
        while times > 1 and not _reads_alike(lines, at, period, times):
            times -= 1
        saved, most = period * (times - 1), best[0] * (best[1] - 1)
        if saved >= _MIN_SAVED and saved > most:
            best = (period, times)
    return best


def _reads_alike(lines: list[_Line], at: int, period: int, times: int) -> bool:
    """Whether each stretch reads its own values, and the last one's, at the same places."""
    made = {
        lines[place].names[0]: place
        for place in range(at, at + period * times)
        if lines[place].names and "=" in lines[place].text
    }

    def reads(place: int) -> list[int | None]:
        own = [made.get(name) for name in lines[place].names[1:]]
        return [None if value is None else place - value for value in own]

    for place in range(at + period, at + period * times):
        one, other = reads(place - period), reads(place)
        is_second = place < at + 2 * period
        for before, now in zip(one, other, strict=True):
            came_in = is_second and before is None  # the first stretch reads what was before it
            if before != now and not came_in:
                return False
    return True
