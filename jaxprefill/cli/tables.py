"""Tables on stdout, as wide as they need; on a narrower terminal a paragraph for each row."""

import io
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxprefill.cli.streams import emit

_UNLIMITED_WIDTH = 1000


def emit_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Writes rows under column names; a name that starts with ">" aligns its column right.

    Columns of numbers are never cut. Where a terminal is too narrow for them, a row is its first
    cell and below it the others that hold anything, each behind its column's name.
    """
    names, cells = list(columns), [list(row) for row in rows]
    table = Table()
    for name in names:
        is_number = name.startswith(">")
        justify = "right" if is_number else "left"
        table.add_column(name.lstrip(">"), justify=justify, no_wrap=is_number)
    for row in cells:
        table.add_row(*map(Text, row))
    screen = Console(file=sys.stdout)
    # FORCE_COLOR makes a pipe a terminal in rich's eyes, but gives it no width.
    width = screen.width if sys.stdout.isatty() else _UNLIMITED_WIDTH
    # Not onto stdout, whose errors `emit` tells.
    drawn = Console(file=io.StringIO(), width=width, force_terminal=screen.is_terminal)
    wide = drawn.options.update(width=_UNLIMITED_WIDTH)
    if Measurement.get(drawn, wide, table).minimum > width:
        emit("".join(_paragraph(names, row, width) for row in cells))
        return
    with drawn.capture() as capture:
        drawn.print(table)
    emit(capture.get())


def _paragraph(names: Sequence[str], row: Sequence[str], width: int) -> str:
    told = [
        f"{name.lstrip('>')} {cell}" for name, cell in zip(names[1:], row[1:], strict=True) if cell
    ]
    body = textwrap.wrap(", ".join(told), width - 2, break_long_words=False)
    return "\n  ".join([row[0], *body]) + "\n"
