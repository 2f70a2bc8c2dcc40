"""What `--model` may name, and a hub that is only asked for ids that are no local path."""

import sys
from types import SimpleNamespace

import pytest

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import write_folder
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint()


class ClientError(Exception):
    """Of the library's HTTP client."""


class HubErrors:
    """As huggingface_hub.errors names and derives them."""

    class HfHubHTTPError(ClientError, OSError): ...

    class RepositoryNotFoundError(HfHubHTTPError): ...

    class GatedRepoError(RepositoryNotFoundError): ...

    class RevisionNotFoundError(HfHubHTTPError): ...

    class LocalEntryNotFoundError(FileNotFoundError): ...


class Hub(SimpleNamespace):
    """Stands in for huggingface_hub: serves one folder, or fails, and keeps what was asked."""

    def __init__(self, folder=None, error=None):
        super().__init__(asked=[])
        self.folder, self.error = folder, error

    def snapshot_download(self, repository, **options):
        self.asked.append((repository, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", HubErrors)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_hub_id_is_fetched_without_pickles_and_keeps_its_name(hub):
    write_folder(hub.folder, TINY)
    assert open_checkpoint("owner/tiny.v1").name == "owner/tiny.v1"
    [(repository, options)] = hub.asked
    assert (repository, options["revision"]) == ("owner/tiny.v1", None)
    assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}
    open_checkpoint("owner/tiny@v2")
    assert hub.asked[1][0] == "owner/tiny" and hub.asked[1][1]["revision"] == "v2"


def test_a_local_path_of_the_same_name_needs_no_hub(hub, tmp_path):
    write_folder(tmp_path / "owner" / "tiny", TINY)
    assert open_checkpoint("owner/tiny").config == TINY.config
    assert not hub.asked


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (HubErrors.HfHubHTTPError("no\nroute"), "check the name and the network"),
        (OSError("no\nroute"), "check the name and the network"),
        (ValueError("no\nroute"), "check the name and the network"),
        (ClientError("no\nroute"), "check the name and the network"),
        (HubErrors.RepositoryNotFoundError("no\nroute"), "private model needs `hf auth login`"),
        (HubErrors.GatedRepoError("no\nroute"), "ask for access on its page"),
        (HubErrors.RevisionNotFoundError("no\nroute"), "commit that owner/tiny has"),
        (HubErrors.LocalEntryNotFoundError("no\nroute"), "not in the cache either"),
    ],
)
def test_a_hub_that_fails_is_reported_with_a_remedy(hub, error, remedy):
    hub.error = error
    found = r"'owner/tiny@v2' is no local path, and cannot be fetched .*: no route; .*"
    with pytest.raises(CheckpointError, match=found + remedy):
        open_checkpoint("owner/tiny@v2")


def test_the_library_has_the_errors_that_are_told_apart():
    errors = pytest.importorskip("huggingface_hub.errors")
    for name in vars(HubErrors):
        if not name.startswith("_"):
            assert issubclass(getattr(errors, name), OSError), name
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxprefill\[hub\]'"):
        open_checkpoint("owner/tiny")


@pytest.mark.parametrize("model", ["absent", "./owner/tiny", "/no/such", "a/b/c", "x/y.gguf", ""])
def test_what_cannot_be_a_hub_id_is_refused_without_asking(hub, model):
    with pytest.raises(CheckpointError):
        open_checkpoint(model)
    assert not hub.asked


def test_what_could_be_meant_is_said(hub, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"folder with config\.json, a GGUF file, or a hub id"
    ):
        open_checkpoint("absent.gguf")
    (tmp_path / "quants").mkdir()
    (tmp_path / "quants" / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"name one of them, such as 'quants/q4\.gguf'"):
        open_checkpoint("quants")
    write_folder(tmp_path / "m", TINY)
    with pytest.raises(CheckpointError, match=r"name 'm' instead of 'm/model\.safetensors'"):
        open_checkpoint("m/model.safetensors")
