"""The application: every route over one engine, with keys, CORS and errors of one form."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from jaxprefill.client import EngineClient
from jaxprefill.errors import JaxPrefillError
from jaxprefill.server.admin import Admin
from jaxprefill.server.api_error import ApiError, as_api_error
from jaxprefill.server.auth import ApiKeys
from jaxprefill.server.context import ServerContext
from jaxprefill.server.endpoints import ENDPOINTS
from jaxprefill.server.health import health_routes, json_response
from jaxprefill.server.metrics import Metrics
from jaxprefill.server.observer import Observer
from jaxprefill.server.openapi import openapi_route
from jaxprefill.server.pages import page_routes
from jaxprefill.server.route import post
from jaxprefill.server.settings import ServerSettings
from jaxprefill.server.tokenizing import tokenizer_routes


def create_app(client: EngineClient, settings: ServerSettings | None = None) -> Starlette:
    """The ASGI application; `app.state.context` is its `ServerContext`."""
    settings, metrics = settings or ServerSettings(), Metrics()
    context = ServerContext(client, settings, metrics)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        context.close()

    routes = [*_routes(context), *Admin(context, metrics).routes()]
    app = Starlette(
        routes=[*routes, openapi_route(routes, context), *page_routes()],
        middleware=_middleware(settings, metrics),
        exception_handlers={
            HTTPException: _plain_error,
            ApiError: _any_error,
            JaxPrefillError: _any_error,
            Exception: _any_error,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def _routes(context: ServerContext) -> list[BaseRoute]:
    return [
        *health_routes(context),
        *(post(each.path, context, each.kind, each.handler) for each in ENDPOINTS),
        *tokenizer_routes(context),
    ]


def _middleware(settings: ServerSettings, observer: Observer) -> list[Middleware]:
    found: list[Middleware] = []
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=["*"],
            allow_headers=["*"],
        )
        found.append(cors)
    if settings.api_key:
        found.append(Middleware(ApiKeys, keys=settings.api_key, observer=observer))
    return found


async def _plain_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors: no such route, or no such method there."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    allowed = headers.get("Allow") or headers.get("allow") or "another"
    message, code = {
        404: (f"there is no route {request.url.path!r:.120}; see /docs", "not_found"),
        405: (f"{request.url.path} takes {allowed}, not {request.method}", "method_not_allowed"),
    }.get(status, (str(error), None))
    return _response(ApiError(status, message, code=code, headers=headers))


async def _any_error(_: HttpRequest, error: Exception) -> Response:
    return _response(as_api_error(error))


def _response(error: ApiError) -> Response:
    return json_response(error.body(), status=error.status, headers=dict(error.headers))
