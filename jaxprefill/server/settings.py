"""Options of the HTTP side; each field is a flag of `jaxprefill serve`."""

from dataclasses import dataclass, fields
from typing import get_type_hints

from jaxprefill.errors import ConfigError
from jaxprefill.options import coerce, option


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How to listen, whom to answer, and how much to take on.

    Raises:
        ConfigError: a value is out of range; the message names field, value and range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of them", "ADDRESS")
    port: int = option(8000, "port to listen on; 0: any free one", "PORT")
    served_model_name: tuple[str, ...] = option(
        (), "what clients call the model (default: MODEL); repeatable, the first is shown", "NAME"
    )
    api_key: tuple[str, ...] = option(
        (), "key that clients must bring (Authorization: Bearer KEY); repeatable", "KEY"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web origin that browsers may call from, * for all; repeatable", "ORIGIN"
    )
    allow_credentials: bool = option(False, "let browsers of these origins send cookies")
    ssl_certfile: str | None = option(None, "certificate chain (PEM): serve HTTPS", "FILE")
    ssl_keyfile: str | None = option(None, "its private key (PEM)", "FILE")
    max_queued_requests: int = option(
        1024, "prompts that may wait for the engine; beyond that the answer is 429", "N"
    )
    request_timeout: float = option(
        600.0, "seconds after which a request is given up; 0: never", "SECONDS"
    )
    max_body_bytes: int = option(
        32 * 2**20, "largest request body, of at most a million values; beyond that 413", "BYTES"
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests have after SIGTERM", "SECONDS"
    )
    profile_dir: str | None = option(
        None, "folder for what /start_profile records; without it, it records nothing", "FOLDER"
    )
    keep_alive_timeout: int = option(75, "seconds that an idle connection is kept open", "SECONDS")

    def __post_init__(self) -> None:
        hints = get_type_hints(ServerSettings)
        for item in fields(self):
            value, hint = getattr(self, item.name), hints[item.name]
            if hint == tuple[str, ...]:
                _check_texts(item.name, value)
            else:
                object.__setattr__(self, item.name, coerce(item.name, value, hint))
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        for name in ("max_queued_requests", "request_timeout", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_body_bytes", "keep_alive_timeout"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile; name both, or none for plain HTTP")

    def names(self, root: str) -> tuple[str, ...]:
        """What clients may call the model that was loaded as `root`."""
        return self.served_model_name or (root,)


def _check_texts(name: str, value: object) -> None:
    is_texts = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    if not is_texts:
        raise ConfigError(f"{name} must hold texts that are not empty, got {value!r}")
