"""Opens the checkpoint that a user names: a known model, a folder, a file or a hub id."""

import importlib
from pathlib import Path

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.converted import is_converted
from jaxprefill.weights.demo import fetch_demo
from jaxprefill.weights.gguf import GgufCheckpoint
from jaxprefill.weights.hub import fetch_from_hub, is_hub_id
from jaxprefill.weights.huggingface import HuggingFaceCheckpoint
from jaxprefill.weights.known import DEMO_NAME


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a model by name or path; the network is asked only if no such path exists.

    Args:
        model: `demo`, a Hugging Face folder, a converted checkpoint, a GGUF file, or a hub id
            `owner/name[@revision]`.

    Raises:
        CheckpointError: nothing supported is there, or it cannot be fetched or read.
    """
    if model == DEMO_NAME:
        return GgufCheckpoint(fetch_demo(), name=DEMO_NAME)
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a user's home that is none
        raise CheckpointError(
            f"model must be a name or a path, got {model!r:.80}: {error!s:.200}; name another"
        ) from error
    if path.is_dir() and is_converted(path):
        # Imported here alone: others need not wait for Orbax.
        return importlib.import_module("jaxprefill.weights.orbax").OrbaxCheckpoint(path)
    if path.is_dir():
        return HuggingFaceCheckpoint(_checked_folder(path))
    if path.suffix == ".safetensors" and path.is_file():
        raise CheckpointError(
            f"model must be the folder of a Hugging Face model, not one of its files; name "
            f"{str(path.parent)!r} instead of {model!r}"
        )
    if path.is_file():
        return GgufCheckpoint(path)
    if is_hub_id(model) and path.suffix != ".gguf":
        return HuggingFaceCheckpoint(fetch_from_hub(model), name=model)
    raise CheckpointError(
        f"model must be {DEMO_NAME!r}, a folder with config.json, a GGUF file, or a hub id "
        f"(owner/name), got {model!r}, and no such file exists"
    )


def _checked_folder(folder: Path) -> Path:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: a folder must hold config.json; it holds GGUF files: name one of them, "
            f"such as {str(folder / files[0])!r}"
        )
    return folder
