"""What a store says of an executable: one JSON file each, with a checksum of its own.

Plain data. Whatever cannot be read as it was written is a StoreError, never a guess.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxprefill.errors import StoreError

FORMAT = 1
Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file beside the manifest."""

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredExecutable:
    """An executable in a store.

    Attributes:
        name: as in `ExecutableRecord`, such as "prefill 256x16x8192".
        facts: all that it shares with the others of its engine and that makes it valid.
        job: all of its own that makes it valid: arguments, donation, compiler options.
        read: positions of the flattened arguments that the program takes.
        outputs: nested lists of {"shape", "dtype"}, as the program's results are nested.
        record: the fields of `ExecutableRecord`.
        payload: PJRT's own bytes.
        texts: by stage ("stablehlo", "hlo"), compressed with gzip.
        label: what the user called the model; for people.
        written: when, as ISO 8601 in UTC.
    """

    name: str
    facts: dict[str, Any]
    job: dict[str, Any]
    read: tuple[int, ...]
    outputs: Any
    record: dict[str, Any]
    payload: StoredFile
    texts: dict[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    label: str = ""
    written: str = ""

    @property
    def fingerprint(self) -> str:
        """Digest of all that makes it valid."""
        return digest({"facts": self.facts, "job": self.job})

    @property
    def path(self) -> str:
        """What it is for: prefill, decode, eager, greedy ..."""
        return self.name.split()[0]

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(tokens, request slots, context), of those that have a ShapeKey."""
        found = re.search(r"\b(\d+)x(\d+)x(\d+)\b", self.name)
        return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return sha256(_canonical(value).encode())


def sha256(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def seal(value: Any) -> bytes:
    """A JSON value as the content of a file that shows its own damage."""
    whole = {"format": FORMAT, "sha256": digest(value), "value": value}
    return (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode()


def unseal(content: bytes) -> Any:
    """The value that was sealed.

    Raises:
        StoreError: it is damaged, or of another version of this format.
    """
    try:
        whole: Any = json.loads(content)
        found, value = whole["format"], whole["value"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"it is no file of a store: {error!r}") from error
    if found != FORMAT:
        raise StoreError(f"its format must be {FORMAT}, got {found!r}: another version wrote it")
    if whole.get("sha256") != digest(value):
        raise StoreError("its checksum does not match its content")
    return value


def dump(entry: StoredExecutable) -> bytes:
    """The content of an executable's manifest."""
    return seal(asdict(entry))


def parse(content: bytes) -> StoredExecutable:
    """The executable that a manifest describes.

    Raises:
        StoreError: the manifest is damaged, or of another version.
    """
    value = unseal(content)
    try:
        texts = {stage: StoredFile(**one) for stage, one in value.pop("texts").items()}
        payload, read = StoredFile(**value.pop("payload")), tuple(value.pop("read"))
        entry = StoredExecutable(**value, payload=payload, read=read, texts=texts)
    except (TypeError, AttributeError, KeyError) as error:
        raise StoreError(f"its fields are not those of this version: {error!r}") from error
    if not _is_typed(entry):
        raise StoreError("its fields are not those of this version: one is of another type")
    names = [file.name for file in (entry.payload, *entry.texts.values())]
    if any(re.fullmatch(r"[\w.-]+", name) is None or name.startswith(".") for name in names):
        raise StoreError(f"its files must lie beside it, got {names}")
    return entry


def _is_typed(entry: StoredExecutable) -> bool:
    """Whether each field is what it says: JSON may hold anything."""
    files = (entry.payload, *entry.texts.values())
    texts: list[Any] = [entry.name, entry.label, entry.written]
    texts += [text for file in files for text in (file.name, file.sha256)]
    numbers: list[Any] = [*entry.read, *(file.num_bytes for file in files)]
    mappings = (entry.facts, entry.job, entry.record, entry.facts.get("versions", {}))
    return (
        bool(entry.name)
        and all(isinstance(text, str) for text in texts)
        and all(type(number) is int and number >= 0 for number in numbers)
        and all(isinstance(mapping, dict) for mapping in mappings)
        and all(isinstance(n, (int, float)) for k, n in entry.record.items() if k != "name")
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
