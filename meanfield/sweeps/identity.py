"""What identifies a computation: its values by content, its code by what its names reach.

The function and all of its own module that its names reach count by their syntax trees, and by
their values where these can be compared. Where no source is to be had, or a file was edited since
it was imported, bytecode, constants and names stand in. Nothing is pickled.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from meanfield.results.atomic import digest
from meanfield.sweeps.values import NAMED, canonical, name_in_store, to_json

_LONGEST = 200  # characters of a value that a message can still show; beyond them its digest
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WRITERS = {"append", "extend", "add", "update", "setdefault", "pop", "popitem", "clear"}
_KNOWN = "known"  # in place of an owner
_CACHES = (list, dict, set)  # in closures, perhaps
_PLAIN = (str, int, float, complex, bytes, type(None))


@dataclass(frozen=True)
class Identity:
    """What a function is.

    Attributes:
        name: the one it was given, or its module (of a script: its file) and name.
        settings: those that are fixed, as plain data.
        carried: what it computes with besides its arguments and settings, as plain data.
        source: of the names of its module that it reaches, digests of the trees that bind them,
            or of what stands in for these.
    """

    name: str
    settings: dict[str, Any]
    carried: dict[str, Any]
    source: dict[str, str]


def identity_of(
    function: Callable[..., Any], settings: Iterable[tuple[str, Any]], name: str | None
) -> Identity:
    """The identity of a function, method, partial or decorated function, and of its settings.

    Raises:
        TypeError: a setting that cannot be compared; without a `name` also a function that has
            none, or that carries what cannot be compared.
    """
    first: Any = function
    while isinstance(first, (functools.partial, MethodType)):
        first = first.func if isinstance(first, functools.partial) else first.__func__
    seen, own = _Seen(first), name_in_store(function)
    seen.visit(function)
    plain = {setting: seen.plain(setting, value) for setting, value in settings}
    if name is None and "<" in own:
        raise TypeError(
            f"fn: expected a named function, by which the store is recognised, got {function!r}; "
            "define it at the top of a module or give Task(..., name=...)"
        )
    if name is None and seen.unknown:
        names = ", ".join(f"{name} ({kind})" for name, kind in seen.unknown.items())
        raise TypeError(
            f"fn: {own} computes with {names}, and a store cannot tell whether that changed; pass "
            "its data in `fixed`, or say with Task(..., name=...) that it is the same whenever "
            "the name is"
        )
    return Identity(name or own, plain, seen.carried, seen.source)


class _Seen:
    """What is found while a function, and what it reaches in its module, is looked through."""

    def __init__(self, first: Any) -> None:
        module = first.__module__
        self.module, self._texts = module, dict[str, str]()
        self.carried, self.unknown = dict[str, Any](), dict[str, str]()
        self.source = dict[str, str]()
        self._local = dict[str, list[Any]]()  # functions and classes by their place
        self._within: list[Any] = []  # those that are being looked through
        known = module in sys.modules  # else the function was made by `exec`
        self._scope = vars(sys.modules[module]) if known else inspect.unwrap(first).__globals__

    def plain(self, name: str, value: Any) -> Any:
        """A value as plain data, its functions and classes looked through."""
        named: list[Any] = []
        try:
            return canonical(value, name, named)
        except RecursionError:
            raise TypeError(f"{name}: expected data that do not hold themselves") from None
        finally:
            for each in named:
                self.visit(each, f"{name}: ")

    def take(self, name: str, value: Any, *, required: bool = True, warns: bool = False) -> None:
        """Carry a value; one that cannot be compared is unknown if it is required.

        A change of one that `warns` is told as a change of the source is.
        """
        try:
            text = to_json(plain := self.plain(name, value))
        except TypeError:
            if required:
                self.unknown[name] = type(value).__name__
            return
        if warns:
            self.source[name] = digest(text)
        else:
            self.carried[name] = plain if len(text) <= _LONGEST else {"digest": digest(text)}

    def visit(self, value: Any, owner: str = "") -> None:
        """Look through a function or a class; `owner` stands before what it carries."""
        if isinstance(value, functools.partial):
            self.visit(value.func, owner)
            given = {**{str(i): a for i, a in enumerate(value.args)}, **value.keywords}
            for name, argument in given.items():
                self.take(f"{owner}argument {name}", argument)
        elif isinstance(value, MethodType):
            self.visit(value.__func__, owner)
            self.take(f"{owner}self", value.__self__)
        elif not isinstance(value, NAMED):
            self.take(f"{owner}self", value)
        elif value.__module__ == self.module:
            first, *rest = value.__qualname__.split(".")
            at = functools.reduce(lambda x, n: getattr(x, n, None), rest, self._scope.get(first))
            at_top = getattr(at, "__func__", at) is value
            if not at_top and (owner := self._numbered(value, owner)) == _KNOWN:
                return
            self._within.append(value)
            if at_top:
                self.reach(first, _file_of(value))
            else:
                self._visit_local(value, owner)
            # Of a function at the top of its module the source says what the others are.
            if isinstance(inspect.unwrap(value), FunctionType):
                for name, one in inspect.signature(value).parameters.items():
                    if one.default is not one.empty:
                        self.take(f"{owner}default {name}", one.default, required=not at_top)
            self._within.pop()

    def _numbered(self, value: Any, owner: str) -> str:
        """The owner of what is defined inside of a function, numbered if it has others like it.

        Of one that was there before its turn is carried, and nothing else.
        """
        place = f"{owner}{_place_of(value)}"
        came = self._local.setdefault(place, [])
        known = [*self._within, *came]
        came.append(value)
        if any(one is value for one in known):  # it calls itself, or is one of several twice
            first = (next(i for i, one in enumerate(known) if one is each) for each in came)
            self.carried[f"{place}, in turn"] = [*first]
            return _KNOWN
        number = len({id(one) for one in came})
        return f"{owner}{number}: " if number > 1 else owner

    def _visit_local(self, value: Any, owner: str) -> None:
        """Look through what is defined inside of a function: its tree is that at its line."""
        codes, file = _codes(value), _file_of(value)
        nodes = [node for node in ast.walk(self._tree(file)) if _defines(node, value, codes)]
        place = f"{owner}{_place_of(value)}"
        self._note(place, nodes, value, codes, file)
        if len(nodes) > 1 and isinstance(value, FunctionType):  # several on a line
            self.source[place] = digest(self.source[place] + repr([*map(_bytecode, codes)]))
        for name, content in _closed_over(value):
            if isinstance(content, _CACHES):
                self.take(f"{owner}closure {name}", content, warns=True)
            elif name not in _rebound(codes):  # else it counts something
                self.take(f"{owner}closure {name}", content)
        if isinstance(value, type):
            for base in value.__bases__:
                self.visit(base, owner)
            for name, member in vars(value).items():
                functions = _functions(member)
                # Not those that `dataclass` has made.
                if any(f.__code__.co_qualname.startswith(value.__qualname__) for f in functions):
                    self.visit(functions[0], f"{owner}{name}: ")
                elif not functions and not name[0] == name[-1] == "_":
                    self.take(f"{owner}attribute {name}", member, required=False)

    def reach(self, name: str, file: str) -> None:
        """Note what binds a name of the module."""
        value = self._scope.get(name)
        own = isinstance(value, NAMED) and value.__module__ == self.module
        bound = _bound(self._tree(file)).get(name, [])
        if not bound and own:  # in another cell of a notebook
            file = _file_of(value)
            bound = _bound(self._tree(file)).get(name, [])
        if name in self.source or name.startswith("__") or not (bound or name in self._scope):
            return
        codes = [_compile(ast.Module([one], [])) for one in bound]
        self._note(name, bound, value, [*codes, *(_codes(value) if own else [])], file)
        # The same line may make another value: of an argument, of a file, of the turn of a loop.
        if name in _changed_within(self._tree(file)):
            return
        for part in _made_by_lines(value, bound, own):
            with contextlib.suppress(Exception):  # a lock, a generator: the line has to do
                text = to_json(self.plain(name, part))
                self.source[name] = digest(self.source[name] + text)

    def _note(
        self, place: str, nodes: Iterable[ast.AST], value: Any, codes: list[CodeType], file: str
    ) -> None:
        """Note the trees of a place, and reach the names that its codes read."""
        text = "\n".join(map(ast.unparse, nodes)) if self._is_what_runs(value, file) else ""
        self.source[place] = digest(text or repr(_stand_in(value, self.module)))
        for name in sorted(_names_in(codes, _READS)):
            self.reach(name, file)

    def _is_what_runs(self, value: Any, file: str) -> bool:
        """Whether a file has the code of a value: it may have been edited since the import."""
        if not (isinstance(value, NAMED) and value.__module__ == self.module):
            return True
        file = self._scope.get("__file__") or file
        own = {repr(_bytecode(code)) for code in _codes(value) if code.co_filename == file}
        return own <= _compiled(self._text(file))

    def _tree(self, file: str) -> ast.Module:
        """The tree of a file; empty where it cannot be read."""
        return _parsed(self._text(file))

    def _text(self, file: str) -> str:
        file = self._scope.get("__file__") or file
        if file not in self._texts:
            linecache.checkcache(file)
            self._texts[file] = "".join(linecache.getlines(file, self._scope))
        return self._texts[file]


@functools.lru_cache(16)
def _parsed(text: str) -> ast.Module:
    """The tree of a module without docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, _SCOPES) and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [] if node.body[1:] else [ast.Pass()]
    return ast.fix_missing_locations(tree)


def _compile(source: str | ast.Module) -> CodeType:
    """The code of a module or of a cell of a notebook, which may wait at its top."""
    how: Any = {"flags": ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, "dont_inherit": True}
    code: CodeType = compile(source, "", "exec", **how)
    return code


@functools.lru_cache(16)
def _compiled(text: str) -> set[str]:
    """The bytecode of a module and of all that is defined in it."""
    try:
        codes = [_compile(text)]
    except (SyntaxError, ValueError):
        return set()
    for code in codes:  # which grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return {repr(_bytecode(code)) for code in codes}


@functools.lru_cache(16)
def _changed_within(tree: ast.Module) -> set[str]:
    """The names of a module that its functions bind anew or write into: counters, caches."""
    functions = [c for c in _compile(tree).co_consts if isinstance(c, CodeType)]
    read = _instructions(functions, ("LOAD_GLOBAL",))
    places = {(one.positions.lineno, one.positions.col_offset) for one in read if one.positions}
    written = {
        part.value.id
        for part in ast.walk(tree)
        if isinstance(part, (ast.Subscript, ast.Attribute))
        and isinstance(part.value, ast.Name)
        and (part.value.lineno, part.value.col_offset) in places
        and (not isinstance(part.ctx, ast.Load) or getattr(part, "attr", "") in _WRITERS)
    }
    return written | _names_in(functions, ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.lru_cache(16)
def _bound(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Of each name of a module the statements that bind it, or a part of it, in order."""
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, _SCOPES):
            names = {node.name}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {(one.asname or one.name).partition(".")[0] for one in node.names}
        else:
            stored = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)]
            # Of `table["a"].b = 1` that is `table`.
            names = {n.id for one in stored for n in ast.walk(one) if isinstance(n, ast.Name)}
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def _made_by_lines(value: Any, bound: list[ast.stmt], own: bool) -> Iterator[Any]:
    """What the lines that bind a name have made of it, other than what their trees say.

    Of a function or a class of this module that are its defaults, closures and attributes, but for
    literals; and of what no definition or import binds also which function, class or module it is.
    """
    if not isinstance(value, (*NAMED, ModuleType)):
        yield value
        return
    if not all(isinstance(one, (*_SCOPES, ast.Import, ast.ImportFrom)) for one in bound):
        yield value.__name__ if isinstance(value, ModuleType) else name_in_store(value)
        if own and sum(isinstance(n, ast.Lambda) for one in bound for n in ast.walk(one)) > 1:
            yield from map(repr, map(_bytecode, _codes(value)))
    for function in _functions(value) if own else ():
        for name, content in _closed_over(function):
            if name not in _rebound([function.__code__]):
                yield from _lasting(content)
        if not all(map(_is_literal, _defaults(bound))):
            for default in (
                *(function.__defaults__ or ()),
                *(function.__kwdefaults__ or {}).values(),
            ):
                yield from _lasting(default)
    for name in _made_attributes(bound) if own and isinstance(value, type) else ():
        yield from _lasting(vars(value).get(name))


def _lasting(value: Any) -> Iterator[Any]:
    """A value that a run does not change: of functions their names, of caches and objects none."""
    plain = value if isinstance(value, tuple) else (value,)
    if isinstance(value, NAMED):
        yield name_in_store(value)
    elif all(isinstance(one, _PLAIN) for one in plain) or hasattr(value, "dtype"):  # an array
        yield value


def _defaults(bound: list[ast.stmt]) -> list[ast.expr]:
    """The trees of the defaults of functions; of what is no definition one that is no literal."""
    if not all(isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in bound):
        return [ast.Name("")]
    trees = [one.args for one in bound if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [each for args in trees for each in (*args.defaults, *args.kw_defaults) if each]


def _made_attributes(bound: list[ast.stmt]) -> Iterator[str]:
    """The names that classes bind to what is no literal, and no definition."""
    bodies = (one.body for one in bound if isinstance(one, ast.ClassDef))
    for line in (line for body in bodies for line in body):
        if isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value:
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if not _is_literal(line.value):
                yield from (one.id for one in targets if isinstance(one, ast.Name))


def _is_literal(tree: ast.expr) -> bool:
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _defines(node: ast.AST, value: Any, codes: list[CodeType]) -> bool:
    """Whether a node is the definition of a function, by its line, or of a class."""
    if isinstance(value, type):
        return isinstance(node, ast.ClassDef) and node.name == value.__name__
    if not isinstance(node, (*_SCOPES, ast.Lambda)) or not codes:
        return False
    lines = [one.lineno for one in (node, *getattr(node, "decorator_list", ()))]
    named = getattr(node, "name", "<lambda>"), min(lines)
    return named == (codes[0].co_name, codes[0].co_firstlineno)


def _stand_in(value: Any, module: str) -> Any:
    """What tells a value without source: bytecode of the module's own, plain values, names."""
    if isinstance(value, NAMED) and value.__module__ == module:
        held = vars(value) if isinstance(value, type) else {}
        plain = {n: v for n, v in held.items() if isinstance(v, _PLAIN) and n[:2] != "__"}
        return [*map(_bytecode, _codes(value)), plain]
    if isinstance(value, _PLAIN):
        return value
    return value.__name__ if isinstance(value, ModuleType) else name_in_store(value)


def _bytecode(code: CodeType) -> Any:
    # A frozenset is in an order of its own in each process.
    held = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in code.co_consts]
    inner = [_bytecode(each) if isinstance(each, CodeType) else each for each in held]
    return code.co_code, code.co_names, inner


def _functions(value: Any) -> list[FunctionType]:
    """A function and those that it wraps; of a property or a static method its own."""
    value = value.fget if isinstance(value, property) else value
    value = value.func if isinstance(value, functools.cached_property) else value
    functions = []
    while value is not None:
        functions += [value] if isinstance(value, FunctionType) else []
        value = getattr(value, "__wrapped__", None)
    return functions


def _codes(value: Any) -> list[CodeType]:
    """The code of a function and of those that it wraps, or of the methods of a class."""
    parts = vars(value).values() if isinstance(value, type) else (value,)
    return [function.__code__ for part in parts for function in _functions(part)]


def _instructions(codes: Iterable[CodeType], kinds: tuple[str, ...]) -> list[dis.Instruction]:
    """The instructions of some kinds in codes and in those inside of them."""
    codes = list(codes)
    for code in codes:  # which grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return [s for code in codes for s in dis.get_instructions(code) if s.opname in kinds]


def _names_in(codes: Iterable[CodeType], kinds: tuple[str, ...]) -> set[str]:
    """The names that codes, and those inside of them, read or write."""
    return {str(one.argval) for one in _instructions(codes, kinds)}


def _rebound(codes: Iterable[CodeType]) -> set[str]:
    """The names that codes, and those inside of them, bind anew in what is around them."""
    found: set[str] = set()
    for code in codes:
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        own = {str(s.argval) for s in dis.get_instructions(code) if s.opname == "STORE_DEREF"}
        found |= (own | _rebound(inner)) - {*code.co_cellvars}
    return found


def _closed_over(value: Any) -> Iterator[tuple[str, Any]]:
    value = value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else value
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                yield name, cell.cell_contents


def _place_of(value: Any) -> str:
    """Where a function or a class is defined; of a decorated one that is inside the decorator."""
    codes = [] if isinstance(value, type) else _codes(value)
    return next((code.co_qualname for code in codes), value.__qualname__)


def _file_of(value: Any) -> str:
    return next((code.co_filename for code in _codes(value)), "")
