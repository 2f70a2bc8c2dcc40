"""Which tokens a grammar allows next, by llguidance (MIT): JSON, and JSON of a schema.

An engine knows grammars as texts and matchers alone; this module makes both. Imports no jax.
"""

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from jaxprefill.errors import RequestError
from jaxprefill.grammar import Grammars
from jaxprefill.tokenizer import Tokenizer

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_grammar(schema: Any = None) -> str:
    """The grammar of JSON that fits a schema; None: of any object.

    Raises:
        RequestError: the schema is none, or asks for what grammars cannot say.
    """
    wanted: Any = _ANY_OBJECT if schema is None else schema
    if not isinstance(wanted, (Mapping, bool)):
        raise RequestError(
            f"response_format needs a JSON schema, an object, got {wanted!r:.80}",
            param="response_format",
        )
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(wanted), overrides={"whitespace_flexible": False}
    )
    fault = llguidance.LLMatcher.validate_grammar(grammar)
    if fault:
        raise RequestError(
            f"response_format must hold a JSON schema that can be followed, but {fault:.300}",
            param="response_format",
        )
    return grammar


class GuidanceMatcher:
    """Follows one output; a `grammar.Matcher`."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, grammar: str, num_words: int) -> None:
        """At the start of the output; `num_words` is the length of a mask.

        Raises:
            RequestError: it is no grammar.
        """
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        self._num_words = num_words
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar cannot be followed: {self._matcher.get_error():.300}",
                param="response_format",
            )

    def mask(self) -> NDArray[np.int32]:
        """One bit for each id that may come next; all are zero where none may."""
        mask = np.zeros((1, self._num_words), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask)
        return mask[0]

    def accept(self, token: int) -> bool:
        """The output goes on with `token`; whether anything can follow it."""
        return self._matcher.consume_token(token) and not self._matcher.is_stopped()


def make_grammars(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    """What makes matchers of grammars; takes up to a second for large vocabularies."""
    parts = tokenizer.parts()
    known = llguidance.LLTokenizer(
        parts.pipeline, n_vocab=vocab_size, eos_token=list(parts.eos_ids) or None
    )
    num_words = -(-vocab_size // 32)
    return lambda grammar: GuidanceMatcher(known, grammar, num_words)
