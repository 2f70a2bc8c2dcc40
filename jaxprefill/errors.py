"""Every error a caller can meet. A message says rule, value and remedy."""

from collections.abc import Collection


class JaxPrefillError(Exception):
    """Root of all errors raised on purpose by jaxprefill."""


class ConfigError(JaxPrefillError, ValueError):
    """An engine option is wrong, or does not fit the model or the device."""


class CheckpointError(JaxPrefillError):
    """A model cannot be found, fetched, read or mapped onto its architecture."""


class CompileError(JaxPrefillError):
    """An executable could not be compiled; names its shape and carries XLA's message."""


class CapacityError(JaxPrefillError):
    """Something was asked of a fixed-size structure that it cannot hold."""


class RequestError(JaxPrefillError, ValueError):
    """A request is invalid (HTTP 4xx). The engine goes on.

    Attributes:
        param: name of the request field at fault, if one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keeps the field at fault beside the message."""
        super().__init__(message)
        self.param = param


class EngineUnavailable(JaxPrefillError):
    """The engine is starting, stopping or gone (HTTP 503): the same request may succeed later."""


class StoreError(JaxPrefillError):
    """A store of executables cannot be read, written or trusted; start-up compiles instead."""


class FallbackError(JaxPrefillError):
    """`strict_prefill` is set and a batch would have taken the eager fallback."""


class KernelUnsupported(JaxPrefillError, NotImplementedError):
    """No attention backend can serve this model on this device; lists candidates and reasons."""


class KernelError(JaxPrefillError):
    """A kernel computes wrong numbers on this device; names it, its error and the limit."""


class InspectionError(JaxPrefillError):
    """What is to be inspected cannot be had or read; says which part, and what would do."""


def listed(names: Collection[str], *, limit: int = 12) -> str:
    """The first names in order, and how many more there are, for a message."""
    shown = ", ".join(sorted(names)[:limit]) or "none"
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
