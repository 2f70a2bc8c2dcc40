"""What `--model` may name, and a hub that is only asked for ids that are no local path."""

import sys
from types import SimpleNamespace

import pytest

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import write_folder
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint()


class Hub(SimpleNamespace):
    """Stands in for huggingface_hub: serves one folder, or fails, and keeps what was asked."""

    def __init__(self, folder=None, error=None):
        class HfHubHTTPError(Exception):
            """As the library names it."""

        super().__init__(errors=SimpleNamespace(HfHubHTTPError=HfHubHTTPError), asked=[])
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


@pytest.mark.parametrize("error", ["http", OSError("no route"), ValueError("bad id")])
def test_a_hub_that_fails_is_reported(hub, error):
    hub.error = hub.errors.HfHubHTTPError("404") if error == "http" else error
    with pytest.raises(
        CheckpointError, match=r"'owner/tiny' is no local path, and cannot .* check"
    ):
        open_checkpoint("owner/tiny")


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
