"""What the chapter tool asks of one Python source: its public names, its imports, its definitions."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
IMPORTERS = {"import_module", "__import__", "find_spec", "run_module"}


def parse(source: str) -> ast.Module | None:
    """The tree, or None if the source is not valid Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def toplevel(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module or class body does, those under if, try and with included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from toplevel(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from toplevel(handler.body)


def public_names(tree: ast.Module, file: str) -> set[str]:
    """Module-level classes, functions and constants, methods of public classes, and what an __init__.py imports."""
    names: set[str] = set()
    for node in toplevel(tree.body):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [item.name for item in toplevel(node.body) if isinstance(item, Function)]
            names |= {f"{node.name}.{method}" for method in methods if not method.startswith("_")}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            names |= {name.id for name in stored if isinstance(name.ctx, ast.Store)}
        elif isinstance(node, ast.ImportFrom) and Path(file).name == "__init__.py":
            names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_")}


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """(node, module) of all imports, also those by importlib with a literal; relative ones start with their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = next((part for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)), None)
            if called in IMPORTERS and literal and isinstance(literal.value, str):
                yield node, literal.value


def functions(tree: ast.AST) -> list[Function]:
    """All functions and methods, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def span(node: Function) -> int:
    """Lines of a function from `def` to its last statement, without its docstring: explaining more is no fault."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def definitions(tree: ast.Module) -> dict[str, tuple[Function | ast.ClassDef, str]]:
    """Qualified name -> (node, fingerprint) for classes, their methods and module-level functions, in source order.

    The fingerprint ignores comments and layout; a class's leaves out its methods, which have their own.
    """
    found: dict[str, tuple[Function | ast.ClassDef, str]] = {}

    def add(name: str, node: Function | ast.ClassDef, bare: ast.AST) -> None:
        # A property's setter and an overload share a name: together they are one definition.
        first, earlier = found.get(name, (node, ""))
        found[name] = first, earlier + ast.dump(bare)

    for node in toplevel(tree.body):
        if isinstance(node, Function):
            add(node.name, node, node)
        elif isinstance(node, ast.ClassDef):
            bare = copy.copy(node)
            bare.body = [item for item in node.body if not isinstance(item, Function)]
            add(node.name, node, bare)
            for item in node.body:
                if isinstance(item, Function):
                    add(f"{node.name}.{item.name}", item, item)
    return found


def places(tree: ast.Module) -> dict[str, int]:
    """Name -> first line of everything a text may name: definitions, module constants, fields and attributes of classes."""
    found = {name: node.lineno for name, (node, _) in reversed(definitions(tree).items())}
    for scope, body in [("", tree.body), *((f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef))]:
        for node in toplevel(body):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                for name in _stored(node, ast.Name):
                    found.setdefault(scope + name, node.lineno)
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for part in ast.walk(owner):
            if isinstance(part, ast.Assign | ast.AnnAssign):
                for name in _stored(part, ast.Attribute):
                    found.setdefault(f"{owner.name}.{name}", part.lineno)
    return found


def _stored(node: ast.Assign | ast.AnnAssign, kind: type[ast.Name] | type[ast.Attribute]) -> Iterator[str]:
    """The names, or the attributes of self, that an assignment sets."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and kind is ast.Name:
                yield part.id
            elif isinstance(part, ast.Attribute) and kind is ast.Attribute and ast.unparse(part.value) == "self":
                yield part.attr
