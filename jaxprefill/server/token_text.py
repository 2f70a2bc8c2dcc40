"""How single tokens are written in replies: their text, their bytes, or `token_id:N`."""

from functools import lru_cache

from jaxprefill.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The texts of one tokenizer's tokens, each as it reads in the middle of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Asks the tokenizer when a token comes up, and remembers the usual ones."""
        self._tokenizer = tokenizer
        # Some decoders drop the space before the first token of a text, so one stands before.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = tokenizer.decode(self._anchor, skip_special_tokens=False)
        self.text = lru_cache(maxsize=65536)(self._text)

    def raw_bytes(self, token: int) -> list[int]:
        """The bytes of a token, which may be part of a character."""
        text = self._decode(token)
        if _REPLACEMENT not in text:
            return list(text.encode("utf-8", "surrogatepass"))
        entry = self._tokenizer.token(token) or ""
        if len(entry) == 6 and entry.startswith("<0x"):
            return [int(entry[3:5], 16)]
        if all(character in _BYTE_OF for character in entry):
            return [_BYTE_OF[character] for character in entry]
        return list(text.encode())

    def _text(self, token: int) -> str:
        """The text of a token; bytes that are no whole character as OpenAI writes them."""
        text = self._decode(token)
        if _REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw_bytes(token))

    def _decode(self, token: int) -> str:
        text = self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _byte_table() -> dict[str, int]:
    """The character that byte-level BPE (GPT-2) writes for each byte, backwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_table()
