"""What the files of sentence-transformers beside a model say about its embeddings.

`modules.json` lists what stands on the transformer: a pooling, and perhaps a normalisation.
"""

from pathlib import Path
from typing import Any

from jaxprefill.config import PoolingConfig, PoolingKind
from jaxprefill.errors import CheckpointError
from jaxprefill.weights.json_file import read_object, read_value

_MODULES = "modules.json"
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}


def read_pooling(folder: Path) -> PoolingConfig | None:
    """The pooling of a model's folder, or None where it has no modules.json.

    Raises:
        CheckpointError: a file is malformed, or it asks for modules or a pooling that are not
            computed.
    """
    if not (folder / _MODULES).is_file():
        return None
    names, pooling = list[str](), PoolingConfig(is_normalized=False)
    for module in _modules(folder / _MODULES):
        name = module["type"].rpartition(".")[2]
        names.append(name)
        if name == "Pooling":
            pooling = PoolingConfig(kind=_read_kind(folder, module["path"]), is_normalized=False)
    match names:
        case ["Transformer"] | ["Transformer", "Pooling"]:
            return pooling
        case ["Transformer", "Pooling", "Normalize"] | ["Transformer", "Normalize"]:
            return PoolingConfig(kind=pooling.kind, is_normalized=True)
        case _:
            raise CheckpointError(
                f"{folder / _MODULES}: modules must be Transformer, then Pooling, then Normalize "
                f"or nothing, got {', '.join(names)}; what else they compute is not supported"
            )


def _modules(path: Path) -> list[dict[str, str]]:
    modules = read_value(path)
    is_right = isinstance(modules, list) and all(
        isinstance(module, dict)
        and all(isinstance(module.get(key), str) for key in ("type", "path"))
        for module in modules
    )
    if not is_right:
        raise CheckpointError(
            f'{path}: must be a list of {{"type": ..., "path": ...}}, got {modules!r:.80}; '
            "fetch it again"
        )
    return modules


def _read_kind(folder: Path, name: str) -> PoolingKind:
    """One pooling, as flags (`pooling_mode_mean_tokens`) or by name (`pooling_mode`)."""
    if Path(name).name != name:
        raise CheckpointError(
            f"{folder / _MODULES}: path must name a folder beside it, got {name!r}"
        )
    path = folder / name / "config.json"
    values = read_object(path)
    kinds = _named_modes(values) or [
        key.removeprefix("pooling_mode_")
        for key, value in values.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    found = _KINDS.get(kinds[0]) if len(kinds) == 1 else None
    if found is None:
        raise CheckpointError(
            f"{path}: pooling must be one of lasttoken, mean, got {', '.join(kinds) or 'none'}; "
            "no other is supported"
        )
    if found == "mean" and values.get("include_prompt") is False:
        raise CheckpointError(
            f"{path}: include_prompt must be true, as prompts are part of the text here, got false"
        )
    return found


def _named_modes(values: dict[str, Any]) -> list[str]:
    mode = values.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [] if mode is None else [mode]
    return [str(item) for item in modes]
