"""Wires jobs over files to an engine in a process of its own, and shows on stderr how they go.

It imports the server's packages, so commands import it when they run. It imports no jax.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxprefill.cli.streams import note
from jaxprefill.config import EngineConfig
from jaxprefill.errors import ConfigError
from jaxprefill.offline.batch import BatchJob
from jaxprefill.offline.lines import STANDARD, Source
from jaxprefill.offline.output import LineOutput
from jaxprefill.offline.scoring import (
    Measure,
    ScoringJob,
    ScoringProgress,
    embedding_measure,
    format_of,
    label_measure,
    open_table,
    part_of,
    perplexity_measure,
)
from jaxprefill.offline.session import OfflineSession
from jaxprefill.remote import messages
from jaxprefill.remote.client import EngineProcess

SOME_FAILED = 3

_LOOK_S = 0.5
_LINE_S = 10.0  # between lines where there is no terminal


class Work(Protocol):
    """How far a job is."""

    @property
    def num_lines(self) -> int:
        """That are written."""
        ...

    @property
    def num_failed(self) -> int:
        """Of these."""
        ...

    @property
    def position(self) -> int:
        """Bytes of the input that are done with."""
        ...


def run_batch(config: EngineConfig, args: argparse.Namespace) -> int:
    """Answers a batch file; returns the exit status."""
    mode = "resume" if args.resume else "overwrite" if args.overwrite else "new"
    with _source(args) as source, LineOutput(args.output, mode) as output:
        job = BatchJob(source, output, window=args.window)

        async def work(session: OfflineSession) -> None:
            await job.run(session, resumes=args.resume)
            output.flush()

        show = _Show(job.progress, source, "lines", is_quiet=args.quiet)
        asyncio.run(_run(_session(config, args, tuple(args.served_model_name)), work, show))
    if job.progress.num_resumed and not args.quiet:
        note(f"{job.progress.num_resumed} of the lines were there before")
    return SOME_FAILED if job.progress.num_failed else 0


def run_score_file(config: EngineConfig, args: argparse.Namespace, labels: list[str]) -> int:
    """Scores a table; returns the exit status."""
    kind = args.format or format_of(args.input)
    if not args.format and args.output != STANDARD and format_of(args.output) != kind:
        raise ConfigError(f"--output must be a {kind} file, as --input is, got {args.output}")
    template, progress = args.template.replace("\\n", "\n"), ScoringProgress()
    with _source(args, part_of(args.output)) as source:
        table = open_table(source, args.text_column, kind)

        def make(names: Sequence[str]) -> ScoringJob:
            return ScoringJob(table, _measure(args, names), template=template, progress=progress)

        early = None if args.classify else make(labels)

        async def work(session: OfflineSession) -> None:
            job = early or make(session.labels())  # which the model alone knows
            await job.run(session, args.output)

        show = _Show(progress, source, "rows", is_quiet=args.quiet)
        asyncio.run(_run(_session(config, args), work, show))
    for problem in progress.problems:
        note(f"jaxprefill: {problem}")
    if progress.num_failed > len(progress.problems):
        note(f"jaxprefill: and {progress.num_failed - len(progress.problems)} more rows")
    if progress.num_empty and not args.quiet:
        note(f"{progress.num_empty} of the rows had no text")
    return SOME_FAILED if progress.num_failed else 0


def _source(args: argparse.Namespace, *others: str) -> Source:
    """The open input; it must not be what an output would throw away."""
    source = Source(args.input)
    if any(map(source.leads_to, (args.output, *others))):
        source.close()
        raise ConfigError(f"--output must be another file than --input, got {args.output}")
    return source


def _measure(args: argparse.Namespace, labels: Sequence[str]) -> Measure:
    if args.perplexity:
        return perplexity_measure(args.prefix)
    if args.embed:
        return embedding_measure(args.prefix)
    return label_measure(labels, args.prefix, is_own=args.classify)


def _session(
    config: EngineConfig, args: argparse.Namespace, names: tuple[str, ...] = ()
) -> OfflineSession:
    started = time.monotonic()

    def on_started(message: messages.Ready | messages.Progress) -> None:
        if args.quiet:
            return
        if isinstance(message, messages.Ready):
            seconds = time.monotonic() - started
            note(f"{message.root} on {message.description}; ready in {seconds:.1f} s")
        else:
            note(message.describe())

    engine = EngineProcess(
        config,
        on_started=on_started,
        on_lost=lambda reason: note(f"jaxprefill: error: {reason}; starting it again"),
        is_verbose=args.verbose,
    )
    return OfflineSession(engine, model_names=names)


async def _run(
    session: OfflineSession, work: Callable[[OfflineSession], Awaitable[None]], show: "_Show"
) -> None:
    async with session:
        await session.ready()
        async with show.going(session):
            await work(session)


class _Show:
    """A bar on a terminal, else a line now and then; a summary at the end."""

    def __init__(self, progress: Work, source: Source, noun: str, *, is_quiet: bool) -> None:
        self._progress = progress
        self._source = source
        self._noun = noun
        self._is_quiet = is_quiet
        self._began = time.monotonic()
        self._first_position: int | None = None

    @asynccontextmanager
    async def going(self, session: OfflineSession) -> AsyncGenerator[None]:
        """Shows how the job goes while the block runs."""
        self._began = time.monotonic()
        if self._is_quiet:
            yield
            return
        console = Console(file=sys.stderr)
        is_bar = console.is_terminal and not console.is_dumb_terminal
        watching = asyncio.create_task(
            self._bar(console, session) if is_bar else self._say(session)
        )
        try:
            yield
        finally:
            stats = await session.stats()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            seconds = time.monotonic() - self._began
            note(f"{self._counts()} in {seconds:.1f} s; {self._rates(session, stats)}")

    async def _bar(self, console: Console, session: OfflineSession) -> None:
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=self._source.size)
            while True:
                text = self._text(session, await session.stats())
                bar.update(task, completed=self._progress.position, description=text)
                await asyncio.sleep(_LOOK_S)

    async def _say(self, session: OfflineSession) -> None:
        while True:
            await asyncio.sleep(_LINE_S)
            note(self._text(session, await session.stats()))

    def _text(self, session: OfflineSession, stats: dict[str, Any] | None) -> str:
        return f"{self._counts()}; {self._rates(session, stats)}{self._left()}"

    def _counts(self) -> str:
        failed = self._progress.num_failed
        return f"{self._progress.num_lines} {self._noun}" + (f", {failed} failed" * bool(failed))

    def _rates(self, session: OfflineSession, stats: dict[str, Any] | None) -> str:
        seconds = max(time.monotonic() - self._began, 1e-6)
        tokens = session.tokens
        rate = (tokens.prompt_tokens + tokens.generated_tokens) / seconds
        text = (
            f"tokens: {tokens.prompt_tokens} prompt, {tokens.generated_tokens} generated, "
            f"{rate:.0f}/s"
        )
        if stats is None:
            return text
        real, padding = stats["real_tokens"], stats["padding_tokens"]
        return f"{text}; padding {padding / max(real + padding, 1):.0%}"

    def _left(self) -> str:
        """How long it may take yet, from how fast the input's bytes are done with."""
        size, position = self._source.size, self._progress.position
        if self._first_position is None and position:
            self._first_position = position
            self._began_moving = time.monotonic()
        if not size or self._first_position is None or position <= self._first_position:
            return ""
        speed = (position - self._first_position) / (time.monotonic() - self._began_moving)
        seconds = int((size - position) / speed)
        return f"; {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
