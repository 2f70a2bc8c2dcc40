"""Answers that are errors: status, OpenAI's nested body, and which of our exceptions is which."""

import logging
from collections.abc import Mapping
from typing import Any

from jaxprefill.errors import EngineUnavailable, JaxPrefillError, RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_NO_HEADERS: Mapping[str, str] = {}


class ApiError(Exception):
    """An answer with a status of 400 or more.

    Attributes:
        message: rule, value and remedy.
        param: the field of the body at fault, if one is.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        """Keeps what the answer will say."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def unavailable(message: str, *, retry_after_s: int = 5) -> ApiError:
    """503: the same request may succeed later."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code="unavailable", headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to any exception; one that is our own fault is logged and hidden."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case EngineUnavailable():
            return unavailable(str(error))
        case TimeoutError():
            message = "the request took longer than the server's request_timeout; ask for less"
            return ApiError(408, message, code="timeout")
        case _:
            logger.error("a request failed", exc_info=error)
            is_ours = isinstance(error, JaxPrefillError)
            reason = str(error) if is_ours else "its log says why"
            return ApiError(500, f"the server failed at this request: {reason}")
