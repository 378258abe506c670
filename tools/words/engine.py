"""Renames in Python source with libcst: identifiers by kind and scope, text by regular expressions."""

import fnmatch
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst import matchers


@dataclass(frozen=True)
class Attr:
    """An attribute, method, dataclass field or keyword."""

    word: str
    new: str
    receiver: str = ""  # regex on the code of what stands before the dot (search); for keywords on the callee
    files: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = ("attr", "kwarg", "member")  # member: field or method in a class body
    owner: str = ""  # regex on the class's name, for members


@dataclass(frozen=True)
class Local:
    """A variable or parameter of a function (or method), with what is nested in it."""

    word: str
    new: tuple[str, ...]
    files: tuple[str, ...] = ("*",)
    unit: str = ""  # regex on the qualified name (fullmatch)
    params: bool = True


@dataclass
class Tables:
    names: dict[str, str] = field(default_factory=dict)  # exact identifiers, everywhere
    attrs: list[Attr] = field(default_factory=list)
    locals: list[Local] = field(default_factory=list)
    module_names: dict[tuple[str, str], str] = field(default_factory=dict)  # (file, name) -> new
    modules: dict[str, str] = field(default_factory=dict)  # dotted module -> new dotted module
    literals: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)  # exact strings
    prose: object = None  # function (text, file) -> text
    protected: set[str] = field(default_factory=set)  # exact strings that stay


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    hit = False
    for pattern in patterns:
        if pattern.startswith("!"):
            if fnmatch.fnmatch(file, pattern[1:]):
                return False
        elif fnmatch.fnmatch(file, pattern):
            hit = True
    return hit


class _Bound(cst.CSTVisitor):
    """Names used, bound, and parameters, in a node, whatever is nested."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.bound: set[str] = set()
        self.params: set[str] = set()
        self.imported: set[str] = set()
        self._store = 0

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        self.params.add(node.name.value)
        self.bound.add(node.name.value)
        self.used.add(node.name.value)
        for part in (node.annotation, node.default):
            if part is not None:
                part.visit(self)
        return False

    def _targets(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Name):
            self.bound.add(node.value)
        elif isinstance(node, (cst.Tuple, cst.List)):
            for element in node.elements:
                self._targets(element.value)
        elif isinstance(node, cst.StarredElement):
            self._targets(node.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._targets(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._targets(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._targets(node.target)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._targets(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._targets(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._targets(node.target)

    def visit_AsName(self, node: cst.AsName) -> None:
        if isinstance(node.name, cst.Name):
            self.bound.add(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.bound.add(node.name.value)

    def visit_Name(self, node: cst.Name) -> None:
        self.used.add(node.value)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> bool:
        name = node.asname.name if node.asname else node.name
        if isinstance(name, cst.Name):
            self.used.add(name.value)
            self.imported.add(name.value)
        return False


_SEEN: dict[int, tuple[cst.CSTNode, _Bound]] = {}


def names_in(node: cst.CSTNode) -> _Bound:
    """Cached for the node that was asked for last."""
    if id(node) in _SEEN and _SEEN[id(node)][0] is node:
        return _SEEN[id(node)][1]
    _SEEN.clear()
    _SEEN[id(node)] = (node, _names_in(node))
    return _SEEN[id(node)][1]


def _names_in(node: cst.CSTNode) -> _Bound:
    collector = _Bound()
    node.visit(collector)
    return collector


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def is_fixture(node: cst.FunctionDef) -> bool:
    return any("fixture" in code(d.decorator) for d in node.decorators)


class Renamer(cst.CSTTransformer):
    """Applies the tables to one module."""

    def __init__(self, file: str, tables: Tables, log: "Log") -> None:
        self.file, self.tables, self.log = file, tables, log
        self.bounds: list[set[str]] = []
        self.units: list[dict[str, str]] = []  # renames of variables in force; only the outermost function makes one
        self.path: list[tuple[str, str]] = []  # ("class"|"def", name)
        self.globals = {
            name: new for (where, name), new in tables.module_names.items() if fnmatch.fnmatch(file, where) and "*" not in where
        }
        self.defined = {name: new for (where, name), new in tables.module_names.items() if fnmatch.fnmatch(file, where)}
        self.depth = 0
        self.attr_rules: dict[str, list[Attr]] = defaultdict(list)
        for rule in tables.attrs:
            if matches(file, rule.files):
                self.attr_rules[rule.word].append(rule)
        self.local_rules: dict[str, list[Local]] = defaultdict(list)
        for one in tables.locals:
            if matches(file, one.files):
                self.local_rules[one.word].append(one)
        self.decorated: list[dict[str, str]] = []

    # ---- scopes

    def visit_Module(self, node: cst.Module) -> None:
        # classes and functions that are defined here and renamed
        for statement in node.body:
            if isinstance(statement, (cst.ClassDef, cst.FunctionDef)) and statement.name.value in self.defined:
                self.globals[statement.name.value] = self.defined[statement.name.value]
            elif isinstance(statement, cst.SimpleStatementLine):
                for name in _names_in(statement).bound & self.defined.keys():
                    self.globals[name] = self.defined[name]
        # names imported from modules whose globals are renamed
        for small in matchers.findall(node, matchers.ImportFrom()):
            self._imports(small)
        # variables of the module's own level
        renames, used = self._renames(node, "<module>", module_level=True)
        self.globals.update({n: v for n, v in renames.items() if n not in self.globals})

    def _imports(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.ImportFrom) and node.module is not None and not isinstance(node.names, cst.ImportStar):
            module = code(node.module)
            if node.relative:
                module = self.file.rpartition("/")[0].replace("/", ".") + f".{module}"
            for alias in node.names:
                full = f"{module}.{alias.name.value if isinstance(alias.name, cst.Name) else ''}"
                if full in self.tables.modules and alias.asname is None:
                    self.globals[alias.name.value] = self.tables.modules[full].rpartition(".")[2]
            for alias in node.names:
                name = alias.name.value if isinstance(alias.name, cst.Name) else ""
                new = self._imported(module, name)
                if new is not None and alias.asname is None:
                    self.globals[name] = new

    def _imported(self, module: str, name: str) -> str | None:
        """The new name of what is imported from a module; tests import their neighbors by bare name."""
        path = module.replace(".", "/")
        for (where, old), new in self.tables.module_names.items():
            if old == name:
                for candidate in (f"{path}.py", f"{path}/__init__.py", f"tests/{path}.py"):
                    if fnmatch.fnmatch(candidate, where):
                        return new
        return None

    def _renames(self, node: cst.CSTNode, unit: str, *, module_level: bool = False) -> tuple[dict[str, str], set[str]]:
        renames: dict[str, str] = {}
        if module_level:
            found = _Bound()
            for statement in node.body:  # type: ignore[attr-defined]
                if not isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
                    statement.visit(found)
            everything = names_in(node).used
        else:
            found = names_in(node)
            found.bound.discard(node.name.value)  # type: ignore[attr-defined]
            everything = set(found.used)
        taken = {self.tables.names.get(name, name) for name in everything}
        for word in self.local_rules:
            if word not in found.bound or (word in self.tables.names):
                continue
            for rule in self.local_rules[word]:
                if rule.unit and not re.fullmatch(rule.unit, unit):
                    continue
                if word in found.params and not rule.params:
                    break
                if rule.new == ():
                    break
                new = next((name for name in rule.new if name not in taken), None)
                if new is None:
                    self.log.note("no free name", f"{self.file}: {unit}: {word} -> {rule.new}")
                    break
                renames[word] = new
                taken.add(new)
                if word in found.params:
                    self.log.params[unit.split(".")[-2] if unit.endswith("__init__") and "." in unit else unit.rpartition(".")[2]][word] = new
                break
        return renames, taken

    def _enter(self, node: cst.FunctionDef) -> None:
        unit = ".".join([*(name for _, name in self.path), node.name.value])
        if self.units:
            self.units.append(self.units[-1])
            self.bounds.append(self.bounds[-1])
        else:
            renames, _ = self._renames(node, unit)
            self.units.append(renames)
            self.bounds.append(names_in(node).bound - {node.name.value})
        self.path.append(("def", node.name.value))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._enter(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self.path.pop()
        renames = self.units.pop()
        self.bounds.pop()
        name = original_node.name.value
        new = self._defined(name, renames if self.units else {})
        updated_node = self._document(updated_node, renames)
        return updated_node.with_changes(name=cst.Name(new))

    @staticmethod
    def _document(node: cst.FunctionDef, renames: dict[str, str]) -> cst.FunctionDef:
        """The function with its arguments' names in its docstring."""
        body = node.body
        if not renames or not isinstance(body, cst.IndentedBlock) or not body.body:
            return node
        first = body.body[0]
        if not (isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr)):
            return node
        text = first.body[0].value
        if not isinstance(text, cst.SimpleString):
            return node
        value = text.value
        for old, new in renames.items():
            value = re.sub(rf"(?m)^(\s+){old}(?=: )", rf"\1{new}", value)
            value = re.sub(rf"``{old}``", f"``{new}``", value)
        if value == text.value:
            return node
        line = first.with_changes(body=[first.body[0].with_changes(value=text.with_changes(value=value)), *first.body[1:]])
        return node.with_changes(body=body.with_changes(body=[line, *body.body[1:]]))

    def _defined(self, name: str, renames: dict[str, str]) -> str:
        if not self.path and name in self.globals:
            return self.globals[name]
        if name in self.tables.names:
            return self.tables.names[name]
        if self.path and self.path[-1][0] == "class":
            return self._attr(name, "member", "", owner=self.path[-1][1])
        if renames and name in renames:
            return renames[name]
        if not self.path and name in self.globals:
            return self.globals[name]
        if name.startswith("test_"):
            return self.tables.test_name(name)  # type: ignore[attr-defined]
        return name

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.path.append(("class", node.name.value))

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self.path.pop()
        name = original_node.name.value
        new = self.tables.names.get(name, name)
        if not self.path:
            new = self.globals.get(name, new) if new == name else new
        return updated_node.with_changes(name=cst.Name(new))

    # ---- names

    def _attr(self, word: str, kind: str, receiver: str, owner: str = "") -> str:
        if word in self.tables.names:
            return self.tables.names[word]
        for rule in self.attr_rules.get(word, ()):
            if kind not in rule.kinds:
                continue
            if kind == "member":
                if rule.receiver and not rule.owner:
                    continue
                if rule.owner and not re.search(rule.owner, owner):
                    continue
            elif rule.receiver and not re.search(rule.receiver, receiver):
                continue
            if rule.new == "":  # stays
                return word
            return rule.new
        return word

    def _is_class_level(self) -> bool:
        return bool(self.path) and self.path[-1][0] == "class"

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return True

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        word = original_node.attr.value
        receiver = code(original_node.value)
        new = self._attr(word, "attr", receiver)
        # the visitor of names must not have changed the attribute itself
        return updated_node.with_changes(attr=cst.Name(new))

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        if original_node.keyword is None:
            return updated_node
        word = original_node.keyword.value
        callee = self.log.callee.get(id(original_node), "")
        new = self._attr(word, "kwarg", callee)
        if new == word:
            new = self.log.known_params.get(callee.rpartition(".")[2].partition("(")[0], {}).get(word, word)
        return updated_node.with_changes(keyword=cst.Name(new))

    def visit_Call(self, node: cst.Call) -> None:
        callee = code(node.func)
        first = code(node.args[0].value) if node.args and node.args[0].keyword is None else ""
        for arg in node.args:
            text = f"{callee}({first})" if callee.endswith(("replace", "partial", "isinstance")) else callee
            self.log.callee[id(arg)] = text

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        word = original_node.value
        if self.units and word in self.units[-1]:
            new = self.units[-1][word]
        elif self._is_class_level() and not self.units:
            new = self._attr(word, "member", "", owner=self.path[-1][1])
            if new == word:
                new = self.globals.get(word, word)
        elif word in self.globals and not (self.bounds and word in self.bounds[-1]):
            new = self.globals[word]
        else:
            new = self.tables.names.get(word, word)
        return updated_node.with_changes(value=new)

    # ---- text

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self.tables.prose(original_node.value, self.file))  # type: ignore[operator]

    def _string(self, text: str, inner: str) -> str:
        """The new source of a string literal."""
        if inner in self.tables.protected:
            return text
        for old, new, files in self.tables.literals:
            if inner == old and matches(self.file, files):
                self.log.note("literal", f"{self.file}: {old!r} -> {new!r}")
                return text.replace(old, new) if old else text
        if re.search(r"\s", inner) or "`" in inner:
            return self.tables.prose(text, self.file)  # type: ignore[operator]
        return self.tables.word(text, self.file)  # type: ignore[attr-defined]

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        value = original_node.value
        new = self._string(value, str(original_node.raw_value))
        return updated_node.with_changes(value=new) if new != value else updated_node

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        new = self._string(original_node.value, original_node.value)
        return updated_node.with_changes(value=new)

    # ---- imports

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        module = code(original_node.module) if original_node.module is not None else ""
        new_module = self.tables.modules.get(module, module)
        if original_node.relative and module:
            folder = self.file.rpartition("/")[0].replace("callbacks", "fl_lightning/callbacks", 1).replace("/", ".")
            new_module = self.tables.modules.get(f"{folder}.{module}", module).removeprefix(f"{folder}.")
        if new_module == module:
            for old, new in self.tables.modules.items():
                if module.startswith(old + "."):
                    new_module = new + module[len(old):]
        names = original_node.names
        if not isinstance(names, cst.ImportStar):
            changed = []
            for alias in names:
                name = alias.name.value if isinstance(alias.name, cst.Name) else code(alias.name)
                new = self.tables.names.get(name, name)
                absolute = module
                if original_node.relative:
                    absolute = self.file.rpartition("/")[0].replace("/", ".") + (f".{module}" if module else "")
                new = self._imported(absolute, name) or new
                full = f"{module}.{name}"
                if full in self.tables.modules:
                    new = self.tables.modules[full].rpartition(".")[2]
                changed.append(alias.with_changes(name=cst.Name(new)) if new != name else alias)
            updated_node = updated_node.with_changes(names=changed)
        if new_module != module:
            updated_node = updated_node.with_changes(module=cst.parse_expression(new_module))
        return updated_node

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        text = code(original_node)
        new = text
        for old, now in self.tables.modules.items():
            new = re.sub(rf"\b{re.escape(old)}\b", now, new)
        for word in re.findall(r"[A-Za-z_]\w*", new):
            if word in self.tables.names:
                new = re.sub(rf"\b{word}\b", self.tables.names[word], new)
        if new == text:
            return original_node
        return cst.parse_statement(new + "\n").body[0]  # type: ignore[union-attr, return-value]


@dataclass
class Log:
    notes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    params: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    known_params: dict[str, dict[str, str]] = field(default_factory=dict)
    callee: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, text: str) -> None:
        self.notes[kind].append(text)


class Collector(Renamer):
    """Notes which parameters are renamed, and changes nothing."""

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        unit = ".".join([*(name for _, name in self.path), node.name.value])
        self._renames(node, unit)
        return False

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        return original_node

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self.path.pop()
        return original_node

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        return False


def collect(source: str, file: str, tables: Tables, log: Log) -> None:
    cst.parse_module(source).visit(Collector(file, tables, log))


def convert(source: str, file: str, tables: Tables, log: Log) -> str:
    module = cst.parse_module(source)
    log.callee.clear()
    return module.visit(Renamer(file, tables, log)).code
