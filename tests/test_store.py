"""The store's files: what is damaged, strange, foreign or in a race is left out by name."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from jaxprefill.errors import StoreError
from jaxprefill.store import files, manifest
from jaxprefill.store.folder import Store
from jaxprefill.store.manifest import StoredExecutable, StoredFile

FACTS = {"model": "tiny", "jax": "1.0", "flags": ["a", "b"]}
JOB = {"arguments": ["int32[8]"], "donated": [0]}
NOTHING_YET = StoredFile(name="x", sha256="", num_bytes=0)


def entry(name="prefill 8x4x160", **changes) -> StoredExecutable:
    values = dict(name=name, facts=FACTS, job=JOB, read=(0, 2), record={"compile_s": 1.5})
    outputs = [[{"shape": [2], "dtype": "float32"}], {"shape": [], "dtype": "int32"}]
    return StoredExecutable(**(values | dict(outputs=outputs, payload=NOTHING_YET) | changes))


@pytest.fixture
def store(tmp_path) -> Store:
    folder = tmp_path / "store"
    files.make_folder(folder)
    return Store.open(folder)


def only_file(store: Store, ending: str):
    (path,) = store.folder.glob(f"executables/*/*{ending}")
    return path


def test_what_is_written_is_read(store):
    store.write(entry(), b"code", {"hlo": "HloModule x"})
    (found,) = store.entries()
    assert store.find("prefill 8x4x160", FACTS, JOB) == found
    assert (found.shape, found.path, found.read) == ((8, 4, 160), "prefill", (0, 2))
    assert found.outputs == entry().outputs and found.record == {"compile_s": 1.5}
    assert store.payload(found) == b"code" and store.text(found, "hlo") == "HloModule x"
    assert [item.fault for item in store.verify()] == [None]
    with pytest.raises(StoreError, match="without its stablehlo"):
        store.text(found, "stablehlo")


@pytest.mark.parametrize(
    ("name", "facts", "job"),
    [
        ("prefill 16x4x160", FACTS, JOB),
        ("prefill 8x4x160", FACTS | {"jax": "1.1"}, JOB),
        ("prefill 8x4x160", FACTS, JOB | {"donated": []}),
    ],
)
def test_an_entry_of_another_fingerprint_is_not_found(store, name, facts, job):
    store.write(entry(), b"code")
    assert store.find(name, facts, job) is None


def test_an_entry_moved_to_anothers_place_is_refused(store):
    store.write(entry(), b"code")
    store.write(entry(job={}), b"other")
    one, other = sorted(store.folder.glob("executables/*/*.json"))
    os.replace(one, other)
    faults = 0
    for job in (JOB, {}):
        try:
            assert store.find("prefill 8x4x160", FACTS, job) is None
        except StoreError as error:
            assert "another executable" in str(error)
            faults += 1
    assert faults == 1
    assert ["moved or renamed" in str(found.fault) for found in store.verify()] == [True]
    assert store.prune(unused_s=1e6)[0] == 2 and not list(store.entries())


@pytest.mark.parametrize("ending", [".bin", ".gz", ".json"])
@pytest.mark.parametrize("damage", ["bit", "short", "empty", "long", "gone"])
def test_damage_is_found_wherever_it_is(store, ending, damage):
    store.write(entry(), b"code" * 9, {"hlo": "HloModule x"})
    path = only_file(store, ending)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    changed = {"bit": content, "short": content[:9], "empty": b"", "long": path.read_bytes() * 2}
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    if (ending, damage) == (".json", "gone"):
        assert list(store.verify()) == []
        return
    assert [item.fault is None for item in store.verify()] == [False]
    if ending == ".json":
        with pytest.raises(StoreError):
            store.find("prefill 8x4x160", FACTS, JOB)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\x00garbage", "no file of a store"),
        (b"[" * 100_000, "no file of a store"),
        (b"[]", "no file of a store"),
        (json.dumps({"format": 99, "sha256": "", "value": 1}).encode(), "another version"),
        (manifest.seal({"name": "prefill"}), "not those of this version"),
        (manifest.seal([]), "not those of this version"),
        (manifest.dump(entry(read=("0",))), "of another type"),
        (manifest.dump(entry(record={"compile_s": "fast"})), "of another type"),
        (manifest.dump(entry(facts={"versions": []})), "of another type"),
        (manifest.dump(entry(payload=replace(NOTHING_YET, num_bytes=None))), "of another type"),
        (manifest.dump(entry(payload=replace(NOTHING_YET, name="../x"))), "must lie beside it"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_name(content, said):
    with pytest.raises(StoreError, match=said):
        manifest.parse(content)


def test_a_changed_manifest_shows_whatever_was_changed(store):
    store.write(entry(), b"code")
    path = only_file(store, ".json")
    whole = json.loads(path.read_text())
    whole["value"]["read"] = [0, 1]
    path.write_text(json.dumps(whole))
    with pytest.raises(StoreError, match="checksum"):
        store.find("prefill 8x4x160", FACTS, JOB)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, mode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(StoreError, match=r"can be written by .*trust_executables"):
        Store.open(tmp_path / "store")
    Store.open(tmp_path / "store", is_trusted=True)


def test_a_folder_below_one_that_others_can_write_is_not_trusted(tmp_path):
    (tmp_path / "open" / "store").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "store")
    (tmp_path / "open").chmod(0o777)
    for path in ("open/store", "link"):
        with pytest.raises(StoreError, match="open can be written by everybody"):
            Store.open(tmp_path / path)
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    Store.open(tmp_path / "link")


def test_files_that_others_own_or_write_are_not_read(store, monkeypatch):
    store.write(entry(), b"code")
    only_file(store, ".bin").chmod(0o666)
    found = store.find("prefill 8x4x160", FACTS, JOB)
    with pytest.raises(StoreError, match="everybody"):
        store.payload(found)
    assert Store.open(store.folder, is_trusted=True).payload(found) == b"code"
    only_file(store, ".json").parent.chmod(0o777)
    with pytest.raises(StoreError, match="everybody"):
        store.find("prefill 8x4x160", FACTS, JOB)
    user = os.stat(store.folder).st_uid
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    if user != 0:  # root may write anywhere
        with pytest.raises(StoreError, match="belongs to the user"):
            Store.open(store.folder)


def test_owners_other_than_user_and_root_are_strangers(monkeypatch, tmp_path):
    found = os.stat(tmp_path)
    values = list(found)
    values[4] = 12345
    reason = files._who_else_writes(os.stat_result(values), is_parent=False)
    assert reason == "belongs to the user 12345"


def test_links_and_pipes_inside_a_store_are_not_followed(store, tmp_path):
    store.write(entry(), b"code")
    path = only_file(store, ".bin")
    os.replace(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found = store.find("prefill 8x4x160", FACTS, JOB)
    with pytest.raises(StoreError, match="cannot be read"):
        store.payload(found)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="no plain file"):
        store.payload(found)
    os.replace(path.parent, tmp_path / "set")
    path.parent.symlink_to(tmp_path / "set")
    with pytest.raises(StoreError, match="symbolic link"):
        store.find("prefill 8x4x160", FACTS, JOB)


def test_what_is_missing_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="is no folder; `jaxprefill compile"):
        Store.open(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file; `jaxprefill compile"):
        Store.open(tmp_path / "file")


def test_writers_at_once_lose_nothing_and_leave_nothing(store):
    def write(number: int) -> None:
        for shared in range(8):
            store.write(entry(f"prefill {shared}x1x1"), b"%d" % number * 999)
            store.write(entry(f"decode {number}x{shared}x1"), b"own")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list(store.verify())
    assert len(found) == 8 + 4 * 8 and all(item.fault is None for item in found)
    assert not list(store.folder.glob("executables/*/.new-*"))


def test_a_full_disk_leaves_nothing_half_written(store, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(StoreError, match="cannot be written: No space left on device"):
        store.write(entry(), b"code")
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


def test_pruning_takes_what_is_old_damaged_or_left_over(store):
    for name in ("prefill 8x1x1", "prefill 16x1x1", "decode 1x1x1"):
        store.write(entry(name), name.encode(), {"hlo": name})
    old, bad, good = (store.find(item.name, FACTS, JOB) for item in store.entries())
    past = (1e9, 1e9)
    for path in store.folder.glob("executables/*/decode*"):
        os.utime(path, past)
    for path in store.folder.glob("executables/*/prefill_16*.bin"):
        path.write_bytes(b"?")
    leftover = only_file(store, "8x1x1-*.json").parent / ".new-x"
    leftover.write_text("half")
    os.mkfifo(leftover.parent / "pipe-0123456789abcdef.json")
    (leftover.parent / "astray-0123456789abcdef.json").symlink_to("nowhere")
    os.utime(leftover, past)
    assert old.path == "decode"
    num_files, num_bytes = store.prune(unused_s=1e6)
    assert [item.name for item in store.entries()] == [good.name] != [bad.name]
    assert num_files >= 7 and num_bytes > 0 and not leftover.exists()
    assert [found.fault for found in store.verify()] == [None]
    store.touch(good)
    assert store.prune(unused_s=0.0)[0] == 3 and not list(store.folder.glob("executables/*"))


def test_a_writer_that_is_killed_leaves_what_was_there_and_nothing_damaged(store):
    """SIGKILL while it replaces entries with larger ones; what it leaves over goes later."""
    code = (
        "import sys, itertools; from pathlib import Path; from tests.test_store import entry\n"
        "from jaxprefill.store.folder import Store\n"
        "for i in itertools.count():\n"
        "    one, body = entry(f'prefill {i % 5}x1x1'), b'%d' % i * 100_000\n"
        "    Store(Path(sys.argv[1])).write(one, body, {'hlo': 'x' * i})\n"
        "    print(flush=True)\n"
    )
    for _ in range(2):
        command = [sys.executable, "-c", code, str(store.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            for _ in range(9):
                writer.stdout.readline()
            writer.kill()
        assert [item.fault for item in store.verify()] == [None] * 5
    for path in store.folder.glob("executables/*/*"):
        os.utime(path, (1e9, 1e9)) if path.suffix != ".json" else None
    store.prune(unused_s=1e9)
    assert len(list(store.folder.glob("executables/*/*"))) == 3 * 5


def test_pruning_leaves_what_another_process_just_wrote(store, monkeypatch):
    store.write(entry(), b"code")
    path = only_file(store, ".json")
    path.write_text("{")
    judged = Store.found

    def found(self):
        yield from list(judged(self))
        self.write(entry(), b"code")  # by another process, once all was judged

    monkeypatch.setattr(Store, "found", found)
    store.prune(unused_s=1e6, is_verified=False)
    monkeypatch.undo()
    assert [item.fault for item in store.verify()] == [None]


def test_pruning_deletes_nothing_behind_a_link(store, tmp_path):
    files.make_folder(tmp_path / "else" / "where")
    (tmp_path / "else" / "where" / "letter").write_text("dear")
    os.utime(tmp_path / "else" / "where" / "letter", (1e9, 1e9))
    files.make_folder(store.folder / "executables")
    (store.folder / "executables" / "set").symlink_to(tmp_path / "else" / "where")
    assert store.prune(unused_s=0.0) == (0, 0)
    os.replace(store.folder / "executables", tmp_path / "moved")
    (store.folder / "executables").symlink_to(tmp_path / "else")
    assert store.prune(unused_s=0.0) == (0, 0)
    assert (tmp_path / "else" / "where" / "letter").read_text() == "dear"


def test_pruning_deletes_only_what_a_store_may_have_written(store):
    """A user may name any folder; what has other names is somebody else's, however old."""
    store.write(entry(), b"code")
    here = only_file(store, ".json").parent
    strangers = [here / "notes.txt", here.parent / "tool" / "run.bin", here / "a-b.json"]
    files.make_folder(here.parent / "empty")
    for path in strangers:
        files.make_folder(path.parent)
        path.write_text("dear")
    for path in store.folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert store.prune(unused_s=0.0)[0] == 2 and (here.parent / "empty").exists()
    assert {path for path in store.folder.rglob("*") if path.is_file()} == set(strangers)


def test_pruning_takes_notes_of_checks_that_no_start_reads_any_more(store):
    store.write_result("warm_calls", {"jax": "1"}, True)
    store.write_result("warm_calls", {"jax": "2"}, True)
    store.write_result("ladder", {"jax": "1"}, {"buckets": [8]})
    (store.folder / "results" / "ladder" / ".new-x").write_text("half")
    for path in store.folder.glob("results/*/*"):
        os.utime(path, (1e9, 1e9))
    assert store.read_result("warm_calls", {"jax": "2"}) is True  # which notes that it is used
    assert store.prune(unused_s=1e6)[0] == 2
    assert store.results("warm_calls") == [({"jax": "2"}, True)]
    assert store.read_result("ladder", {"jax": "1"}) == {"buckets": [8]}


def test_clocks_that_are_wrong_delete_nothing_that_is_used(store):
    store.write(entry(), b"code")
    for path in store.folder.glob("executables/*/*"):
        os.utime(path, (4e9, 4e9))  # in the future
    assert store.prune(unused_s=1e6) == (0, 0)


def test_small_results_are_kept_by_kind_and_facts(store, caplog):
    store.write_result("ladder", FACTS, {"buckets": [16, 64]})
    assert store.read_result("ladder", FACTS) == {"buckets": [16, 64]}
    assert store.read_result("ladder", FACTS | {"jax": "2"}) is None
    assert store.read_result("check", FACTS) is None
    (path,) = store.folder.glob("results/ladder/*.json")
    path.write_text("{}")
    assert store.read_result("ladder", FACTS) is None and "left out" in caplog.text
