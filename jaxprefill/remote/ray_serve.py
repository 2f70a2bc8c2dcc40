"""The server under Ray Serve: as many replicas as requests need, each with an engine of its own.

    serve.run(deployment("demo", max_replicas=4))

Routes and answers are those of `jaxprefill serve`. A request whose replica dies gets 500; the next
goes to another. Needs the extra `ray`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from starlette.applications import Starlette

from jaxprefill.config import EngineConfig, make_config
from jaxprefill.errors import ConfigError, EngineUnavailable
from jaxprefill.options import read_keys
from jaxprefill.remote.client import EngineProcess
from jaxprefill.server.app import create_app
from jaxprefill.server.settings import ServerSettings

_SERVE: Any = import_module("ray.serve")  # of the extra ray
_POLL_S = 0.05
_OF_SERVE = ("host", "port", "ssl_certfile", "ssl_keyfile", "keep_alive_timeout")


class Replica:
    """One engine in a process of its own, and the server's routes over it."""

    async def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        """Waits until the engine is ready: before, Serve sends nothing here.

        Raises:
            JaxPrefillError: it cannot be started.
        """
        self._settings = settings
        self._engine = EngineProcess(config)
        self._running = asyncio.create_task(self._engine.run())
        while not self._engine.is_ready:
            if self._running.done():
                self._running.result()
            await asyncio.sleep(_POLL_S)

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self._engine, self._settings)

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica whose engine is gone for good.

        Raises:
            EngineUnavailable: it is.
        """
        if self._running.done():
            raise EngineUnavailable("the engine has stopped; the replica must be replaced")

    async def __del__(self) -> None:
        await self._engine.stop()


def deployment(
    model: str = "demo",
    *,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    num_gpus: float = 0,
    autoscaling: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An application for `serve.run`: replicas come and go with the requests under way.

    Args:
        model: see `EngineConfig.model`.
        min_replicas: that always run.
        max_replicas: that run while requests wait; None: `min_replicas`, and at least one.
        num_gpus: of each replica; `tensor_parallel_size` of them for one that is shared out.
        autoscaling: further fields of Serve's `AutoscalingConfig`: `{"downscale_delay_s": 60}`.
        settings: fields of `ServerSettings`; address, TLS and keep-alive are Serve's.
        options: fields of `EngineConfig`.

    Raises:
        ConfigError: an option or a setting is unknown or out of range.
    """
    config = make_config(model=model, **options)
    known = [item.name for item in fields(ServerSettings) if item.name not in _OF_SERVE]
    served = ServerSettings(**read_keys("settings", settings or {}, known))
    if num_gpus < 0 or (num_gpus and config.tensor_parallel_size > max(num_gpus, 1)):
        raise ConfigError(
            "num_gpus must be 0 (run on CPUs) or tensor_parallel_size, which is "
            f"{config.tensor_parallel_size}, got {num_gpus}"
        )
    running = config.running(is_cpu=not num_gpus)
    made = _SERVE.deployment(_SERVE.ingress()(Replica)).options(
        name="jaxprefill",
        max_ongoing_requests=4 * running,
        autoscaling_config={
            # As many wait as run, so that the next step's batch is full.
            "target_ongoing_requests": 2 * running,
            **_scaling(min_replicas, max_replicas, autoscaling or {}),
        },
        graceful_shutdown_timeout_s=served.drain_timeout,
        ray_actor_options={"num_gpus": num_gpus},
    )
    return made.bind(config, served)


def _scaling(least: int, most: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    known = list(_SERVE.config.AutoscalingConfig.model_fields)  # Serve ignores unknown ones
    most = max(least, 1) if most is None else most
    if not 0 <= least <= most or most < 1:
        raise ConfigError(
            "min_replicas must be at least 0 and at most max_replicas, and that at least 1, got "
            f"min_replicas {least} and max_replicas {most}"
        )
    return {"min_replicas": least, "max_replicas": most} | read_keys("autoscaling", given, known)
