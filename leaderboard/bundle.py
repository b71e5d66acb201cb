"""Link a Python file and what it uses of task.py and problems/common into the text of one file.

Only the top-level statements that are reached are taken. A statement is copied as it is, with the comments above it,
unless a name in it must change; then it is printed anew from its syntax tree, without comments. Names keep their
spelling unless two modules use one for different things.
"""

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from leaderboard.scopes import Definition, Scoped, stored
from problems.common import load

COMMON = "problems.common"
FOLDER = "_packed_folder"  # in the bundle: where its sources are written
_OUTSIDE = "(outside)"  # the module of what comes from packages

Name = tuple[str, str]  # module, name in it


class BundleError(ValueError):
    """Something that cannot be linked. The message names file, line and what to change."""


@dataclass(eq=False)
class Statement:
    """A top-level statement. names: that it binds; refs: that it reads, of any module; first: its first line, with the
    comments above it.
    """

    node: ast.stmt
    first: int
    names: list[str]
    refs: list[Name] = field(default_factory=list)


@dataclass(eq=False)
class Module:
    """A file. globals: its top-level names, and what they mean; modules: names of modules of this repository."""

    key: str
    path: Path
    lines: list[str]
    statements: list[Statement] = field(default_factory=list)
    globals: dict[str, Name] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def stem(self) -> str:
        return self.key.rpartition(".")[2]

    def fail(self, node: ast.AST, what: str) -> BundleError:
        return BundleError(f"{self.path.name}:{getattr(node, 'lineno', 1)}: {what}")


class Bundle:
    """The modules that `file` uses. files: modules that are linked, by the name of their import, such as "task"; those
    of problems/common always are.
    """

    def __init__(self, file: Path, files: dict[str, Path]) -> None:
        self.files = files
        self.modules: dict[str, Module] = {}
        self.imports: dict[str, set[str]] = {}  # statements by the name that they bind and what it means
        self.main = self._load(file.stem, file)

    def text(self, roots: Iterable[Name] = (), whole: bool = True) -> str:
        """Everything that the file's statements (all of them with `whole`) and `roots` reach, in an order that runs."""
        wanted = [(self.main.key, name) for s in self.main.statements for name in s.names] if whole else []
        reached = self._reached([*wanted, *roots])
        linked = self._linked()
        parts: list[tuple[ast.stmt, str]] = []
        for module in self.modules.values():  # in the order in which their loading ended: what is used comes first
            for statement in module.statements:
                own = module is self.main and whole
                if own or statement in reached or (not statement.names and self._is_reached(module, reached)):
                    parts.append((statement.node, self._printed(module, statement, linked)))
        return joined(parts)

    def import_lines(self, roots: Iterable[Name] = (), whole: bool = True) -> list[str]:
        """The imports of packages that the text needs."""
        wanted = [(self.main.key, name) for s in self.main.statements for name in s.names] if whole else []
        return self._import_lines(self._reached([*wanted, *roots]), self._linked(), whole)

    def uses(self, key: str) -> bool:
        return key in self.modules

    def linked(self, module: str, name: str) -> str:
        """How the bundle spells a name of a module. KeyError: the module has no such name."""
        return self._linked()[self.modules[module].globals[name]]

    def _is_reached(self, module: Module, reached: set[Statement]) -> bool:
        return any(statement in reached for statement in module.statements)

    # ------------------------------------------------------------ reading

    def _load(self, key: str, path: Path) -> Module:
        module = Module(key, path, load.text(path).splitlines())
        tree = load.parse(path)
        end = 0
        for node in tree.body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            while first - 1 > end and module.lines[first - 2].startswith("#"):
                first -= 1
            end = node.end_lineno or first
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(module, node)
            elif not (_is_docstring(node) or _is_main(node)):
                module.statements.append(Statement(node, first, sorted(stored([node]))))
        for statement in module.statements:
            for name in statement.names:
                module.globals[name] = (key, name)
        self.modules[key] = module
        for statement in module.statements:
            finder = _Names(self, module)
            finder.visit(statement.node)
            statement.refs = finder.refs
            module.locals |= finder.locals
        return module

    def module_of(self, name: str) -> str | None:
        """The key of the module of ours that an import names; None: of a package."""
        if name in self.files:
            return self._see(name, self.files[name])
        parts = name.split(".")
        if name.startswith(f"{COMMON}.") and len(parts) == 3:
            return self._see(name, load.PROBLEMS / "common" / f"{parts[2]}.py")
        return None

    def _see(self, key: str, path: Path) -> str:
        if key not in self.modules:
            if not path.is_file():
                raise BundleError(f"{key} is imported, but there is no {path}")
            self._load(key, path)
        return key

    def see_outside(self, module: Module, node: ast.Import, alias: ast.alias) -> None:
        """Raise BundleError for the import of a whole module of this repository, at the top level or below."""
        if self.module_of(alias.name) or alias.name.partition(".")[0] == "problems":
            raise module.fail(node, f"import {alias.name}: write `from ... import ...`, which can be linked")

    def _import(self, module: Module, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                self.see_outside(module, node, alias)
                name = alias.asname or alias.name.partition(".")[0]
                means = alias.name if alias.asname else name
                self._outside(module, name, f"import {means}", f"import {alias.name}")
            elif node.level:
                raise module.fail(node, "a relative import cannot be linked")
            elif whole := self.module_of(f"{node.module}.{alias.name}"):
                module.modules[name] = whole
            elif key := self.module_of(node.module or ""):
                if alias.name not in self.modules[key].globals:
                    raise module.fail(node, f"{node.module} has no {alias.name}")
                module.globals[name] = self.modules[key].globals[alias.name]
            elif (node.module or "").partition(".")[0] == "problems":
                raise module.fail(node, f"{node.module} cannot be linked: only task and problems.common can")
            else:
                line = f"from {node.module} import {alias.name}"
                self._outside(module, name, line, line)

    def _outside(self, module: Module, name: str, means: str, line: str) -> None:
        """Note that `name` is bound by an import of a package. means: the same for what is the same object."""
        key = f"{means} as {name}"
        module.globals[name] = (_OUTSIDE, key)
        self.imports.setdefault(key, set()).add(line)

    # ------------------------------------------------------------ linking

    def _reached(self, roots: list[Name]) -> set[Statement]:
        owners: dict[Name, list[Statement]] = {}
        for module in self.modules.values():
            for statement in module.statements:
                for name in statement.names:
                    owners.setdefault((module.key, name), []).append(statement)
        reached: set[Statement] = set()
        todo = list(roots)
        while todo:
            for statement in owners.get(todo.pop(), ()):
                if statement not in reached:
                    reached.add(statement)
                    todo += statement.refs
        return reached

    def _linked(self) -> dict[Name, str]:
        """The spelling of every name in the bundle."""
        found: dict[Name, str] = {}
        names = {one for module in self.modules.values() for one in module.globals.values()}
        everywhere = {name for module in self.modules.values() for name in (*module.globals, *module.locals)}
        for one in sorted(names):
            key, name = one
            plain = name.rpartition(" ")[2] if key == _OUTSIDE else name
            spelled = plain
            if key != self.main.key and self._taken(one, plain):
                stem = "imported" if key == _OUTSIDE else self.modules[key].stem
                spelled = f"{stem}_{plain}"
                while spelled in everywhere or spelled in found.values():
                    spelled += "_"
            found[one] = spelled
        return found

    def _taken(self, one: Name, plain: str) -> bool:
        """Whether the plain name means something else where it would stand."""
        if hasattr(builtins, plain):
            return True
        for module in self.modules.values():
            here = module.globals.get(plain)
            if here is not None and here != one:
                return True
            uses = any(one in statement.refs for statement in module.statements)
            if here is None and uses and plain in module.locals:
                return True
        return False

    def _import_lines(self, reached: set[Statement], linked: dict[Name, str], whole: bool) -> list[str]:
        used = {ref for statement in reached for ref in statement.refs}
        if whole:
            used |= {ref for statement in self.main.statements for ref in statement.refs}
        used |= {
            ref
            for module in self.modules.values()
            if self._is_reached(module, reached)
            for statement in module.statements
            if not statement.names
            for ref in statement.refs
        }
        lines = set()
        for key, name in used:
            if key == _OUTSIDE:
                plain, spelled = name.rpartition(" ")[2], linked[key, name]
                for line in self.imports[name]:
                    last = line.rpartition(" ")[2]
                    same = spelled == (last.partition(".")[0] if line.startswith("import ") else last)
                    if plain != spelled and line.startswith("import ") and "." in last:
                        raise BundleError(f"`{line}` binds {plain}, which means something else too: use `as`")
                    lines.add(line if same else f"{line} as {spelled}")
        return sorted(lines, key=lambda line: (line.startswith("from"), line))

    def _printed(self, module: Module, statement: Statement, linked: dict[Name, str]) -> str:
        rename = _Rename(self, module, linked)
        # A fresh tree: a statement may be printed several times.
        original = "\n".join(module.lines[statement.first - 1 : statement.node.end_lineno])
        node = ast.parse(original).body[0]
        changed = rename.visit(node)
        return ast.unparse(ast.fix_missing_locations(changed)) if rename.changed else original


class _Linked(Scoped):
    """Knows the module that a statement is in, and the modules that can be linked."""

    def __init__(self, bundle: Bundle, module: Module) -> None:
        super().__init__()
        self.bundle, self.module = bundle, module

    def visit_Import(self, node: ast.Import) -> ast.AST:
        """Of an import below the top level."""
        for alias in node.names:
            self.bundle.see_outside(self.module, node, alias)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        """Of an import within a function."""
        if node.level:
            raise self.module.fail(node, "a relative import cannot be linked")
        key = self.bundle.module_of(node.module or "")
        if key is None and (node.module or "").partition(".")[0] != "problems":
            return node
        if key is None:
            raise self.module.fail(node, "move this import to the top of the file, where it can be linked")
        return [self.local_import(alias, key, node) for alias in node.names]

    def local_import(self, alias: ast.alias, key: str, node: ast.ImportFrom) -> ast.stmt:
        raise NotImplementedError


class _Names(_Linked):
    """Collects what a statement reads of modules. refs: in the order of the text."""

    def __init__(self, bundle: Bundle, module: Module) -> None:
        super().__init__(bundle, module)
        self.refs: list[Name] = []

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.is_global(node.id):
            if node.id in self.module.globals:
                self.refs.append(self.module.globals[node.id])
            elif node.id in self.module.modules:
                raise self.module.fail(node, f"{node.id} is used as a value: only {node.id}.NAME can be linked")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        key = _module_named(self, node)
        if key is None:
            return self.generic_visit(node)
        found = self.bundle.modules[key].globals
        if node.attr not in found:
            raise self.module.fail(node, f"{key} has no {node.attr}")
        self.refs.append(found[node.attr])
        return node

    def local_import(self, alias: ast.alias, key: str, node: ast.ImportFrom) -> ast.stmt:
        found = self.bundle.modules[key].globals
        if alias.name not in found:
            raise self.module.fail(node, f"{key} has no {alias.name}")
        self.refs.append(found[alias.name])
        return ast.Pass()


class _Rename(_Linked):
    """Puts the bundle's names into a statement. changed: whether any differs from what was there."""

    def __init__(self, bundle: Bundle, module: Module, linked: dict[Name, str]) -> None:
        super().__init__(bundle, module)
        self.linked, self.changed = linked, False

    def _spelled(self, name: str) -> str:
        return self.linked[self.module.globals[name]]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not self.is_global(node.id):
            return node
        if node.id == "__file__":
            self.changed = True
            place = self.module.path.name if self.module is self.bundle.main else f"common/{self.module.path.name}"
            return ast.parse(f"str({FOLDER} / {place!r})", mode="eval").body
        if node.id in self.module.globals and self._spelled(node.id) != node.id:
            self.changed = True
            node.id = self._spelled(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        key = _module_named(self, node)
        if key is None:
            return self.generic_visit(node)
        self.changed = True
        name = self.linked[self.bundle.modules[key].globals[node.attr]]
        return ast.Name(name, node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """getattr(ctypes.CDLL(...), name) as ctypes.CDLL(...)[name]: a scan of submissions refuses computed names."""
        visited = self.generic_visit(node)
        if (
            isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) == 2
            and isinstance(node.args[0], ast.Call)
            and ast.unparse(node.args[0].func).endswith("CDLL")
        ):
            self.changed = True
            return ast.Subscript(node.args[0], node.args[1], ast.Load())
        return visited

    def visit_Global(self, node: ast.Global) -> ast.AST:
        names = [self._spelled(name) if name in self.module.globals else name for name in node.names]
        self.changed |= names != node.names
        node.names = names
        return node

    def definition(self, node: Definition) -> ast.AST:
        if not self.scopes and node.name in self.module.globals and self._spelled(node.name) != node.name:
            self.changed = True
            node.name = self._spelled(node.name)
        return node

    def local_import(self, alias: ast.alias, key: str, node: ast.ImportFrom) -> ast.stmt:
        self.changed = True
        name = self.linked[self.bundle.modules[key].globals[alias.name]]
        target = alias.asname or alias.name
        if name == target:
            raise self.module.fail(node, f"import {name} at the top of the file, where it can be linked")
        return ast.Assign([ast.Name(target, ast.Store())], ast.Name(name, ast.Load()), lineno=node.lineno)


def joined(parts: list[tuple[ast.stmt, str]]) -> str:
    """The statements below each other, with two empty lines around functions and classes."""
    found, before = "", None
    for node, text in parts:
        large = any(isinstance(one, ast.FunctionDef | ast.ClassDef) for one in (node, before))
        found += ("" if before is None else "\n\n\n" if large else "\n") + text
        before = node
    return found


def _module_named(visitor: _Linked, node: ast.Attribute) -> str | None:
    """The module of ours that `node` takes a name of: "problems.common.build" for build.cuda."""
    value = node.value
    if isinstance(value, ast.Name) and visitor.is_global(value.id) and value.id not in visitor.module.globals:
        return visitor.module.modules.get(value.id)
    return None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
