"""The executables of a running server, as it tells of them over HTTP."""

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec

from jaxprefill.errors import ConfigError, InspectionError
from jaxprefill.inspection.records import Chip, Inspected, Missing, Numbers, Stage

_PATIENCE_S = 60.0
_LOCAL = "a server tells only the hlo; `jaxprefill inspect --model` compiles for the others"


class ServerSource:
    """A server of jaxprefill's at some URL."""

    def __init__(
        self, url: str, *, find_chip: Callable[[str, str], Chip], api_key: str | None = None
    ) -> None:
        """Asks it once for its records.

        Args:
            url: as `http://127.0.0.1:8000`.
            find_chip: a chip and its rates, from platform and the driver's name for it.
            api_key: where it asks for one.

        Raises:
            ConfigError: that is no URL.
            InspectionError: it does not answer, or is no server of jaxprefill's.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url must be one such as http://127.0.0.1:8000, got {url!r}")
        self._url = url.rstrip("/")
        self._key = api_key
        info = self._ask("/executables")
        try:
            records = msgspec.convert(info["executables"], list[Numbers])
            self._records = {record.name: record for record in records}
            self.chip = find_chip(str(info["device"]["platform"]), str(info["device"]["kind"]))
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise self._stranger(error) from error
        if not self._records:
            raise InspectionError(f"{self._url} has no executables; ask again when it is ready")

    @property
    def names(self) -> list[str]:
        """Every executable."""
        return list(self._records)

    def open(self, name: str) -> Inspected:
        """See `Source.open`."""
        numbers = asdict(self._records[name])
        return Inspected(chip=self.chip, read_text=partial(self._text, name), **numbers)

    def _text(self, name: str, stage: Stage) -> str | Missing:
        if stage != "hlo":
            return Missing(_LOCAL)
        told = self._ask(f"/executables/{urllib.parse.quote(name)}")
        try:
            return str(told["text"])
        except (KeyError, TypeError) as error:
            raise self._stranger(error) from error

    def _stranger(self, error: Exception) -> InspectionError:
        return InspectionError(
            f"{self._url} must answer /executables as jaxprefill does: {error!r}; is it another "
            "server?"
        )

    def _ask(self, path: str) -> Any:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            request = urllib.request.Request(self._url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as reply:
                return msgspec.json.decode(reply.read())
        except urllib.error.HTTPError as error:
            body = error.read().decode(errors="replace")
            raise InspectionError(f"{self._url}{path} answers {error.code}: {body:.300}") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise InspectionError(f"{self._url} does not answer as a server: {why}") from error
