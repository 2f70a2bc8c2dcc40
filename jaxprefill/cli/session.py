"""An engine for the length of a command, and what stderr says of it.

It imports jax, as `progress` does, so commands import it when they run.
"""

import argparse
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from jaxprefill.admission import check_params
from jaxprefill.cli.progress import compile_progress
from jaxprefill.cli.streams import note
from jaxprefill.config import EngineConfig
from jaxprefill.engine import Engine
from jaxprefill.plan import EnginePlan
from jaxprefill.request import SamplingParams
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.known import KNOWN_MODELS, is_cached


@contextmanager
def open_engine(
    config: EngineConfig, args: argparse.Namespace, params: SamplingParams | None = None
) -> Generator[Engine]:
    """Starts an engine, and closes it at the end; the flags say what stderr shows meanwhile.

    Ids in `params` that the model lacks are refused before anything compiles.

    Raises:
        JaxPrefillError: as `Engine`.
    """
    options, model = asdict(config), config.model

    def on_planned(plan: EnginePlan) -> None:
        if params is not None:
            check_params(params, plan.model.vocab_size)

    if args.quiet:
        engine = Engine(on_planned=on_planned, **options)
    else:
        is_fetched_first = any(known.name == model for known in KNOWN_MODELS) and (
            not is_cached(model)
        )
        with compile_progress(
            has_bar=not args.verbose, is_early=not is_fetched_first
        ) as on_compiled:
            engine = Engine(on_planned=on_planned, on_compiled=on_compiled, **options)
        seconds = engine.stats()["startup_s"]["total"]
        note(f"{describe_plan(model, engine.plan, seconds)}; {engine.describe_executables()}")
    with engine:
        yield engine


class Stopwatch:
    """Seconds since it was made, and what the engine did in them."""

    def __init__(self, engine: Engine) -> None:
        """Starts now."""
        self._engine = engine
        self._before = engine.stats()
        self._began = time.perf_counter()

    def summary(self, *, num_prompt_tokens: int, num_generated_tokens: int) -> str:
        """One line: tokens, seconds, passes by path, fallbacks by reason."""
        seconds = time.perf_counter() - self._began
        after = self._engine.stats()
        tokens = f"tokens: {num_prompt_tokens} prompt"
        if num_generated_tokens:
            tokens += f", {num_generated_tokens} generated"
        passes, fallbacks = (
            _counts(Counter(after[key]) - Counter(self._before[key]))
            for key in ("passes", "fallbacks")
        )
        return f"{tokens} in {seconds:.2f} s; passes: {passes}; fallbacks: {fallbacks}"


def describe_plan(model: str, plan: EnginePlan, startup_s: float) -> str:
    """One line: what was built for which shapes."""
    return f"{model} on {plan.describe()}; ready in {startup_s:.1f} s"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token; its vocabulary entry where that is only part of a character."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    is_whole = text and "\N{REPLACEMENT CHARACTER}" not in text
    return text if is_whole else (tokenizer.token(token_id) or text)


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
