"""API keys: every route asks for one but the pages and those that say if the server is well."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxprefill.server import replies
from jaxprefill.server.api_error import ApiError
from jaxprefill.server.observer import Observer
from jaxprefill.server.pages import PUBLIC_PATHS

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"}) | PUBLIC_PATHS


class ApiKeys:
    """Middleware that lets a request pass if it brings one of the keys, or there are none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], observer: Observer) -> None:
        """`keys` are compared as bytes, in constant time."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] != "http" or not self._keys or _is_open(scope) or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        self._observer.rejected("unauthorized")
        error = ApiError(
            401,
            "the header Authorization must be 'Bearer ' and an API key of this server",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await replies.send_error(send, error)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _is_open(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" or is_open_path(scope["path"])


def is_open_path(path: str) -> bool:
    """Whether a route is answered without a key."""
    return path in OPEN_PATHS
