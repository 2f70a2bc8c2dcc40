"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it.

Knows the layouts of transformers 4 and 5; refuses vocabularies that are not in tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from jaxprefill.errors import CheckpointError
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.json_file import read_object_if_there, token_ids

_TEMPLATE_FILE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of a model's folder.

    Generation ends at the tokenizer's EOS and at those of generation_config.json, or of
    config.json where that names none. Text gets the special tokens that tokenizer.json adds;
    `add_bos_token` of tokenizer_config.json counts where tokenizer.json adds none.

    Args:
        folder: where the files are.
        config: the content of config.json.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    backend = _read_backend(folder)
    settings = read_object_if_there(folder / "tokenizer_config.json")
    named = read_object_if_there(folder / "special_tokens_map.json") | settings
    bos_id = _special_id(backend, named, "bos_token", folder)
    eos_id = _special_id(backend, named, "eos_token", folder)
    if bos_id is None:
        bos_id = next(iter(_config_ids(folder, config, "bos_token_id")), None)
    _add_missing_ends(
        backend,
        bos_id=bos_id if settings.get("add_bos_token") is True else None,
        eos_id=eos_id if settings.get("add_eos_token") is True else None,
    )
    ends = ([] if eos_id is None else [eos_id]) + _config_ids(folder, config, "eos_token_id")
    return Tokenizer(
        backend,
        eos_ids=tuple(dict.fromkeys(ends)),
        bos_id=bos_id,
        chat_template=_chat_templates(folder, settings),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name
            for name in ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json")
            if (folder / name).is_file()
        ]
        found = f"; {', '.join(others)} is not read" if others else ""
        raise CheckpointError(
            f"{folder}: must hold tokenizer.json, which is missing{found}; fetch it, or convert "
            "the tokenizer with transformers' AutoTokenizer and save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(
            f"{path}: must be a tokenizer of the tokenizers library, but {error}; fetch it again"
        ) from error
    # Left over from training of embedding models: prompts must be neither cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_id(
    backend: tokenizers.Tokenizer, named: Mapping[str, Any], key: str, folder: Path
) -> int | None:
    """The id of a named token, which from now on is a special one; None where none is named."""
    value = named.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if token is None:
        return None
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise CheckpointError(
            f"{folder}: {key} must be a token of tokenizer.json, got {value!r:.80}; "
            "the files do not belong together"
        )
    if token_id not in backend.get_added_tokens_decoder():
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    return token_id


def _config_ids(folder: Path, config: Mapping[str, Any], key: str) -> list[int]:
    """Ids of generation_config.json, or of config.json where that names none."""
    path = folder / "generation_config.json"
    found = token_ids(read_object_if_there(path), key, path)
    return found or token_ids(config, key, folder / "config.json")


def _add_missing_ends(
    backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_id: int | None
) -> None:
    """Makes the pipeline add BOS and EOS, unless it does already."""
    added = backend.encode("").ids
    if {bos_id, eos_id} <= {None, *added}:
        return
    pieces, special = ["$A"], list[dict[str, Any]]()
    for token_id in dict.fromkeys([*added, bos_id, eos_id]):
        if token_id is not None:
            name = f"T{token_id}"  # local to the template: a token's own text could break it
            pieces = [*pieces, name] if token_id == eos_id else [name, *pieces]
            token = backend.id_to_token(token_id)
            special.append({"id": name, "ids": [token_id], "tokens": [token]})
    template = processors.TemplateProcessing(single=pieces, special_tokens=special)
    before = backend.post_processor
    # A template that follows another would see a pair of texts, so it takes the other's place.
    backend.post_processor = (
        template if before is None or added else processors.Sequence([before, template])
    )


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template files if there are any, else the one or the named ones of the settings."""
    files = {path.stem: path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE_FILE).is_file():
        files["default"] = folder / _TEMPLATE_FILE
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(_is_named_template(item) for item in value):
        return {item["name"]: item["template"] for item in value}
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of "
        f'{{"name": ..., "template": ...}}, got {value!r:.80}'
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _is_named_template(item: Any) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item.get(key), str) for key in ("name", "template")
    )
