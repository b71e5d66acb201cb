"""Read PTX text: its kernels, their parameters, shared memory, registers, labels and instructions."""

import functools
import re
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptx_model.faults import Fault

SIZE = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}
LOCAL_START = 16  # the first address in local memory: none is 0
PARAMETER_SPACE = 4096  # bytes, the least that the hardware guarantees; larger lists work as well


class Register(NamedTuple):
    """A register. size: bytes; index: its row in the file of that size."""

    size: int
    index: int


class Predicate(NamedTuple):
    index: int
    negated: bool


class Immediate(NamedTuple):
    """A constant. value: an int, or a float where `floating`."""

    value: float
    floating: bool


class Address(NamedTuple):
    """[base + offset], and what stands behind a comma in the brackets, such as the coordinates of a tensor map."""

    base: "Operand"
    offset: int
    more: tuple["Operand", ...] = ()


class Vector(NamedTuple):
    items: tuple["Operand", ...]


class Special(NamedTuple):
    name: str  # "%tid.x"


class Symbol(NamedTuple):
    name: str  # a parameter, a variable in shared memory, or a global
    offset: int = 0


class Label(NamedTuple):
    target: int  # index of an instruction


class Sink(NamedTuple):
    """`_`: no operand."""


Operand = Register | Predicate | Immediate | Address | Vector | Special | Symbol | Label | Sink


@dataclass
class Instruction:
    op: str  # "mbarrier"
    mods: tuple[str, ...]  # ("try_wait", "parity", "shared::cta", "b64")
    operands: tuple[Any, ...]  # of Operand
    predicate: Predicate | None
    line: int  # of the PTX text, from 1
    source: str  # "file.cu:12", or ""
    text: str


@dataclass
class Variable:
    """A variable in shared or global memory. size: bytes, 0 for memory whose size the launch chooses."""

    name: str
    align: int
    size: int
    content: bytes = b""
    unreadable: bool = False  # it begins with what the model cannot place, such as the addresses of functions


@dataclass
class Kernel:
    """One .entry. parameters: name -> (offset, bytes) in the parameter memory of `parameter_bytes` bytes."""

    name: str
    parameters: dict[str, tuple[int, int]]
    parameter_bytes: int
    shared: list[Variable]
    globals: dict[str, Variable]
    code: list[Instruction] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0, 4: 0, 8: 0, 16: 0})  # bytes -> how many
    predicates: int = 0
    local: dict[str, int] = field(default_factory=dict)  # variables in a thread's own memory -> byte offset
    passed: set[str] = field(default_factory=set)  # those of them that are parameters of calls
    local_bytes: int = 0
    cluster: tuple[int, int, int] | None = None  # .reqnctapercluster
    threads: int = 0  # .reqntid or .maxntid, 0 without one
    exact_threads: bool = False


@dataclass
class Function:
    """A .func with a body. results, parameters: (name, alignment, bytes) of each; body: where its text begins."""

    results: list[tuple[str, int, int]]
    parameters: list[tuple[str, int, int]]
    body: int


@functools.cache
def functions(text: str) -> dict[str, Function]:
    """The functions of a module that have a body, by name."""
    found = {}
    head = re.compile(r"\.func\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)[^;{]*([;{])")
    for one in head.finditer(text):
        if one[4] == "{":
            found[one[2]] = Function(_formals(one[1] or ""), _formals(one[3]), one.end())
    return found


def _formals(text: str) -> list[tuple[str, int, int]]:
    """-> (name, alignment, bytes) of each parameter of a function. Fault: one of another form."""
    return [_formal(part) for part in filter(None, (p.strip() for p in text.split(",")))]


def _formal(text: str) -> tuple[str, int, int]:
    words = re.fullmatch(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", text)
    if not words:
        raise Fault("not modelled", f"the parameter {text!r} of a function")
    return words[3], int(words[1] or SIZE[words[2]]), SIZE[words[2]] * int(words[4] or 1)


@functools.cache
def kernels(text: str) -> dict[str, "Lazy"]:
    """Return the kernels of `text` by name; `Lazy.kernel` reads one when it is asked for."""
    cleaned = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    starts = list(re.finditer(r"\.entry\s+([\w$]+)\s*(?=\()", cleaned))
    files = {n: name.rpartition("/")[2] for n, name in re.findall(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", cleaned, re.M)}
    return {start[1]: Lazy(cleaned, start.start(), files) for start in starts}


class Lazy:
    """A kernel that is read at its first use: a module may hold a dozen, of ten thousand lines each."""

    def __init__(self, text: str, at: int, files: dict[str, str]) -> None:
        self._text, self._at, self._files = text, at, files

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The kernel. Fault("not modelled"): something in it cannot be read."""
        return _Reader(self._text, self._at, self._files).kernel


class _Reader:
    """Reads the kernel that begins at `at`."""

    def __init__(self, text: str, at: int, files: dict[str, str]) -> None:
        self._files = files
        head: Any = re.compile(r"\.entry\s+([\w$]+)\s*\(").match(text, at)
        close = text.index(")", head.end())
        brace = text.index("{", close)
        parameters, size = _parameters(text[head.end() : close])
        outer = _outside(text)
        shared = [v for space, v in outer if space == "shared"]
        self.kernel = Kernel(
            head[1], parameters, size, shared, {v.name: v for space, v in outer if space in ("global", "const")}
        )
        self._directives(text[close:brace])
        self._scopes: list[dict[str, Register | Predicate | Symbol]] = [{}]
        self._labels: list[dict[str, int]] = [{}]
        self._parents = [-1]
        self._source = ""
        self._calls: list[str] = []  # functions whose bodies are being read, the outermost first
        self._tables: dict[str, list[str]] = {}  # of .branchtargets
        pending: list[tuple[int, str, int, str]] = []
        self._body(text, brace + 1, pending, 0)
        self._operands(pending)

    def _directives(self, text: str) -> None:
        if found := re.search(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text):
            x, y, z = (int(n or 1) for n in found.groups())
            self.kernel.cluster = x, y, z
        if found := re.search(r"\.(req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text):
            self.kernel.exact_threads = found[1] == "req"
            self.kernel.threads = int(found[2]) * int(found[3] or 1) * int(found[4] or 1)

    def _body(self, text: str, at: int, pending: list, scope: int) -> None:
        """First find all scopes, registers and labels, then read the operands, which may name what comes later. A
        function that is called is read in the place of the call.
        """
        statement, line = "", text.count("\n", 0, at) + 1
        first, stack = line, [scope]
        for raw in _lines(text, at):
            left = raw.partition("//")[0].strip()
            if re.match(r"\.loc\s", left) and not statement:
                words = left.split()
                self._source = f"{self._files.get(words[1], words[1])}:{words[2]}"
                left = ""
            while left:
                if not statement:
                    if left[0] == "{":
                        scope = self._scope(stack[-1])
                        stack.append(scope)
                        left = left[1:].lstrip()
                        continue
                    if left[0] == "}":
                        stack.pop()
                        if not stack:
                            return
                        scope = stack[-1]
                        left = left[1:].lstrip()
                        continue
                    if found := re.match(r"([$\w]+)\s*:(?!:)\s*", left):
                        self._labels[scope][found[1]] = len(pending)
                        left = left[found.end() :]
                        if left.startswith(".branchtargets"):
                            names = left.removeprefix(".branchtargets").partition(";")[0]
                            self._tables[found[1]] = [name.strip() for name in names.split(",")]
                        continue
                    first = line
                part, semicolon, rest = left.partition(";")
                statement = f"{statement} {part}".strip()
                left = rest.lstrip()
                if semicolon:
                    if statement.startswith("."):
                        self._declare(statement, scope)
                    elif found := re.match(r"(?:@(!?)([%\w$]+)\s+)?(call\b.*)", statement, re.S):
                        behind = f"$behind{len(pending)}"  # of a call with a predicate
                        if found[2]:
                            guard = f"@{'' if found[1] else '!'}{found[2]} bra {behind}"
                            pending.append((scope, guard, first, self._source))
                        self._call(text, found[3], scope, pending, first)
                        self._labels[scope][behind] = len(pending)
                    elif statement:
                        pending.append((scope, self._returning(statement), first, self._source))
                    statement = ""
            line += 1
        raise Fault("not modelled", f"the body of {self.kernel.name} does not end")

    def _scope(self, parent: int) -> int:
        """A new scope within `parent`; -1: within none."""
        self._scopes.append({})
        self._labels.append({})
        self._parents.append(parent)
        return len(self._scopes) - 1

    def _returning(self, statement: str) -> str:
        """In the body of a function `ret` goes on behind the call."""
        return re.sub(r"(^|\s)ret(\.uni)?$", r"\1bra $return", statement) if self._calls else statement

    def _call(self, text: str, statement: str, scope: int, pending: list, line: int) -> None:
        """Read the body of a function in the place of its call, with registers and labels apart from all others."""
        found = re.fullmatch(_CALL, statement, re.S)
        groups = found.groups() if found else ("", "", "")  # a call by address, or of another form
        results, (name, *_), given = ([w.strip() for w in (part or "").split(",")] for part in groups)
        results, given = list(filter(None, results)), list(filter(None, given))
        known = functions(text).get(name)
        if name == "vprintf" and results:
            pending.append((scope, f"st.param.b32 [{results[0]}], 0", line, self._source))
        elif name == "__assertfail":
            pending.append((scope, "trap", line, self._source))
        elif known is None:
            pending.append((scope, statement, line, self._source))  # an error only where it is executed
        elif name in self._calls:
            raise Fault("not modelled", f"the function {name}, which calls itself, at PTX line {line}")
        else:
            inner, source = self._scope(-1), self._source
            for (formal, *_), actual in zip(known.results + known.parameters, results + given, strict=True):
                self._scopes[inner][formal] = self._find(actual, scope)
            self._calls.append(name)
            self._body(text, known.body, pending, inner)
            self._calls.pop()
            self._labels[inner]["$return"] = len(pending)
            self._source = source

    def _declare(self, statement: str, scope: int) -> None:
        if statement.startswith((".pragma", ".branchtargets", ".callprototype")):
            return
        if statement.startswith(".param"):  # of a call: memory of the thread
            name, align, size = _formal(statement)
            own = f"{name}#{len(self.kernel.local)}"
            self._scopes[scope][name] = Symbol(own)
            self._place(own, align, size)
            self.kernel.passed.add(own)
            return
        if found := re.match(r"\.reg\s*\.(\w+)\s+(.*)$", statement, re.S):
            for name in found[2].split(","):
                many = re.match(r"\s*([%\w$]+)<(\d+)>\s*$", name)
                names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
                self._scopes[scope].update((one, self._register(found[1])) for one in names)
            return
        if statement.startswith(".shared"):
            variable = _variable(statement, "shared")
            if variable not in self.kernel.shared:  # a function may be called twice
                self.kernel.shared.append(variable)
            return
        if statement.startswith(".local"):
            variable = _variable(statement, "local")
            own = f"{variable.name}#{len(self.kernel.local)}"  # a function's is another in every place of a call
            self._scopes[scope][variable.name] = Symbol(own)
            self._place(own, variable.align, variable.size)
            return
        raise Fault("not modelled", f"{statement.split()[0]} in {self.kernel.name}: {statement[:80]}")

    def _place(self, name: str, align: int, size: int) -> None:
        """Give a variable its place in the thread's memory."""
        at = -(-max(self.kernel.local_bytes, LOCAL_START) // align) * align
        self.kernel.local[name] = at
        self.kernel.local_bytes = at + size

    def _register(self, kind: str) -> Register | Predicate:
        kernel = self.kernel
        if kind == "pred":
            kernel.predicates += 1
            return Predicate(kernel.predicates - 1, False)
        size = SIZE[kind]
        kernel.registers[size] += 1
        return Register(size, kernel.registers[size] - 1)

    def _operands(self, pending: list[tuple[int, str, int, str]]) -> None:
        for scope, statement, line, source in pending:
            text, predicate = statement, None
            if found := re.match(r"@(!?)([%\w$]+)\s+(.*)$", statement, re.S):
                guard = self._find(found[2], scope)
                predicate, text = Predicate(guard.index, bool(found[1])), found[3]
            word, _, rest = text.partition(" ")
            word, tab, more = word.partition("\t")
            rest = (more + " " + rest) if tab else rest
            op, *mods = re.sub(r"::", "\0", word).split(".")
            operands = () if op == "call" else tuple(self._operand(one, scope) for one in _split(rest))
            self.kernel.code.append(
                Instruction(
                    op,
                    tuple(m.replace("\0", "::") for m in mods),
                    operands,
                    predicate,
                    line,
                    source,
                    " ".join(statement.split()),
                )
            )

    def _find(self, name: str, scope: int) -> Any:
        while scope >= 0:
            if name in self._scopes[scope]:
                return self._scopes[scope][name]
            scope = self._parents[scope]
        return None

    def _operand(self, text: str, scope: int) -> Operand:
        if text[0] == "[":
            inner = _split(text[1:-1])
            base, offset = self._based(inner[0], scope)
            return Address(base, offset, tuple(self._operand(one, scope) for one in inner[1:]))
        if text[0] == "{":
            return Vector(tuple(self._operand(one, scope) for one in _split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(self._operand(one.strip(), scope) for one in text.split("|")))
        if text == "_":
            return Sink()
        if text[0] == "!":
            return Predicate(self._find(text[1:], scope).index, True)
        if found := self._find(text, scope):
            return found
        if (number := _number(text)) is not None:
            return number
        if text[0] == "%":
            return Special(text)
        if text in self._tables:
            return Vector(tuple(self._operand(one, scope) for one in self._tables[text]))
        label = scope
        while label >= 0:
            if text in self._labels[label]:
                return Label(self._labels[label][text])
            label = self._parents[label]
        base, offset = self._based(text, scope) if "+" in text else (Symbol(text), 0)
        return Symbol(base.name, offset) if isinstance(base, Symbol) else Address(base, offset)

    def _based(self, text: str, scope: int) -> tuple[Operand, int]:
        base, plus, offset = text.rpartition("+")
        if not plus:
            return self._operand(text.strip(), scope), 0
        return self._operand(base.strip(), scope), int(offset.strip(), 0)


_CALL = r"call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?"


def _lines(text: str, at: int):
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        if letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _number(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(struct.unpack(">f", bytes.fromhex(text[2:]))[0], True)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(struct.unpack(">d", bytes.fromhex(text[2:]))[0], True)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0), False)
    if re.fullmatch(r"-?\d+\.\d+", text):
        return Immediate(float(text), True)
    return None


def _parameters(text: str) -> tuple[dict[str, tuple[int, int]], int]:
    found, at = {}, 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        words = re.search(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b.*?\s)?([\w$]+)(?:\[(\d+)\])?$", part, re.S
        )
        if not words:
            raise Fault("not modelled", f"the parameter {part!r}")
        size = SIZE[words[2]] * int(words[4] or 1)
        align = int(words[1] or SIZE[words[2]])
        at = -(-at // align) * align
        found[words[3]] = (at, size)
        at += size
    return found, at


_VARIABLE = r"\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*(.*))?$"


def _variable(statement: str, space: str) -> Variable:
    found = re.search(rf"\.{space}\s+{_VARIABLE}", statement, re.S)
    if not found:
        raise Fault("not modelled", f"the variable {statement[:80]!r}")
    unit = SIZE[found[2]]
    count = 1 if found[4] is None else int(found[4] or 0)
    content = b""
    if found[5] and re.search(r"[A-Za-z_$]", re.sub(r"0[xX][0-9a-fA-F]+", "", found[5])):
        # Addresses of functions or variables: an error only where a kernel uses the variable.
        return Variable(found[3], int(found[1]), unit * count, unreadable=True)
    if found[5]:
        numbers = re.findall(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", found[5].strip(" {}"))
        content = b"".join((int(n, 0) % 2 ** (8 * unit)).to_bytes(unit, "little") for n in numbers)
    return Variable(found[3], int(found[1]), unit * count, content)


@functools.cache
def variables(text: str) -> dict[str, Variable]:
    """A module's variables in global memory, by name."""
    return {v.name: v for space, v in _outside(re.sub(r"/\*.*?\*/", "", text, flags=re.S)) if space != "shared"}


@functools.cache
def _outside(text: str) -> tuple[tuple[str, Variable], ...]:
    """The variables that stand outside of all functions, each with its space."""
    found = []
    for statement in re.finditer(
        r"^\s*(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const)\s+[^;{]*(?:\{[^}]*\})?\s*;", text, re.M
    ):
        before = text[: statement.start()]
        if before.count("{") == before.count("}"):
            found.append((statement[1], _variable(statement[0].strip().rstrip(";"), statement[1])))
    return tuple(found)
