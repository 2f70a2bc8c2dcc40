"""GET /metrics and /server_info, and what operators do: flush, abort, profile.

Profiles are written where `--profile-dir` says, never where a client says; without it there are
none. An aborted request's client gets what there is, with finish_reason "abort", or a 400 where
its prompt was still being read.
"""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxprefill import __version__
from jaxprefill.errors import EngineUnavailable, JaxPrefillError
from jaxprefill.server.api_error import ApiError
from jaxprefill.server.body import decode, read_body, wrong
from jaxprefill.server.context import ServerContext
from jaxprefill.server.health import json_response
from jaxprefill.server.metrics import CONTENT_TYPE, Metrics
from jaxprefill.server.route import check_request_ids

_PATIENCE_S = 2.0  # an engine that is slower to answer is shown as it was last


class AbortBody(msgspec.Struct, kw_only=True):
    """Which requests to end: one by its id, or all."""

    rid: str | None = None
    request_id: str | None = None
    abort_all: bool = False


class Admin:
    """The handlers; each is a GET or POST of an operator or a monitoring system."""

    def __init__(self, context: ServerContext, metrics: Metrics) -> None:
        """`metrics` is the observer of the same application."""
        self._context = context
        self._metrics = metrics
        self._last_stats: dict[str, Any] = {}

    def routes(self) -> list[Route]:
        """All of them."""
        both = ["GET", "POST"]
        return [
            Route("/metrics", self._show_metrics),
            Route("/server_info", self._server_info),
            Route("/get_server_info", self._server_info),
            Route("/executables", self._executables),
            Route("/executables/{name:path}", self._program),
            Route("/flush_cache", self._flush_cache, methods=both),
            Route("/abort_request", self._abort_request, methods=["POST"]),
            Route("/start_profile", self._start_profile, methods=["POST"]),
            Route("/stop_profile", self._stop_profile, methods=["POST"]),
        ]

    async def _show_metrics(self, _: HttpRequest) -> Response:
        client = self._context.client
        text = self._metrics.exposition(
            await self._recent_stats(),
            num_compiled=client.num_compiled,
            num_restarts=client.num_restarts,
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def _recent_stats(self) -> dict[str, Any]:
        """The engine's numbers; those of the last time while it is slow, none while it is lost."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._last_stats = await self._context.client.stats()
        except TimeoutError:
            pass
        except EngineUnavailable:
            self._last_stats = {}
        return self._last_stats

    async def _server_info(self, _: HttpRequest) -> Response:
        """What is served, from which shapes, in which memory, and what it has done so far."""
        context = self._context
        model, stats = context.client.model, await context.client.stats()
        ladder = stats["ladder"]
        return json_response(
            {
                "version": __version__,
                "model": model.root,
                "served_model_names": list(context.names),
                "architecture": model.config.architecture,
                "context_length": model.context_length,
                "max_running_requests": model.max_running,
                "kv_tokens": model.kv_tokens,
                "buckets": ladder["buckets"],
                "slots": ladder["slots"],
                "max_contexts": ladder["max_contexts"],
                "ladder": ladder,
                "executables": stats["compiled"],
                "memory": stats["memory"],
                "counters": {
                    name: value
                    for name, value in stats.items()
                    if name not in ("ladder", "compiled", "memory", "startup_s", "mesh", "device")
                },
                "mesh": stats["mesh"],
                "startup_s": stats["startup_s"],
                "num_restarts": context.client.num_restarts,
                "started_at": model.started_at,
                "is_draining": context.is_draining,
            }
        )

    async def _executables(self, _: HttpRequest) -> Response:
        """What is compiled, and for which device: what `jaxprefill inspect --url` reads."""
        stats = await self._context.client.stats()
        return json_response({"device": stats["device"], "executables": stats["compiled"]})

    async def _program(self, request: HttpRequest) -> Response:
        """The optimised HLO of one of them."""
        name, client = request.path_params["name"], self._context.client
        known = [record["name"] for record in (await client.stats())["compiled"]]
        if name not in known:
            message = f"name must be that of an executable, see /executables, got {name!r:.120}"
            raise ApiError(404, message, param="name", code="executable_not_found")
        text = await client.program_text(name)
        return json_response({"name": name, "stage": "hlo", "text": text})

    async def _flush_cache(self, _: HttpRequest) -> Response:
        """Forgets all prefixes that no running request uses."""
        await self._context.client.flush_cache()
        return json_response({"success": True, "message": "the prefix cache is empty"})

    async def _abort_request(self, request: HttpRequest) -> Response:
        """Ends a request by its id, or all; an unknown id is nothing to do."""
        limit = self._context.settings.max_body_bytes
        body = decode(await read_body(request.receive, request.headers, limit), AbortBody)
        rid = check_request_ids({"rid": body.rid, "request_id": body.request_id})
        calls = self._context.calls
        if body.abort_all:
            found = list(calls.values())
        elif rid is not None:
            found = [calls[rid]] if rid in calls else []
        else:
            raise wrong("rid", "the id of a request, unless abort_all is true", body.rid)
        for call in found:
            call.cancel()
        return json_response({"success": True, "num_aborted": len(found)})

    async def _start_profile(self, _: HttpRequest) -> Response:
        """Records what the engine runs."""
        folder = self._profile_dir()
        await self._profile(self._context.client.start_profile(folder))
        return json_response({"success": True, "folder": folder})

    async def _stop_profile(self, _: HttpRequest) -> Response:
        """Writes the recording."""
        folder = self._profile_dir()
        await self._profile(self._context.client.stop_profile())
        return json_response({"success": True, "folder": folder})

    def _profile_dir(self) -> str:
        folder = self._context.settings.profile_dir
        if folder is None:
            message = "profiles need a folder to be written to; start the server with --profile-dir"
            raise ApiError(403, message, code="no_profile_dir")
        return folder

    async def _profile(self, asked: Any) -> None:
        try:
            await asked
        except EngineUnavailable:
            raise
        except JaxPrefillError as error:  # recording already, or not recording
            raise ApiError(409, str(error), code="profile") from error
