"""Carry a fix from the earliest chapter that has the fault to the later ones: copied where equal, else merged."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from common.chapter_tree import Chapter, ChapterError, children_of, descendants_of, find


@dataclass
class Forward:
    """The outcome: `log` holds (path, status) in order, `writes` the contents, `later` the chapters to test.

    Statuses: copied, merged, unchanged (it has the edit), removed (the chapter has no such file: the way ends there),
    conflict (so does it there; the file stays as it is and its .merge beside it holds the markers).
    """

    root: Path
    log: list[tuple[str, str]] = field(default_factory=list)
    writes: dict[Path, bytes] = field(default_factory=dict)
    later: list[str] = field(default_factory=list)

    @property
    def conflicts(self) -> list[str]:
        return [path for path, status in self.log if status == "conflict"]

    def content(self, path: Path) -> bytes | None:
        """What the file holds once all writes are done; None if there is no file."""
        return self.writes.get(path, path.read_bytes() if path.is_file() else None)

    def save(self) -> None:
        for path, content in self.writes.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def forward(root: Path, chapters: list[Chapter], paths: list[str], base: Path | None = None) -> Forward:
    """Plan the forwarding of edited files, given as chNN_name/file relative to the root. Nothing is written.

    `base` is the version before the edit; by default that of git's HEAD, none for a file that HEAD lacks. Raises
    ChapterError for a path outside the chapters, a file without an edit, a missing base.
    """
    if base and len(paths) > 1:
        raise ChapterError("--base is the old version of one file; forward the files one by one")
    if base and not base.is_file():
        raise ChapterError(f"{base}: no such file; give the version before the edit")
    result = Forward(root)
    sources = []
    for path in paths:
        folder, _, file = path.removeprefix("./").partition("/")
        chapter = find(chapters, folder)
        if not file or ".." in Path(file).parts or not (chapter.folder / file).is_file():
            raise ChapterError(f"{path}: no such file; give a file of a chapter, as in {chapter.name}/core.py")
        sources.append((chapter, file))
    for chapter, file in sources:
        old = base.read_bytes() if base else _head(root, chapter, file)
        new = result.content(chapter.folder / file) or b""
        if old == new:
            raise ChapterError(
                f"{chapter.name}/{file}: equals its {'base' if base else 'HEAD version'}; edit it first, "
                "or give the version before the edit with --base FILE"
            )
        copies = [result.content(later.folder / file) for later in descendants_of(chapters, chapter)]
        if old is None and any(copy not in (None, new) for copy in copies):
            raise ChapterError(
                f"{chapter.name}/{file}: HEAD lacks it but later chapters have it; "
                "give the version before the edit with --base FILE"
            )
        _carry(result, chapters, chapter, file, old, new)
        result.later += [later.name for later in descendants_of(chapters, chapter) if later.name not in result.later]
    result.later.sort()
    return result


def _carry(
    result: Forward, chapters: list[Chapter], chapter: Chapter, file: str, old: bytes | None, new: bytes
) -> None:
    """Bring the change old → new of a chapter's file to its children, and what becomes of it there to theirs."""
    for child in children_of(chapters, chapter):
        path, name = child.folder / file, f"{child.name}/{file}"
        ours = result.content(path)
        if ours is None and old is not None:
            result.log.append((name, "removed"))
            continue
        if ours == old:
            merged, status = new, "copied"
        elif ours == new:
            merged, status = new, "unchanged"
        else:
            labels = (name, f"{chapter.name}/{file} before", f"{chapter.name}/{file}")
            merged, clean = merge((ours or b"", old or b"", new), labels)
            status = "conflict" if not clean else "unchanged" if merged == ours else "merged"
        result.log.append((name, status))
        if status == "conflict":
            result.writes[path.with_name(f"{path.name}.merge")] = merged
            continue
        before = ours
        if status == "unchanged":
            # Done by hand or by an earlier run: its children may still wait, so the committed version is their base.
            head = _head(result.root, child, file, required=False)
            before = head if head is not None else old if ours == new else ours
        else:
            result.writes[path] = merged
        if before != merged:
            _carry(result, chapters, child, file, before, merged)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise ChapterError("git is needed to carry an edit forward, and is not installed") from None


def merge(contents: tuple[bytes, bytes, bytes], labels: tuple[str, str, str]) -> tuple[bytes, bool]:
    """`git merge-file` of (ours, base, theirs): the merged content, and whether it is free of conflict markers."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        flags = [flag for label in labels for flag in ("-L", label)]
        run = _git("merge-file", "-p", *flags, *map(str, files))
    if not 0 <= run.returncode < 128:
        raise ChapterError(f"{labels[0]}: git cannot merge it ({run.stderr.decode().strip()}); merge it by hand")
    return run.stdout, run.returncode == 0


def _head(root: Path, chapter: Chapter, file: str, required: bool = True) -> bytes | None:
    """The committed version of a chapter's file; None if HEAD has no such file, or if there is no HEAD to ask."""
    if required and _git("-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD").returncode:
        raise ChapterError(f"{root}: no git commit to take the old version from; give it with --base FILE")
    run = _git("-C", str(root), "cat-file", "blob", f"HEAD:./{chapter.name}/{file}")
    return run.stdout if run.returncode == 0 else None
