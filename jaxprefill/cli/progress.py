"""What stderr shows while executables load or compile: a bar on a terminal, or a line for each."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxprefill.cli.streams import note
from jaxprefill.prefill.compiler import ExecutableRecord

OnCompiled = Callable[[ExecutableRecord, int], None]


@contextmanager
def compile_progress(*, has_bar: bool, is_early: bool) -> Generator[OnCompiled]:
    """Yields what Engine calls after each executable.

    Args:
        has_bar: a bar if stderr is a terminal; without it, plain lines always.
        is_early: show the bar before the first call; not while something else draws there.
    """
    console = Console(file=sys.stderr)
    if has_bar and console.is_terminal and not console.is_dumb_terminal:
        with _bar(console, is_early=is_early) as on_compiled:
            yield on_compiled
    else:
        yield _Lines()


@contextmanager
def no_progress() -> Generator[OnCompiled]:
    """Shows nothing."""
    yield lambda record, total: None


class _Lines:
    def __init__(self) -> None:
        self._num_done = 0

    def __call__(self, record: ExecutableRecord, total: int) -> None:
        self._num_done += 1
        note(f"[{self._num_done:>{len(str(total))}}/{total}] {_describe(record)}")


@contextmanager
def _bar(console: Console, *, is_early: bool) -> Generator[OnCompiled]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
    progress = Progress(
        *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    task = progress.add_task("compiling", total=None)

    def on_compiled(record: ExecutableRecord, total: int) -> None:
        progress.start()  # does nothing the second time
        progress.update(task, advance=1, total=total, description=_describe(record))
        if progress.finished:
            progress.update(task, description="reading weights, warming up")

    if is_early:
        progress.start()
    try:
        yield on_compiled
    finally:
        progress.stop()


def _describe(record: ExecutableRecord) -> str:
    loaded = "" if record.load_s is None else "loaded, "
    return f"{record.name}: {loaded}{record.seconds:.1f} s, temp {decimal(record.temp_bytes)}"
