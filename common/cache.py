"""The cache folder, and folders in it that are built once.

A built folder is complete or absent: it is filled next to its place and renamed into it, and a manifest with the size
and SHA-256 of every file lets a damaged one be recognised and rebuilt. Processes that start at once build it once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
SMALL_FILE = 64 * 1024  # bytes; files up to this size are hashed at every start, larger ones only measured


class CheckpointError(ValueError):
    """A model that cannot be used. The message is one line and says what to do."""


def cache_dir() -> Path:
    """$MINISGL_CACHE, else $XDG_CACHE_HOME/mini-sglang-chapters, else ~/.cache/mini-sglang-chapters; may not exist yet."""
    own = os.environ.get("MINISGL_CACHE")
    if own:
        return Path(os.path.expanduser(own)).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()).absolute() / "mini-sglang-chapters"


def note(message: str) -> None:
    """One progress line on stderr; stdout belongs to results."""
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(folder: Path, version: int, *, deep: bool = False) -> bool:
    """Whether every file of the folder's manifest is there with its size; small files, or all with deep, by hash too."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["version"] != version:
            return False
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["size"]:
                return False
            if (deep or entry["size"] <= SMALL_FILE) and sha256_of(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def build_once(folder: Path, build: Callable[[Path], object], version: int) -> Path:
    """Return `folder`, building it first unless an intact one of this version is there.

    build(target) fills an empty folder. While one process builds, the others wait for its result. A leftover of an
    interrupted build is removed. Raises CheckpointError when the cache cannot be written, and whatever build raises.
    """
    if is_intact(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_intact(folder, version):
                _rebuild(folder, build, version)
    except OSError as error:
        advice = "set MINISGL_CACHE to a folder with free space that you can write"
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}; {advice}") from error
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The kernel drops the lock with its process, so a crash leaves no lock behind. The lock file itself stays:
    # removing it would let a waiter lock the removed file while a third process locks a fresh one.
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"{folder.name}: waiting for another process that is preparing it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rebuild(folder: Path, build: Callable[[Path], object], version: int) -> None:
    # The lock is held: whatever matches the temporary names belongs to a process that died.
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    target.mkdir()
    try:
        build(target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        entries = {str(p.relative_to(target)): {"size": p.stat().st_size, "sha256": sha256_of(p)} for p in files}
        (target / MANIFEST).write_text(json.dumps({"version": version, "files": entries}, indent=1))
        if folder.exists():
            note(f"{folder.name}: {folder} was incomplete, damaged or outdated and is rebuilt")
            # Moved aside first: a process that has the old files mapped keeps them.
            damaged = folder.parent / f".{folder.name}.tmp-{os.getpid()}-damaged"
            folder.rename(damaged)
            target.rename(folder)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            target.rename(folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)
