"""The files of a converted checkpoint but its arrays: manifest, config, tokenizer. No device.

checkpoints/NAME/manifest.json     every other file with its size and SHA-256; every array
                 config.json       the model's config and what the tokenizer has beside its file
                 tokenizer.json    as the tokenizers library writes it
                 weights/          the arrays, written by Orbax: no pickle among them
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError, ConfigError, listed
from jaxprefill.threads import thread_pool
from jaxprefill.tokenizer import Tokenizer, TokenizerParts

MANIFEST, WEIGHTS = "manifest.json", "weights"
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_OF_ORBAX = "_CHECKPOINT_METADATA"
_FORMAT = "jaxprefill checkpoint 1"
_AGAIN = "convert the model again"


class HashedFile(msgspec.Struct, frozen=True):
    """What a file must be."""

    num_bytes: int
    sha256: str


class StoredLeaf(msgspec.Struct, frozen=True):
    """An array of the model; the name of its type is NumPy's."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a converted checkpoint holds.

    Attributes:
        source: the model it was made of.
        files: by their paths in the folder, this one left out.
        leaves: arrays by their parameter paths.
    """

    format: str = _FORMAT
    source: str
    files: dict[str, HashedFile]
    leaves: dict[str, StoredLeaf]


class _Tokenizer(msgspec.Struct, frozen=True):
    eos_ids: tuple[int, ...]
    bos_id: int | None
    chat_templates: dict[str, str]


class _Config(msgspec.Struct, frozen=True):
    model: ModelConfig
    tokenizer: _Tokenizer


def is_converted(folder: Path) -> bool:
    """Whether a folder is a converted checkpoint, or what is left of one."""
    return (folder / MANIFEST).is_file() or (folder / WEIGHTS / _OF_ORBAX).is_file()


def write_model(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes config.json and tokenizer.json.

    Raises:
        OSError: they cannot be written.
    """
    parts = tokenizer.parts()
    beside = _Tokenizer(parts.eos_ids, parts.bos_id, parts.chat_templates)
    encoded = msgspec.json.encode(_Config(config, beside))
    (folder / _CONFIG).write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    (folder / _TOKENIZER).write_text(parts.pipeline, encoding="utf-8")


def write_manifest(folder: Path, source: str, leaves: dict[str, StoredLeaf]) -> Manifest:
    """Hashes what is in the folder, and writes the manifest, which makes it a checkpoint.

    Raises:
        OSError: a file cannot be read or written.
    """
    names = sorted(_files_of(folder) - {MANIFEST})
    hashed = _in_threads(lambda name: _hashed(folder / name), names)
    manifest = Manifest(source=source, files=dict(zip(names, hashed, strict=True)), leaves=leaves)
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (folder / MANIFEST).write_bytes(encoded + b"\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that holds just its files, each of the right size.

    Raises:
        CheckpointError: it is damaged, or a file is missing, added or of another size; names it.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        found = _files_of(folder) - {MANIFEST}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: must be a checkpoint's manifest, but {error}; {_AGAIN}"
        ) from error
    if manifest.format != _FORMAT:
        raise CheckpointError(
            f"{path}: format must be {_FORMAT!r}, got {manifest.format!r:.80}; {_AGAIN} with this "
            "version"
        )
    for what, names in (
        ("missing", manifest.files.keys() - found),
        ("there and not in the manifest", found - manifest.files.keys()),
    ):
        if names:
            raise CheckpointError(f"{folder}: {listed(names)} must not be {what}; {_AGAIN}")
    for name, wanted in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != wanted.num_bytes:
            raise CheckpointError(
                f"{folder / name}: must have {wanted.num_bytes} bytes, got {size}; it is "
                f"truncated, or was changed: {_AGAIN}"
            )
    return manifest


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises CheckpointError, naming the file, unless each has the manifest's SHA-256."""
    names = list(names)

    def check(name: str) -> None:
        found, wanted = _hashed(folder / name).sha256, manifest.files[name].sha256
        if found != wanted:
            raise CheckpointError(
                f"{folder / name}: must have SHA-256 {wanted}, got {found}; it is damaged, or was "
                f"changed: {_AGAIN}"
            )

    try:
        _in_threads(check, names)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: {error.filename} cannot be read: {error.strerror}"
        ) from error


def read_model(folder: Path, manifest: Manifest) -> tuple[ModelConfig, Tokenizer]:
    """What `write_model` wrote.

    Raises:
        CheckpointError: a file is not as the manifest says, or of another version.
    """
    names = (_CONFIG, _TOKENIZER)
    if not manifest.files.keys() >= set(names):
        raise CheckpointError(f"{folder}: must hold {' and '.join(names)}; {_AGAIN}")
    check_hashes(folder, manifest, names)
    try:
        data = (folder / _CONFIG).read_bytes()
        found = msgspec.json.decode(data, type=_Config)
        _require_known(msgspec.json.decode(data), msgspec.to_builtins(found))
        beside = found.tokenizer
        pipeline = (folder / _TOKENIZER).read_text(encoding="utf-8")
        parts = TokenizerParts(pipeline, beside.eos_ids, beside.bos_id, beside.chat_templates)
        return found.model, Tokenizer.from_parts(parts)
    except (msgspec.MsgspecError, ConfigError, KeyError) as error:
        raise CheckpointError(
            f"{folder / _CONFIG}: is of another version of jaxprefill: {error}; {_AGAIN}"
        ) from error


def _require_known(written: Any, read: Any) -> None:
    """Raises KeyError for a key that reading dropped: a choice that would not be made."""
    if isinstance(written, dict):
        for key, value in written.items():
            _require_known(value, read[key])


def _files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _hashed(path: Path) -> HashedFile:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return HashedFile(stream.tell(), digest)


def _in_threads(function: Any, names: list[str]) -> list[Any]:
    with thread_pool() as pool:  # hashing releases the GIL
        return list(pool.map(function, names))
