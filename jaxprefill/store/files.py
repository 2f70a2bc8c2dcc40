"""Files of a store: read only where nobody else could have written, written whole or not at all."""

import os
import stat
import tempfile
from pathlib import Path

from jaxprefill.errors import StoreError

try:
    import grp
    import pwd
except ImportError:  # not on Windows, where `check_trusted` refuses
    grp = pwd = None

MAX_MANIFEST_BYTES = 16 << 20


def check_trusted(folder: Path) -> None:
    """Raises StoreError unless only this user (and root) can put files into `folder`.

    Executables are native code: whoever can write them can run code as whoever loads them. The
    folders above count too, as they decide what the path means; symbolic links are resolved, and
    the caller must go on with the resolved path.
    """
    if pwd is None:
        raise StoreError(f"{folder}: who may write here cannot be told on this system")
    found = folder.resolve()
    for place in (found, *found.parents):
        reason = _who_else_writes(place.stat(), is_parent=place != found)
        if reason is not None:
            raise StoreError(
                f"executables are loaded only from a folder that nobody else can change, but "
                f"{place} {reason}; run `chmod go-w` and `chown` on it, choose another folder, or "
                "trust it with trust_executables"
            )


def read_file(path: Path, *, is_trusted: bool, limit: int | None = None) -> bytes:
    """The content of a file of this user's that nobody else may write.

    What is checked is what is read: the file is opened once, and not through a link.

    Args:
        path: in a folder that `check_trusted` let pass, or that is trusted.
        is_trusted: skip the checks of owner and mode.
        limit: most bytes to read.

    Raises:
        StoreError: it cannot be read, or others could have written it.
    """
    try:
        if not is_trusted:
            _check_place(path.parent)
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            reason = None if is_trusted else _who_else_writes(found, is_parent=False)
            if reason is not None:
                raise StoreError(f"{path.name} {reason}")
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path.name} is no plain file")
            if limit is not None and found.st_size > limit:
                raise StoreError(f"{path.name} must be at most {limit} bytes, got {found.st_size}")
            return file.read()
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error


def write_file(path: Path, content: bytes) -> None:
    """Makes the file appear whole, in place of one of that name; readers see old or new.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        make_folder(path.parent)
        scratch = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed before it is renamed)
            dir=path.parent, prefix=".new-", delete=False
        )
        try:
            with scratch:
                scratch.write(content)
                scratch.flush()
                os.fchmod(scratch.fileno(), 0o644)
            Path(scratch.name).replace(path)
        except BaseException:  # raised again: a half-written file is not to stay
            Path(scratch.name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Makes it and the folders above, those that are missing writable by this user alone."""
    missing = [folder, *folder.parents]
    for place in reversed([one for one in missing if not one.exists()]):
        place.mkdir(mode=0o755, exist_ok=True)
        if stat.S_IMODE(place.stat().st_mode) & 0o022:  # an umask that lets the group write
            place.chmod(0o755)


def _check_place(folder: Path) -> None:
    """Raises StoreError unless a folder inside the store is where its path says, and ours alone."""
    if folder.resolve() != folder:
        raise StoreError(f"{folder} lies behind a symbolic link")
    reason = _who_else_writes(folder.stat(), is_parent=False)
    if reason is not None:
        raise StoreError(f"{folder} {reason}")


def _who_else_writes(found: os.stat_result, *, is_parent: bool) -> str | None:
    """Why a file or folder is not this user's alone; None where it is."""
    if found.st_uid not in (os.getuid(), 0):
        return f"belongs to the user {found.st_uid}"
    mode = stat.S_IMODE(found.st_mode)
    is_sticky_parent = is_parent and mode & stat.S_ISVTX  # as /tmp: others' entries stay theirs
    if is_sticky_parent:
        return None
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {mode:o})"
    if mode & stat.S_IWGRP and not (is_parent and _is_own_group(found.st_gid)):
        return f"can be written by its group (mode {mode:o})"
    return None


def _is_own_group(group_id: int) -> bool:
    """Whether a group is this user's private one, as many systems give each user."""
    if pwd is None or grp is None:
        return False
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    is_private = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
    return group.gr_gid == 0 or (is_private and set(group.gr_mem) <= {user.pw_name})
