"""`jaxprefill serve`: an HTTP server for the clients of OpenAI, SGLang and vLLM."""

import argparse
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, get_type_hints

from jaxprefill.cli.command import Command
from jaxprefill.cli.flags import add_engine_flags, engine_config_of, option_flag
from jaxprefill.errors import ConfigError
from jaxprefill.remote.spawn import spawn
from jaxprefill.server.settings import ServerSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Server and engine."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="say only that the server is ready"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the log of this and other libraries"
    )
    group = parser.add_argument_group("server options")
    hints = get_type_hints(ServerSettings)
    for item in fields(ServerSettings):
        names, keywords = option_flag(item, hints[item.name])
        group.add_argument(*names, **keywords)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; 0 if all requests could finish.

    Raises:
        JaxPrefillError: an option or the model is at fault, or a package is missing.
    """
    names = [item.name for item in fields(ServerSettings)]
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    lists: dict[str, Any] = {
        name: tuple(value) for name, value in given.items() if isinstance(value, list)
    }
    given |= lists
    settings, config = ServerSettings(**given), engine_config_of(args)
    _require_packages()
    with spawn() as spawned:  # it imports jax while this process imports the server
        from jaxprefill.cli.serving import serve

        return serve(
            config, settings, spawned=spawned, is_quiet=args.quiet, is_verbose=args.verbose
        )


def _require_packages() -> None:
    for name in ("starlette", "uvicorn", "msgspec", "prometheus_client"):
        if find_spec(name) is None:
            raise ConfigError(
                f"serve needs the package {name}, which is not installed; pip install {name}"
            )


COMMAND = Command(
    name="serve",
    summary="Serve a model over HTTP, as OpenAI's clients expect it.",
    usage="[--model MODEL] [--host ADDRESS] [--port PORT] [options]",
    epilog="""\
One line on stderr says when the server is ready. Progress and errors go there too.

examples:
  jaxprefill serve
  jaxprefill serve --model Qwen/Qwen3-0.6B --port 9000 --api-key "$KEY"
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "The capital of France is", "max_tokens": 8}'
""",
    add_flags=add_flags,
    run=run,
)
