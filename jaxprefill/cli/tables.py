"""Tables on stdout, no wider than a terminal, and as wide as they need where there is none."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxprefill.cli.streams import emit

_UNLIMITED_WIDTH = 1000


def emit_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Writes rows under column names; a name that starts with ">" aligns its column right."""
    table = Table()
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    with console.capture() as capture:
        console.print(table)
    emit(capture.get())
