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
        errors = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise CheckpointError(
            f"model {model!r} is no local path, and hub ids need huggingface_hub, which is not "
            "installed; pip install 'jaxprefill[hub]', or name a local folder or GGUF file"
        ) from error
    # It lets through what its HTTP client raises, whichever that is: the bases of its own error.
    failures = (OSError, ValueError, errors.HfHubHTTPError, *errors.HfHubHTTPError.__bases__)
    try:
        folder = hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_FILES)
        )
    except failures as error:
        remedy = "check the name and the network"
        if isinstance(error, errors.GatedRepoError):
            remedy = "ask for access on its page there, and log in with `hf auth login`"
        elif isinstance(error, errors.RevisionNotFoundError):
            remedy = f"name a branch, tag or commit that {repository} has"
        elif isinstance(error, errors.RepositoryNotFoundError):
            remedy = "check the name; a private model needs `hf auth login`"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            remedy = "it is not in the cache either; check the network, or fetch it beforehand"
        raise CheckpointError(
            f"model {model!r} is no local path, and cannot be fetched from the Hugging Face hub: "
            f"{' '.join(str(error).split())}; {remedy}"
        ) from error
    return Path(folder)
