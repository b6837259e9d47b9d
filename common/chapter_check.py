"""The rules that keep the chapters honest copies. `check(root)` returns one Problem per violation.

A file identical to the parent's is not examined again: its fault belongs to the earliest chapter that has it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from common.chapter_source import functions, imports, parse, public_names, span
from common.chapter_tree import Chapter, ChapterError, FileChange, Problem, changes, folders, lines, load, walk
from common.chapter_words import find_words

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_MODIFIED_FILES = 6
MAX_REMOVED_PERCENT = 15
MOVED_PERCENT = 60
CHAPTER_MODULE = re.compile(r"ch\d\d_\w+(\.|$)")
HEADINGS = {
    "README.md": (
        "The bottleneck",
        "What changes",
        "Objects and interfaces",
        "Measurement",
        "What it makes worse",
        "Limits",
        "Reading the diff",
        "Run it",
    ),
    "README.zh.md": ("瓶颈", "改变了什么", "对象与接口", "度量", "代价", "局限", "阅读顺序", "运行"),
}


def check(root: Path) -> list[Problem]:
    """All violations of all rules under a root, chapter by chapter, then those of common/."""
    problems: list[Problem] = []
    chapters: dict[str, Chapter] = {}
    linked: set[str] = set()
    for folder in folders(root):
        links = list(_symlinks(folder))
        problems += links
        linked |= {folder.name} if links else set()
        try:
            if (folder / "chapter.toml").exists():
                chapters[folder.name] = load(folder)
            elif any(file.suffix == ".py" for file in walk(folder)):
                problems.append(Problem(folder.name, "has no chapter.toml", "write one or delete the folder"))
        except ChapterError as error:
            problems.append(error.args[0])
    for chapter in chapters.values():
        # Symlinks can point anywhere: nothing is compared through them.
        if not linked & {chapter.name, chapter.parent}:
            problems += _check_chapter(root, chapter, chapters)
    return problems + list(_check_common(root))


def _check_chapter(root: Path, chapter: Chapter, chapters: dict[str, Chapter]) -> Iterator[Problem]:
    yield from _check_readmes(chapter)
    family = list(_check_parent(chapter, chapters))
    yield from family
    if family:
        return
    parent = chapters.get(chapter.parent)
    found = changes(parent, chapter)
    yield from _check_lists(chapter, found)
    if parent:
        yield from _check_undeclared(chapter, found)
        yield from _check_shape(chapter, found)
        yield from _check_growth(chapter, found)
        yield from _check_moves(chapter, found)
    yield from _check_budget(chapter, found)
    local = _first_party(root) | {Path(file).stem for file in chapter.files if file.endswith(".py")}
    for change in found:
        if change.path.endswith(".py") and change.kind != "removed":
            yield from _check_source(f"{chapter.name}/{change.path}", change, local)


def _symlinks(folder: Path) -> Iterator[Problem]:
    for path in [folder] if folder.is_symlink() else walk(folder):
        if path.is_symlink():
            where = path.relative_to(folder.parent).as_posix()
            yield Problem(where, "is a symlink", "put a real copy in its place (forward keeps copies equal)")


def _check_parent(chapter: Chapter, chapters: dict[str, Chapter]) -> Iterator[Problem]:
    where, todo = f"{chapter.name}/chapter.toml", "name the folder it was copied from"
    for other in chapters.values():
        if other.number == chapter.number and other.name < chapter.name:
            yield Problem(chapter.name, f"has the number of {other.name}", "give it one of its own")
    if not chapter.parent and any(other.number < chapter.number for other in chapters.values()):
        yield Problem(where, "names no parent, which only the first chapter may", todo)
    elif chapter.parent and (chapter.parent not in chapters or chapters[chapter.parent].number >= chapter.number):
        yield Problem(where, f"its parent {chapter.parent!r} is no earlier chapter that can be read", todo)


def _check_readmes(chapter: Chapter) -> Iterator[Problem]:
    for file, headings in HEADINGS.items():
        if file not in chapter.files:
            yield Problem(f"{chapter.name}/{file}", "is missing", "write it, with the required headings")
            continue
        present = {line.strip() for line in lines(chapter.text(file))}
        missing = [f"'## {heading}'" for heading in headings if f"## {heading}" not in present]
        if missing:
            yield Problem(f"{chapter.name}/{file}", f"lacks {', '.join(missing)}", "add each as a section")


def _check_lists(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    """What chapter.toml says must have happened."""
    where, delete = f"{chapter.name}/chapter.toml", "delete it from the list"
    actual = {change.path: change.kind for change in found}
    declared = [(kind, file) for kind in ("added", "modified", "removed") for file in getattr(chapter, kind)]
    for file in sorted({file for _, file in declared}):
        if sum(file == other for _, other in declared) > 1:
            yield Problem(where, f"{file} is listed twice", "list it once, under what happened to it")
    for kind, file in declared:
        if file in actual and actual[file] != kind:
            yield Problem(where, f"{file} is listed as {kind} but is {actual[file]}", f"list it under {actual[file]}")
        elif file not in actual:
            state = "equals the parent's" if file in chapter.files else "does not exist"
            yield Problem(where, f"{file} is listed as {kind} but {state}", delete)
    for file in chapter.order:
        if file not in chapter.files and file not in actual:
            yield Problem(where, f"{file} is listed in order but does not exist", delete)


def _check_undeclared(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    """What happened must be said in chapter.toml."""
    declared = {*chapter.added, *chapter.modified, *chapter.removed}
    parent = chapter.parent
    texts = {
        "added": (f"is not in {parent} and not declared", "list it under added, or delete it"),
        "modified": (f"differs from {parent}'s, undeclared", "make it equal, or list it under modified"),
        "removed": (f"is gone though {parent} has it, undeclared", "copy it, or list it under removed"),
    }
    for change in found:
        path = f"{chapter.name}/{change.path}"
        if change.path.endswith(".merge"):
            target = change.path.removesuffix(".merge")
            if change.kind == "added":
                yield Problem(path, "is left over from a conflict", f"put the result into {target} and delete it")
        elif not change.free and change.path not in declared:
            yield Problem(path, *texts[change.kind])


def _check_budget(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    added = sum(change.added for change in found if change.counted)
    if chapter.budget is None:
        yield Problem(f"{chapter.name}/chapter.toml", "no budget is known for its number", "add budget = LINES")
    elif added > chapter.budget:
        what = f"adds {added} lines of Python, its budget is {chapter.budget}"
        yield Problem(chapter.name, what, "make it smaller (or raise budget in chapter.toml and say why)")


def _check_shape(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    added = sum(change.added for change in found if change.counted)
    removed = sum(change.removed for change in found if change.counted)
    if removed * 100 > added * MAX_REMOVED_PERCENT:
        what = f"removes {removed} lines and adds {added}, at most {MAX_REMOVED_PERCENT} % may go"
        yield Problem(chapter.name, what, "give the earlier chapters the shape that this one needs")
    modified = [change.path for change in found if change.kind == "modified" and not change.free]
    if len(modified) > MAX_MODIFIED_FILES:
        what = f"modifies {len(modified)} files, at most {MAX_MODIFIED_FILES} ({', '.join(modified)})"
        yield Problem(chapter.name, what, "mend the seam in the earlier chapters first")


def _check_growth(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    for change in found:
        if change.kind != "modified" or not change.counted:
            continue
        before, after = parse("".join(change.before)), parse("".join(change.after))
        if before and after:
            for name in sorted(public_names(before, change.path) - public_names(after, change.path)):
                what = f"public name {name} of {chapter.parent} is gone"
                yield Problem(f"{chapter.name}/{change.path}", what, "keep it: public names only grow")


def _check_moves(chapter: Chapter, found: list[FileChange]) -> Iterator[Problem]:
    for gone in (change for change in found if change.kind == "removed" and not change.free):
        content = [line.strip() for line in gone.before if line.strip()]
        for added in (change for change in found if change.kind == "added" and not change.free):
            target = {line.strip() for line in added.after}
            if content and sum(line in target for line in content) * 100 >= MOVED_PERCENT * len(content):
                what = f"looks like {chapter.parent}/{gone.path} moved"
                yield Problem(f"{chapter.name}/{added.path}", what, f"leave the code in {gone.path}: files never move")


def _check_source(path: str, change: FileChange, local: set[str]) -> Iterator[Problem]:
    """The rules for one Python file; a free one may speak of chapters."""
    source = "".join(change.after)
    if len(change.after) > MAX_FILE_LINES:
        yield Problem(path, f"has {len(change.after)} lines, at most {MAX_FILE_LINES}", "split it by responsibility")
    tree = parse(source)
    if tree is None:
        yield Problem(path, "is not valid Python", "mend the syntax")
        return
    for node in functions(tree):
        if span(node) > MAX_FUNCTION_LINES:
            what = f"{node.name} has {span(node)} lines, at most {MAX_FUNCTION_LINES}"
            yield Problem(f"{path}:{node.lineno}", what, "split it by responsibility")
    yield from _check_imports(path, tree, local)
    for line, words in [] if change.free else sorted(set(find_words(source, tree))):
        yield Problem(f"{path}:{line}", f"says {words!r}, a lie once copied", "word it without the order of chapters")


def _check_imports(path: str, tree: ast.Module, local: set[str]) -> Iterator[Problem]:
    """`local` holds first-party names; standard modules win over them, as they do in an absolute import."""
    depth = path.count("/")
    for node, module in imports(tree):
        where, top = f"{path}:{node.lineno}", module.split(".")[0]
        if module.startswith("."):
            if len(module) - len(module.lstrip(".")) > depth:
                todo = "import from the chapter itself or from common"
                yield Problem(where, f"imports {module}, beyond its chapter", todo)
        elif CHAPTER_MODULE.match(module) and top != path.split("/")[0]:
            yield Problem(where, f"imports {module}, another chapter", "copy what it needs into its own chapter")
        elif top in local - {"common"} - sys.stdlib_module_names:
            yield Problem(where, f"imports {module} absolutely", "import it relatively (only common is absolute)")


def _first_party(root: Path) -> set[str]:
    """Names importable from the root: its modules and its folders with Python files."""
    return {path.stem for path in root.glob("*.py")} | {path.parent.name for path in root.glob("[!.]*/*.py")}


def _check_common(root: Path) -> Iterator[Problem]:
    """common/ may load a chapter at run time, by a name it was given; it never depends on one."""
    for file in walk(root / "common") if (root / "common").is_dir() else []:
        tree = parse(file.read_text(encoding="utf-8")) if file.suffix == ".py" else None
        if tree is None:
            continue
        late = {id(part) for function in functions(tree) for part in ast.walk(function)}
        for node, module in imports(tree):
            if CHAPTER_MODULE.match(module) and (isinstance(node, ast.stmt) or id(node) not in late):
                where = f"{file.relative_to(root).as_posix()}:{node.lineno}"
                yield Problem(where, f"imports the chapter {module}", "load it inside a function, with importlib")
