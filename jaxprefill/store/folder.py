"""A store: a folder of executables, each a manifest and a payload, and of small results.

    executables/<set>/<entry>.json             a manifest; <set> is what an engine's have in common
    executables/<set>/<entry>-<sha>.bin        PJRT's bytes
    executables/<set>/<entry>-<sha>.<stage>.gz a text of the program
    results/<kind>/<digest>.json               small JSON values: ladders, checks that passed
    autotune/                                  XLA's own choices of kernels

Knows no device. Processes may write at once: names tell contents apart, files appear whole, and a
manifest comes after what it names.
"""

import contextlib
import gzip
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxprefill.errors import StoreError
from jaxprefill.store.files import MAX_MANIFEST_BYTES, check_trusted, read_file, write_file
from jaxprefill.store.manifest import (
    Facts,
    StoredExecutable,
    StoredFile,
    digest,
    dump,
    parse,
    seal,
    sha256,
    unseal,
)

logger = logging.getLogger(__name__)

_EXECUTABLES, _RESULTS = "executables", "results"
_SCRATCH_S = 3600.0  # older files that no manifest names were left by a process that ended
# Names of a set's folder and of the files in it, and of files that are being written.
_SET = re.compile(r"[0-9a-f]{16}")
_OWN = re.compile(r"\w+-[0-9a-f]{16}(\.json|-[0-9a-f]{16}\.(bin|\w+\.gz))|\.new-\w+")


@dataclass(frozen=True)
class Found:
    """A manifest in a store, and what is wrong with it, if anything is."""

    manifest: Path
    entry: StoredExecutable | None
    fault: str | None = None

    @property
    def files(self) -> list[Path]:
        """The manifest and all it names."""
        named = [] if self.entry is None else [self.entry.payload, *self.entry.texts.values()]
        return [self.manifest, *(self.manifest.parent / file.name for file in named)]

    @property
    def num_bytes(self) -> int:
        """Of all its files that are there."""
        return sum(path.stat().st_size for path in self.files if path.exists())


class Store:
    """Reads and writes one folder."""

    def __init__(self, folder: Path, *, is_trusted: bool = False) -> None:
        """Touches nothing yet; `is_trusted` takes files whoever wrote them."""
        self.folder = folder
        self.is_trusted = is_trusted

    @staticmethod
    def open(folder: str | Path, *, is_trusted: bool = False) -> "Store":
        """A store that exists.

        Raises:
            StoreError: it does not, or others could have written into it.
        """
        path = Path(folder).expanduser()
        try:
            if not path.is_dir():
                what = "is a file" if path.exists() else "is no folder"
                raise StoreError(f"{path} {what}; `jaxprefill compile --out` makes a folder")
            store = Store(path.resolve(), is_trusted=is_trusted)
            if not is_trusted:
                check_trusted(store.folder)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
        return store

    # --- executables

    def find(self, name: str, facts: Facts, job: Facts) -> StoredExecutable | None:
        """The executable of that name that is valid for these facts; None: there is none.

        Raises:
            StoreError: its manifest is damaged or cannot be trusted.
        """
        path = self._manifest(name, facts, job)
        if not path.exists():
            return None
        entry = self._read(path)
        if entry.name != name or entry.fingerprint != digest({"facts": facts, "job": job}):
            raise StoreError(f"{path.name} is of another executable than its place says")
        return entry

    def payload(self, entry: StoredExecutable) -> bytes:
        """PJRT's bytes, which are those that were written.

        Raises:
            StoreError: they are not, or cannot be had.
        """
        return self._content(entry, entry.payload)

    def text(self, entry: StoredExecutable, stage: str) -> str:
        """A text of the program that was kept beside it.

        Raises:
            StoreError: it was not kept, or is damaged.
        """
        if stage not in entry.texts:
            raise StoreError(f"{entry.name} was stored without its {stage}")
        return gzip.decompress(self._content(entry, entry.texts[stage])).decode()

    def write(
        self, entry: StoredExecutable, payload: bytes, texts: Mapping[str, str] | None = None
    ) -> None:
        """Puts an executable in its place; `payload` and `texts` of `entry` are filled in here.

        Raises:
            StoreError: the disk is full, or the folder cannot be written.
        """
        path = self._manifest(entry.name, entry.facts, entry.job)
        written = {
            stage: self._write_content(path, stage + ".gz", gzip.compress(text.encode(), 6))
            for stage, text in (texts or {}).items()
        }
        entry = replace(
            entry,
            payload=self._write_content(path, "bin", payload),
            texts=written,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_file(path, dump(entry))

    def found(self) -> Iterator[Found]:
        """Every manifest, by set and name; payloads are not looked at."""
        for path in sorted(self.folder.glob(f"{_EXECUTABLES}/*/*.json")):
            try:
                entry = self._read(path)
            except StoreError as error:
                yield Found(path, None, str(error))
                continue
            is_found = path == self._manifest(entry.name, entry.facts, entry.job)
            fault = None if is_found else "it was moved or renamed, so that no start finds it"
            yield Found(path, entry, fault)

    def entries(self) -> Iterator[StoredExecutable]:
        """Every executable whose manifest can be read; the others are logged."""
        for found in self.found():
            if found.entry is None:
                logger.warning("%s is left out: %s", found.manifest, found.fault)
            else:
                yield found.entry

    def verify(self) -> Iterator[Found]:
        """Every executable, each file of it compared with its checksum."""
        for found in self.found():
            fault = found.fault
            if found.entry is not None:
                try:
                    for file in (found.entry.payload, *found.entry.texts.values()):
                        self._content(found.entry, file)
                except StoreError as error:
                    fault = str(error)
            yield replace(found, fault=fault)

    def touch(self, entry: StoredExecutable) -> None:
        """Notes that it was used, where the folder can be written."""
        _note_use(self._manifest(entry.name, entry.facts, entry.job))

    # --- small results

    def has_result(self, kind: str, facts: Facts) -> bool:
        """Whether anything was written for these facts, damaged or not, that can be seen."""
        try:
            return self._result(kind, facts).exists()
        except OSError:  # a folder that this user may not enter
            return False

    def read_result(self, kind: str, facts: Facts) -> Any:
        """What was written for these facts, or None; damage is a warning, and None too."""
        path = self._result(kind, facts)
        if not path.exists():
            return None
        _note_use(path)
        return self._read_result(path, dict(facts))[1]

    def results(self, kind: str) -> list[tuple[dict[str, Any], Any]]:
        """All of a kind, each with the facts for which it holds; damage is a warning."""
        found = map(self._read_result, sorted(self.folder.glob(f"{_RESULTS}/{kind}/*.json")))
        return [(facts, value) for facts, value in found if value is not None]

    def write_result(self, kind: str, facts: Facts, value: Any) -> None:
        """Keeps a JSON value under a kind ("ladder", ...) and the facts for which it holds.

        Raises:
            StoreError: it cannot be written.
        """
        write_file(self._result(kind, facts), seal({"facts": dict(facts), "value": value}))

    @property
    def autotune_folder(self) -> Path:
        """Where XLA keeps which kernels were fastest."""
        return self.folder / "autotune"

    # --- housekeeping

    def prune(self, *, unused_s: float, is_verified: bool = True) -> tuple[int, int]:
        """Deletes executables that no start has used for so long, damaged ones, and leftovers.

        So go notes of checks that passed, which a start makes again; other small results stay, as
        do files whose names a store does not give. Without `is_verified` payloads are not read,
        and damage is found in manifests alone.

        Returns:
            How many files, and their bytes.
        """
        # As they are before anything is judged: what another process puts in their place stays.
        seen = {path: path.lstat() for path in self._own_files()}
        now, kept, doomed = time.time(), set[Path](), set[Path]()
        for found in self.verify() if is_verified else self.found():
            if found.manifest in seen:
                is_unused = now - seen[found.manifest].st_mtime > unused_s
                (doomed if is_unused or found.fault is not None else kept).update(found.files)
        limit_s = min(unused_s, _SCRATCH_S)
        doomed |= {path for path, one in seen.items() if now - one.st_mtime > limit_s}
        stale = self._stale_results(before=now - unused_s, scratch_before=now - limit_s)
        seen |= stale
        doomed |= stale.keys()
        gone = [
            seen[path].st_size
            for path in doomed - kept
            if path in seen and _unlink_unchanged(path, seen[path])
        ]
        for folder in {path.parent for path in seen}:
            with contextlib.suppress(OSError):  # another process writes there again
                folder.rmdir()
        return len(gone), sum(gone)

    def _own_files(self) -> Iterator[Path]:
        """Files of executables by their names; what a link leads to is not this store's to delete.

        The folder may be any that a user names: what else lies in it is not touched.
        """
        for folder in self.folder.glob(f"{_EXECUTABLES}/*"):
            if _SET.fullmatch(folder.name) and not _is_linked(folder):
                yield from (path for path in folder.glob("*") if _is_own(path))

    def _stale_results(self, *, before: float, scratch_before: float) -> dict[Path, os.stat_result]:
        """Of small results, old ones that say only that something passed, and unfinished ones."""
        found: dict[Path, os.stat_result] = {}
        for path in self.folder.glob(f"{_RESULTS}/*/*"):
            if _is_linked(path.parent) or path.is_symlink() or not path.is_file():
                continue
            seen = path.lstat()
            if path.name.startswith(".new-"):
                is_stale = seen.st_mtime < scratch_before
            else:
                is_stale = seen.st_mtime < before and self._read_result(path)[1] is True
            if is_stale:
                found[path] = seen
        return found

    def _read_result(
        self, path: Path, expected: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Facts and value; the value is None where it is damaged, or of other facts."""
        try:
            content = read_file(path, is_trusted=self.is_trusted, limit=MAX_MANIFEST_BYTES)
            held = unseal(content)
            facts, value = dict(held["facts"]), held["value"]
            if expected not in (None, facts):
                raise StoreError("it is of other facts than its place says")
            return facts, value
        except (StoreError, TypeError, KeyError, ValueError) as error:
            logger.warning("%s is left out: %s", path, error)
            return {}, None

    def _read(self, path: Path) -> StoredExecutable:
        return parse(read_file(path, is_trusted=self.is_trusted, limit=MAX_MANIFEST_BYTES))

    def _content(self, entry: StoredExecutable, file: StoredFile) -> bytes:
        path = self._manifest(entry.name, entry.facts, entry.job).parent / file.name
        content = read_file(path, is_trusted=self.is_trusted, limit=file.num_bytes)
        if sha256(content) != file.sha256:
            raise StoreError(f"{file.name} does not have the SHA-256 that its manifest says")
        return content

    def _write_content(self, manifest: Path, ending: str, content: bytes) -> StoredFile:
        checksum = sha256(content)
        name = f"{manifest.stem}-{checksum[:16]}.{ending}"
        write_file(manifest.parent / name, content)
        return StoredFile(name=name, sha256=checksum, num_bytes=len(content))

    def _manifest(self, name: str, facts: Facts, job: Facts) -> Path:
        slug = re.sub(r"\W+", "_", name)
        return self.folder / _EXECUTABLES / digest(facts)[:16] / f"{slug}-{digest(job)[:16]}.json"

    def _result(self, kind: str, facts: Facts) -> Path:
        return self.folder / _RESULTS / kind / f"{digest(facts)[:32]}.json"


def _is_linked(folder: Path) -> bool:
    return folder.is_symlink() or folder.parent.is_symlink()


def _is_own(path: Path) -> bool:
    return _OWN.fullmatch(path.name) is not None and (path.is_symlink() or not path.is_dir())


def _note_use(path: Path) -> None:
    """That a file was used shows in its time, where the folder can be written."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        logger.debug("the use of %s is not noted", path)


def _unlink_unchanged(path: Path, seen: os.stat_result) -> bool:
    """Deletes a file unless it is another than was seen; whether it did."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if (found.st_ino, found.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
            path.unlink()
            return True
    return False
