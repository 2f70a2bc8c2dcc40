"""Fetches a model from the Hugging Face hub into huggingface_hub's own cache.

The library is the extra `hub`, imported only when a hub id is asked for.
"""

import importlib
import re
from pathlib import Path

from jaxprefill.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ("*.safetensors", "*.json", "*.jinja")


def is_hub_id(model: str) -> bool:
    """Whether a text has the form of a hub id, `owner/name`, with an optional `@revision`."""
    return _ID.fullmatch(model.partition("@")[0]) is not None


def fetch_from_hub(model: str) -> Path:
    """The folder of a hub model, fetched the first time: safetensors, JSON and templates only.

    Args:
        model: `owner/name`, or `owner/name@revision`.

    Raises:
        CheckpointError: huggingface_hub is not installed, or the model cannot be had.
    """
    repository, _, revision = model.partition("@")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"model {model!r} is no local path, and hub ids need huggingface_hub, which is not "
            "installed; pip install 'jaxprefill[hub]', or name a local folder or GGUF file"
        ) from error
    try:
        folder = hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_FILES)
        )
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise CheckpointError(
            f"model {model!r} is no local path, and cannot be fetched from the Hugging Face hub: "
            f"{error}; check the name, the network, and your access to the model"
        ) from error
    return Path(folder)
