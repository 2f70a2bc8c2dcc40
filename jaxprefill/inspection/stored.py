"""The executables of a store, read from their manifests and the texts kept beside them."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxprefill.errors import InspectionError, StoreError
from jaxprefill.inspection.records import Chip, Inspected, Missing, Stage
from jaxprefill.store.folder import Store
from jaxprefill.store.manifest import StoredExecutable

_KEPT = "the store was written without it; `jaxprefill inspect --model` compiles it"


class StoreSource:
    """A folder that `jaxprefill compile` or an engine wrote."""

    def __init__(
        self,
        folder: str | Path,
        *,
        find_chip: Callable[[str, str], Chip],
        load: Callable[[bytes], str] | None = None,
        is_trusted: bool = False,
    ) -> None:
        """Reads manifests.

        Args:
            folder: the store.
            find_chip: a chip and its rates, from platform and the driver's name for it.
            load: the program of PJRT's bytes, where the store kept no text; native code is read.
            is_trusted: read it although others can write it.

        Raises:
            StoreError: there is no such store, or others could have written into it.
            InspectionError: it is empty.
        """
        self._store = Store.open(folder, is_trusted=is_trusted)
        entries = list(self._store.entries())
        if not entries:
            raise InspectionError(
                f"{folder} holds no executables; `jaxprefill compile` writes some"
            )
        often = Counter(entry.name for entry in entries)
        self._entries = {
            entry.name
            if often[entry.name] == 1
            else f"{entry.name} @{entry.fingerprint[:8]}": entry
            for entry in entries
        }
        self._load = load
        self._find_chip = find_chip
        self.chip = self._chip_of(entries[0])

    @property
    def names(self) -> list[str]:
        """Every executable; those of several engines with the fingerprint behind the name."""
        return list(self._entries)

    def open(self, name: str) -> Inspected:
        """See `Source.open`."""
        entry = self._entries[name]
        facts, record = entry.facts, entry.record
        return Inspected(
            name=name,
            chip=self._chip_of(entry),
            read_text=partial(self._text, entry),
            facts=facts | {"job": entry.job},
            temp_bytes=record.get("temp_bytes"),
            argument_bytes=record.get("argument_bytes"),
            output_bytes=record.get("output_bytes"),
            code_bytes=record.get("code_bytes"),
            compile_s=record.get("compile_s"),
            fingerprint=entry.fingerprint,
        )

    def _chip_of(self, entry: StoredExecutable) -> Chip:
        facts = entry.facts
        return self._find_chip(str(facts.get("platform", "")), str(facts.get("device_kind", "")))

    def _text(self, entry: StoredExecutable, stage: Stage) -> str | Missing:
        try:
            if stage in entry.texts:
                return self._store.text(entry, stage)
            if stage == "hlo" and self._load is not None:
                return self._load(self._store.payload(entry))
        except StoreError as error:
            return Missing(str(error))
        return Missing(_KEPT)
