"""What a server and its engine's process tell each other: MessagePack behind a length, no pickle.

Imports no jax. Both ends are of one version, as the server starts the other end itself.
"""

import struct
from typing import Any

import msgspec
import numpy as np

from jaxprefill.config import ModelConfig
from jaxprefill.request import Request
from jaxprefill.tokenizer import TokenizerParts
from jaxprefill.updates import RequestUpdate

HEADER = struct.Struct(">I")


class Start(msgspec.Struct, tag=True, array_like=True):
    """To the engine, first: the fields of EngineConfig, and whether to log much."""

    options: dict[str, Any]
    is_verbose: bool = False


class Submit(msgspec.Struct, tag=True, array_like=True):
    """To the engine: run these, all or none; `number` names them together."""

    number: int
    requests: list[Request]


class Abort(msgspec.Struct, tag=True, array_like=True):
    """To the engine: end a submission, or one request of it."""

    number: int
    request_id: str | None = None


class Ask(msgspec.Struct, tag=True, array_like=True):
    """To the engine: do what `name` says and answer under `number`."""

    number: int
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True, array_like=True):
    """To the engine, last: end every request and leave."""


ToEngine = Start | Submit | Abort | Ask | Stop


class Progress(msgspec.Struct, tag=True, array_like=True):
    """From the engine while it starts: an executable is compiled."""

    name: str
    seconds: float
    num_done: int
    num_all: int

    def describe(self) -> str:
        """One line."""
        done = f"[{self.num_done:>{len(str(self.num_all))}}/{self.num_all}]"
        return f"{done} {self.name}: {self.seconds:.1f} s"


class Ready(msgspec.Struct, tag=True, array_like=True):
    """From the engine: it takes requests from now on."""

    root: str
    config: ModelConfig
    tokenizer: TokenizerParts
    context_length: int
    max_running: int
    kv_tokens: int
    description: str


class Refused(msgspec.Struct, tag=True, array_like=True):
    """From the engine, last: it cannot start; `kind` is a class of `errors`."""

    kind: str
    message: str


class Updates(msgspec.Struct, tag=True, array_like=True):
    """From the engine: what steps found, by the number of the submission."""

    items: list[tuple[int, RequestUpdate]]


class Ended(msgspec.Struct, tag=True, array_like=True):
    """From the engine: a submission failed as a whole."""

    number: int
    kind: str
    message: str
    param: str | None = None


class Answer(msgspec.Struct, tag=True, array_like=True):
    """From the engine: what was asked for, or an error."""

    number: int
    value: Any = None
    error: str | None = None


FromEngine = Progress | Ready | Refused | Updates | Ended | Answer


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.float32).tobytes()
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise NotImplementedError(f"{type(value)} cannot be sent")


def _array(_: type, value: Any) -> Any:
    return np.frombuffer(value, np.float32)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(
    FromEngine, dec_hook=_array
)


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    payload = _ENCODER.encode(message)
    return HEADER.pack(len(payload)) + payload
