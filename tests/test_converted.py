"""`jaxprefill convert`: what is written is what is read, or it is refused by name."""

import fcntl
import hashlib
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxprefill.cli.main import main
from jaxprefill.errors import CheckpointError
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.checkpoint import LeafCheckpoint
from jaxprefill.weights.convert import convert
from jaxprefill.weights.load import check_names, check_shapes, load_leaves
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import write_folder
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint(seed=4, is_embedding_tied=False, has_qkv_bias=True)
FLOAT32 = jnp.dtype("float32")


def leaves_of(checkpoint, dtype=FLOAT32) -> dict[str, np.ndarray]:
    tree = model_tree(checkpoint.config, dtype, make_mesh())
    check_names(checkpoint)
    check_shapes(checkpoint, tree)
    found = zip(tree.paths, load_leaves(checkpoint, tree), strict=True)
    return {path: np.asarray(leaf) for path, leaf in found}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    convert(TINY, folder)
    return folder


def test_what_is_written_is_read_bit_for_bit_and_without_pickle(converted, monkeypatch):
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(pickle, "loads", None)
    held = open_checkpoint(str(converted))
    assert isinstance(held, LeafCheckpoint)
    assert (held.name, held.config) == ("tiny", TINY.config)
    assert held.tokenizer.parts() == TINY.tokenizer.parts()
    assert held.names() == TINY.names()
    for name, tensor in TINY.tensors.items():
        assert held.shape(name) == tensor.shape
        np.testing.assert_array_equal(held.read(name), tensor)
    for path, leaf in leaves_of(TINY).items():
        np.testing.assert_array_equal(leaves_of(held)[path], leaf)


def test_half_precision_keeps_its_bits_unless_asked_otherwise(tmp_path):
    source = open_checkpoint(str(write_folder(tmp_path / "hf", TinyCheckpoint(), dtype=np.float16)))
    assert convert(source, tmp_path / "a").dtypes.keys() == {"float32"}
    assert convert(source, tmp_path / "b", dtype="bfloat16").dtypes.keys() == {"bfloat16"}
    exact, rounded = (leaves_of(open_checkpoint(str(tmp_path / name))) for name in "ab")
    for path, leaf in leaves_of(source).items():
        np.testing.assert_array_equal(exact[path], leaf)
        np.testing.assert_array_equal(rounded[path], leaf.astype(ml_dtypes.bfloat16).astype("f4"))
    again = convert(open_checkpoint(str(tmp_path / "b")), tmp_path / "c")
    assert again.dtypes.keys() == {"bfloat16"}


def file_of(folder: Path, kind: str) -> Path:
    data = max((folder / "weights").rglob("d/*"), key=lambda path: path.stat().st_size)
    return {"data": data, "index": folder / "weights" / "_METADATA"}.get(kind, folder / kind)


@pytest.mark.parametrize("kind", ["data", "index", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "edited", "missing", "a broken link"])
def test_a_damaged_file_is_named(converted, tmp_path, kind, damage):
    folder = tmp_path / "copy"
    shutil.copytree(converted, folder)
    path = file_of(folder, kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage in ("missing", "a broken link"):
        path.unlink()
        if damage != "missing":
            path.symlink_to("nowhere")
    else:
        path.write_bytes(data if damage == "edited" else data[:-1])
    with pytest.raises(CheckpointError, match=f"{path.name}.* must .*convert the model again"):
        leaves_of(open_checkpoint(str(folder)))


def test_what_no_conversion_wrote_is_refused(converted, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(converted, folder)
    extra = folder / "weights" / "extra"
    extra.touch()
    with pytest.raises(CheckpointError, match="weights/extra must not be there"):
        open_checkpoint(str(folder))
    extra.unlink()
    (folder / "manifest.json").rename(tmp_path / "held")
    with pytest.raises(CheckpointError, match="must be a checkpoint's manifest"):
        open_checkpoint(str(folder))
    (tmp_path / "held").rename(folder / "manifest.json")
    manifest = json.loads((folder / "manifest.json").read_text())
    for change, words in (
        ({"format": "of tomorrow"}, "format must be .* got 'of tomorrow'"),
        ({"files": {}}, "must not be there and not in the manifest"),
        ({"leaves": 5}, "Expected `object`"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(str(folder))
    held = {**manifest["leaves"], "norms": {"shape": [4, 4], "dtype": "float32"}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"leaves": held}))
    with pytest.raises(CheckpointError, match="wrong shape"):
        leaves_of(open_checkpoint(str(folder)))


def test_a_config_with_choices_that_are_not_known_is_refused(converted, tmp_path):
    folder = tmp_path / "copy"
    convert(TINY, folder)
    text = (folder / "config.json").read_text()
    other = text.replace('"has_qk_norm"', '"has_qq_norm"')  # of the same length
    manifest = (folder / "manifest.json").read_text()
    (folder / "config.json").write_text(other)
    before, after = (hashlib.sha256(one.encode()).hexdigest() for one in (text, other))
    (folder / "manifest.json").write_text(manifest.replace(before, after))
    with pytest.raises(CheckpointError, match="another version of jaxprefill: 'has_qq_norm'"):
        open_checkpoint(str(folder))


def test_the_command_writes_once_and_replaces_only_its_own(tmp_path, capsys):
    source = write_folder(tmp_path / "hf", TinyCheckpoint())
    target = tmp_path / "checkpoints" / "tiny"
    assert main(["convert", str(source), str(target), "--json", "--dtype", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "hf" and told["dtypes"].keys() == {"bfloat16"}
    assert told["num_bytes"] == sum(
        path.stat().st_size
        for path in target.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    assert main(["convert", str(source), str(target)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", str(target), str(target), "--overwrite", "--dtype", "float32"]) == 0
    assert leaves_of(open_checkpoint(str(target)))
    assert main(["convert", str(target), str(source), "--overwrite"]) == 1
    assert "is not replaced" in capsys.readouterr().err
    assert {path.name for path in target.parent.iterdir()} == {"tiny"}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hf", "hf is there and no converted checkpoint.* remove it"),
        ("empty", "empty is there and no converted checkpoint"),
        ("link", "link is there and no converted checkpoint"),
        ("tiny/deep/er", "deep/er must not lie in a converted checkpoint.* name a folder outside"),
        ("n" * 300, "too long.*; choose another place"),
        ("~no such user/x", "home directory.*; choose another place"),
        ("nu\0l", "null byte; choose another place"),
        ("hf/config.json/x", "config.json.* choose another place"),
    ],
)
def test_places_where_nothing_can_be_written_are_told(
    converted, tmp_path, monkeypatch, target, words
):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "hf", TinyCheckpoint())
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(converted)
    (tmp_path / "tiny").symlink_to(converted)
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=words):
            convert(TINY, Path(target), overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert leaves_of(open_checkpoint("tiny"))


@pytest.mark.parametrize("model", ["n" * 300, "~no such user/x"])
def test_a_model_that_is_no_path_at_all_is_told(model):
    with pytest.raises(CheckpointError, match="model must be a name or a path"):
        open_checkpoint(model)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_what_has_eight_bits_is_converted_again_without_loss(converted, tmp_path, dtype):
    source = open_checkpoint(str(converted))
    convert(source, tmp_path / "once", dtype=dtype)
    convert(open_checkpoint(str(tmp_path / "once")), tmp_path / "again")
    once, again = (leaves_of(open_checkpoint(str(tmp_path / name))) for name in ("once", "again"))
    assert once.keys() == again.keys() and dtype in {str(leaf.dtype) for leaf in once.values()}
    for path, leaf in once.items():
        np.testing.assert_array_equal(again[path].view("u1"), leaf.view("u1"))


@pytest.mark.parametrize("stage", ["save", "manifest"])
@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_half_way_leaves_nothing_behind(converted, tmp_path, monkeypatch, stage, end):
    def fail(*_, **__):
        raise end

    shutil.copytree(converted, tmp_path / "tiny")
    if stage == "save":
        monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    else:
        monkeypatch.setattr("jaxprefill.weights.convert.write_manifest", fail)
    words = "No space left on device; free some space|^$"
    with pytest.raises((CheckpointError, KeyboardInterrupt), match=words):
        convert(TINY, tmp_path / "tiny", dtype="bfloat16", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    kept = open_checkpoint(str(tmp_path / "tiny"))
    assert {str(leaf.dtype) for leaf in leaves_of(kept).values()} == {"float32"}


def test_what_killed_conversions_left_goes_with_the_next_and_what_others_write_stays(tmp_path):
    """Locks go with their process; one that is held stands for a conversion that runs."""
    left, busy = (tmp_path / f".convert-{platform.node()}-{name}" for name in ("left", "busy"))
    for folder in (left, busy, tmp_path / ".convert-another machine-x"):
        (folder / "new" / "weights").mkdir(parents=True)
    (left / "old" / "replaced").mkdir(parents=True)  # killed before the new one took its place
    held = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        convert(TINY, tmp_path / "old")
    finally:
        os.close(held)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"old", "replaced", busy.name, ".convert-another machine-x"}
    convert(TINY, tmp_path / "old", dtype="bfloat16", overwrite=True)  # whatever it is called
    assert leaves_of(open_checkpoint(str(tmp_path / "old")))
    assert not busy.exists()


@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_replacement_that_ends_between_its_renames_keeps_the_old(
    converted, tmp_path, monkeypatch, end
):
    shutil.copytree(converted, tmp_path / "tiny")
    replace = Path.replace

    def fail(path, target):
        if path.name == "new":
            raise end
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        convert(TINY, tmp_path / "tiny", dtype="bfloat16", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    kept = open_checkpoint(str(tmp_path / "tiny"))
    assert {str(leaf.dtype) for leaf in leaves_of(kept).values()} == {"float32"}


class Hub(BaseHTTPRequestHandler):
    """A hub of one model, which lies in the server's `folder`; keeps what was asked for."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        folder, commit, path = self.server.folder, "a" * 40, self.path.partition("?")[0]
        self.server.asked.append(path)
        files, status, data = list(folder.iterdir()), 200, b""
        if path == "/api/models/owner/tiny/revision/main":
            named = [{"rfilename": file.name} for file in files]
            data = json.dumps({"id": "owner/tiny", "sha": commit, "siblings": named}).encode()
        elif path.startswith("/api/models/owner/tiny/tree/"):
            sizes = {file.name: file.stat().st_size for file in files}
            kind = {"type": "file", "oid": "b" * 40}
            data = json.dumps([kind | {"path": k, "size": n} for k, n in sizes.items()]).encode()
        elif path.startswith(f"/owner/tiny/resolve/{commit}/"):
            data = (folder / Path(path).name).read_bytes()
        else:
            status = 404
        self.send_response(status)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("huggingface_hub"), reason="needs pip install -e '.[hub]'")
def test_a_hub_id_is_fetched_and_converted_in_one_run(tmp_path):
    folder = write_folder(tmp_path / "hub", TinyCheckpoint())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.asked = folder, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "-m", "jaxprefill", "convert", "owner/tiny", str(tmp_path / "made")],
        env=os.environ | address | {"HF_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    server.shutdown()
    server.server_close()
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert not any(path.endswith(".bin") for path in server.asked)
    made, wanted = (open_checkpoint(str(tmp_path / name)) for name in ("made", "hub"))
    assert made.names() == wanted.names() and made.config == wanted.config
    for name in wanted.names():
        np.testing.assert_array_equal(made.read(name), wanted.read(name))
