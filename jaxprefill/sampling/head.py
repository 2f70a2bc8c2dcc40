"""The LM head and what follows it, as executables keyed by row count.

No [tokens, V] or [slots, V] array is tied to a prefill bucket: a head reads the rows it needs
from the shared hidden buffer. Each kind returns one small array: one read-back a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped

from jaxprefill.device_state import StateShapes
from jaxprefill.kernels.attention.api import bend
from jaxprefill.models.layers import linear
from jaxprefill.prefill.compiler import CompileJob
from jaxprefill.request import MAX_TOP_LOGPROBS
from jaxprefill.sampling.pack import NUM_WORDS, mask_words
from jaxprefill.sampling.sampler import (
    PROMPT_FLAG,
    choose,
    expand_mask,
    penalise,
    unpack_rows,
)
from jaxprefill.sampling.vocabulary import VocabularySplit, logprob_of


@dataclass(frozen=True)
class HeadFunctions:
    """The head's pure functions for one vocabulary; `num_valid` ids may be sampled.

    Attributes:
        soft_cap: see `ModelConfig.logit_soft_cap`.
    """

    num_valid: int
    split: VocabularySplit = VocabularySplit()
    soft_cap: float | None = None

    def _product(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        rows: Int32[Array, " r"],
    ) -> Float32[Array, "r own"]:
        with jax.named_scope("head"):
            return bend(linear(hidden[rows], head), self.soft_cap)

    def greedy(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        last_tokens: Int32[Array, " C"],
        buffer: Int32[Array, "r words"],
    ) -> tuple[Int32[Array, " C"], Int32[Array, "r 2"]]:
        """(last_tokens, [token, bits of its logprob]): argmax of the raw logits."""
        params = unpack_rows(buffer)
        tokens, logprobs = self.split.best(self._product(head, hidden, params.row), self.num_valid)
        last_tokens = last_tokens.at[params.slot].set(tokens, mode="drop")
        return last_tokens, jnp.stack([tokens, _bits(logprobs)], axis=1)

    def general(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        last_tokens: Int32[Array, " C"],
        history: Int32[Array, "C V"],
        bias: Float32[Array, "C V"],
        mask: Int32[Array, "r mask_words"],
        buffer: Int32[Array, "r words"],
    ) -> tuple[Int32[Array, " C"], Int32[Array, "C V"], Int32[Array, "r outputs"]]:
        """(last_tokens, history, [token, logprob, top ids, top logprobs]); floats by their bits."""
        params = unpack_rows(buffer)
        raw = self.split.join(self._product(head, hidden, params.row))
        safe = jnp.minimum(params.slot, len(last_tokens) - 1)
        logits = raw + jnp.where(params.has_bias[:, None] == 1, bias[safe], 0)
        seen = jnp.where(params.has_history[:, None] == 1, history[safe], 0)
        logits = penalise(logits, seen, params)
        logits = jnp.where(expand_mask(mask, logits.shape[1]), logits, -jnp.inf)
        tokens = choose(logits, params)
        last_tokens = last_tokens.at[params.slot].set(tokens, mode="drop")
        counted = jnp.where(params.has_history == 1, params.slot, len(last_tokens))
        history = history.at[counted, tokens].add(1, mode="drop")
        return last_tokens, history, self._ranked(raw, tokens)

    def score(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        buffer: Int32[Array, "r 2"],
    ) -> Float32[Array, " r"]:
        """The raw logprob of each line's (row, target id)."""
        return self.split.logprob(self._product(head, hidden, buffer[:, 0]), buffer[:, 1])

    def rank(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        buffer: Int32[Array, "r 2"],
    ) -> Int32[Array, "r outputs"]:
        """[target, logprob, top ids, top logprobs] of each line's (row, target id)."""
        raw = self.split.join(self._product(head, hidden, buffer[:, 0]))
        return self._ranked(raw, buffer[:, 1])

    def _ranked(
        self, raw: Float32[Array, "r V"], tokens: Int32[Array, " r"]
    ) -> Int32[Array, "r outputs"]:
        known = jnp.where(jnp.arange(raw.shape[1]) < self.num_valid, raw, -jnp.inf)
        top, top_ids = lax.top_k(known, min(MAX_TOP_LOGPROBS, self.num_valid))
        total = jax.nn.logsumexp(raw, axis=-1, keepdims=True)
        columns = [tokens[:, None], _bits(logprob_of(raw, tokens))[:, None]]
        return jnp.concatenate([*columns, top_ids.astype(jnp.int32), _bits(top - total)], axis=1)

    def logits(
        self,
        head: Shaped[Array, "own E"],
        hidden: Shaped[Array, "tokens E"],
        buffer: Int32[Array, "r 2"],
    ) -> Float32[Array, " r"]:
        """The raw logit of each line's (row, id); multiplies only the head's rows it needs."""
        rows, ids = hidden[buffer[:, 0]].astype(head.dtype), buffer[:, 1]
        weights = head[ids % len(head)].astype(jnp.float32)
        found = bend(jnp.sum(rows.astype(jnp.float32) * weights, axis=-1), self.soft_cap)
        return self.split.of_owner(found, ids, len(head))


def set_history(
    history: Int32[Array, "C V"], slot: Int32[Array, ""], row: Int32[Array, " V"]
) -> Int32[Array, "C V"]:
    """`history` with one slot's row replaced; the array is donated."""
    return lax.dynamic_update_slice(history, row[None], (slot, 0))


def set_bias(
    bias: Float32[Array, "C V"], slot: Int32[Array, ""], row: Float32[Array, " V"]
) -> Float32[Array, "C V"]:
    """`bias` with one slot's row replaced; the array is donated."""
    return lax.dynamic_update_slice(bias, row[None], (slot, 0))


def history_row(
    prompt: tuple[int, ...], generated: list[int], vocab_size: int
) -> Int32[np.ndarray, " V"]:
    """The history of a request that starts, or starts again after `generated`."""
    row = np.zeros(vocab_size, np.int32)
    np.add.at(row, generated, 1)
    row[list(prompt)] |= PROMPT_FLAG
    return row


def head_jobs(
    functions: HeadFunctions,
    state: StateShapes,
    *,
    sample_rows: tuple[int, ...],
    score_rows: tuple[int, ...],
    is_pinned: bool = False,
) -> list[CompileJob]:
    """Every head executable; `is_pinned` leaves chosen tokens in pinned host memory."""
    base, vocab = (state.head, state.hidden, state.last_tokens), state.bias.shape[1]

    def words(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    jobs: list[CompileJob] = []

    def add(
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        donated: tuple[int, ...],
        read_back: tuple[int, ...] = (),
        *,
        rows: int | None = None,
    ) -> None:
        # Each call's results are a new array, as the last one's may still be read.
        job = CompileJob(
            name=name, function=fn, arguments=args, donated=donated, is_graph=False,
            read_back=read_back, products=None if rows is None else f"of head, {rows} rows",
        )  # fmt: skip
        jobs.append(job)

    for rows in sample_rows:
        greedy = (*base, words(rows, NUM_WORDS))
        pinned = ((1,), (2,)) if is_pinned else ((), ())
        add(f"greedy {rows}", functions.greedy, greedy, (2,), pinned[0], rows=rows)
        mask = words(rows, mask_words(vocab))
        general = (*base, state.history, state.bias, mask, words(rows, NUM_WORDS))
        add(f"general {rows}", functions.general, general, (2, 3), pinned[1], rows=rows)
    for rows in score_rows:
        pairs = (state.head, state.hidden, words(rows, 2))
        add(f"score {rows}", functions.score, pairs, (), rows=rows)
        add(f"logits {rows}", functions.logits, pairs, (), rows=rows)
        add(f"rank {rows}", functions.rank, pairs, (), rows=rows)
    add("set_history", set_history, (state.history, words(), words(vocab)), (0,))
    row = words(vocab, dtype=np.float32)
    add("set_bias", set_bias, (state.bias, words(), row), (0,))
    return jobs


def _bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int32)
