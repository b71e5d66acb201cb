"""Which names of a top-level statement are its module's, and which are local to a function, class or comprehension."""

import ast
from collections.abc import Iterable, Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Scoped(ast.NodeTransformer):
    """Visits a top-level statement and knows of every name whether it is the module's.

    scopes: the names that are bound in each function, class or comprehension around the present node, and whether it is
    a class. locals: the names of all functions and comprehensions so far.
    """

    def __init__(self) -> None:
        self.scopes: list[tuple[set[str], bool]] = []
        self.locals: set[str] = set()

    def is_global(self, name: str) -> bool:
        """Whether a name here is that of the module, or of Python."""
        inner = len(self.scopes) - 1
        return not any(name in names for i, (names, is_class) in enumerate(self.scopes) if not is_class or i == inner)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._signature(node)
        names = {arg.arg for arg in _arguments(node.args)} | stored(node.body)
        self.locals |= names
        self.scopes.append((names, False))
        node.body = self._body(node.body)
        self.scopes.pop()
        return self.definition(node)

    def _signature(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        node.args.defaults = [self.visit(one) for one in node.args.defaults]
        node.args.kw_defaults = [one and self.visit(one) for one in node.args.kw_defaults]
        for arg in _arguments(node.args):
            arg.annotation = arg.annotation and self.visit(arg.annotation)
        node.returns = node.returns and self.visit(node.returns)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args.defaults = [self.visit(one) for one in node.args.defaults]
        node.args.kw_defaults = [one and self.visit(one) for one in node.args.kw_defaults]
        names = {arg.arg for arg in _arguments(node.args)}
        self.locals |= names
        self.scopes.append((names, False))
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        node.bases = [self.visit(one) for one in node.bases]
        node.keywords = [self.visit(one) for one in node.keywords]
        self.scopes.append((stored(node.body), True))
        node.body = self._body(node.body)
        self.scopes.pop()
        return self.definition(node)

    def _comprehension(self, node: Comprehension) -> ast.AST:
        names = {part.id for one in node.generators for part in ast.walk(one.target) if isinstance(part, ast.Name)}
        self.locals |= names
        self.scopes.append((names, False))
        visited = self.generic_visit(node)
        self.scopes.pop()
        return visited

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node)

    def _body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in body:
            visited = self.visit(node)
            found += visited if isinstance(visited, list) else [visited]
        return found

    def definition(self, node: Definition) -> ast.AST:
        """Return what takes the place of a function or class whose inside was visited."""
        return node


def _arguments(args: ast.arguments) -> list[ast.arg]:
    found = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return [*found, *(one for one in (args.vararg, args.kwarg) if one)]


def stored(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind in their own scope."""
    found: set[str] = set()
    outer: set[str] = set()
    for node in _own(body):
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            outer |= {*node.names}
    return found - outer


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a scope, without what lies in functions, classes and comprehensions within it."""
    for node in body:
        yield node
        if isinstance(node, Definition | ast.Lambda):
            continue
        if isinstance(node, Comprehension):
            # An assignment expression in it binds a name of the scope around it.
            yield from (one.target for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
            continue
        yield from _own(ast.iter_child_nodes(node))
