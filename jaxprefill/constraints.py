"""Which tokens a grammar allows next, by llguidance (MIT): JSON, and JSON of a schema.

An engine knows grammars as texts and matchers alone; this module makes both. Imports no jax.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from jaxprefill.errors import RequestError
from jaxprefill.grammar import Grammars
from jaxprefill.tokenizer import Tokenizer

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_MAX_KNOWN = 32  # grammars that are kept, as most requests come with one that was seen before


def json_grammar(schema: Any = None) -> str:
    """The grammar of JSON that fits a schema; None: of any object. It may take a while.

    Raises:
        RequestError: the schema is none, or asks for what grammars cannot say.
    """
    wanted: Any = _ANY_OBJECT if schema is None else schema
    if isinstance(wanted, bool):  # JSON Schema's anything and nothing
        wanted = {} if wanted else {"enum": []}
    if not isinstance(wanted, Mapping):
        raise RequestError(
            f"response_format needs a JSON schema, an object, got {wanted!r:.80}",
            param="response_format",
        )
    try:
        return _checked_grammar(json.dumps(wanted))
    except RecursionError:
        raise RequestError(
            "response_format must hold a JSON schema that is nested less deeply",
            param="response_format",
        ) from None


@lru_cache(maxsize=_MAX_KNOWN)
def _checked_grammar(schema: str) -> str:
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        fault = llguidance.LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        grammar, fault = "", str(error)
    if fault:
        raise RequestError(
            f"response_format must hold a JSON schema that can be followed, but {fault:.300}",
            param="response_format",
        )
    return grammar


class GuidanceMatcher:
    """Follows one output; a `grammar.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int) -> None:
        """`matcher` is this one's alone; `num_words` is the length of a mask."""
        self._matcher = matcher
        self._num_words = num_words

    def mask(self) -> NDArray[np.int32]:
        """One bit for each id that may come next; all are zero where none may."""
        mask = np.zeros((1, self._num_words), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask)
        return mask[0]

    def accept(self, token: int) -> bool:
        """The output goes on with `token`; whether anything can follow it."""
        return self._matcher.consume_token(token) and not self._matcher.is_stopped()


def make_grammars(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    """What makes matchers of grammars, on any thread; takes up to a second for large vocabularies.

    A grammar is compiled without Python's lock, and once for the next requests too.
    """
    parts = tokenizer.parts()
    known = llguidance.LLTokenizer(
        parts.pipeline, n_vocab=vocab_size, eos_token=list(parts.eos_ids) or None
    )
    num_words = -(-vocab_size // 32)

    @lru_cache(maxsize=_MAX_KNOWN)
    def compiled(grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(
                f"the grammar cannot be followed: {matcher.get_error():.300}",
                param="response_format",
            )
        return matcher

    return lambda grammar: GuidanceMatcher(compiled(grammar).deep_copy(), num_words)
