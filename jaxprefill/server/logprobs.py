"""Logprobs in OpenAI's two layouts: parallel lists for completions, a list of tokens for chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprefill.server.replies import floored
from jaxprefill.server.token_text import TokenTexts


@dataclass(frozen=True)
class TokenEntry:
    """A token of prompt or output.

    Attributes:
        logprob: None for the first token of a prompt, which nothing stands before.
        top: the likeliest ids, this one always among them; None where `logprob` is.
        offset: characters of the reply's text before it.
    """

    token: int
    logprob: float | None
    top: Mapping[int, float] | None
    offset: int


@dataclass(frozen=True)
class LogprobWriter:
    """Writes entries; `as_ids` names tokens by id."""

    texts: TokenTexts
    as_ids: bool = False

    def name(self, token: int) -> str:
        """What a token is called."""
        return f"token_id:{token}" if self.as_ids else self.texts.text(token)

    def completion(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice."""
        return {
            "tokens": [self.name(entry.token) for entry in entries],
            "token_logprobs": [
                None if entry.logprob is None else floored(entry.logprob) for entry in entries
            ],
            "top_logprobs": [self._by_name(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def chat(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = [
            self._token(entry.token, entry.logprob or 0.0)
            | {"top_logprobs": [self._token(*pair) for pair in _sorted(entry.top or {})]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token),
            "logprob": floored(logprob),
            "bytes": self.texts.raw_bytes(token),
        }

    def _by_name(self, entry: TokenEntry) -> dict[str, float] | None:
        """The likeliest under their texts; of two with one text the lower goes by its id."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in _sorted(entry.top or {entry.token: entry.logprob}):
            name = self.name(token)
            found[name if name not in found else f"token_id:{token}"] = floored(logprob)
        return found


def _sorted(top: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(top.items(), key=lambda pair: -pair[1])
