"""The architecture of the package: modules import from lower layers only, third-party packages
are imported in few places, a public name exists and means one thing, importing loads little."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from meanfield import _HOMES

PACKAGE = Path(__file__).parents[2] / "meanfield"

HOUSE = runpy.run_path(str(PACKAGE.parent / ".docs" / "house.py"))
LEVEL = {name: level for level, names in enumerate(HOUSE["LAYERS"]) for name in names}
LEVEL["__main__"] = len(HOUSE["LAYERS"])
WING = {name: wing for wing, (_, _, names) in HOUSE["WINGS"].items() for name in names}
WING["__main__"] = "lab"
# What else a wing may import; bookkeeping knows no measure, and core what is below all.
BESIDE = {
    "core": {"bookkeeping"},
    "models": {"core", "bookkeeping"},
    "bookkeeping": set(),
    "lab": {"core", "models", "bookkeeping"},
}
BELOW_ALL = {"errors", "html", "checks", "habits"}

# Which third-party package may be imported where (None: anywhere).
THIRD_PARTY: dict[str, set[str] | None] = {
    "numpy": None,
    "scipy": None,
    "torch": None,
    "xarray": {
        *("results", "sweeps", "figures", "experiments", "cli", "report"),
        *("lipschitz", "dynamics", "pretrained"),
    },
    "ot": {"transport"},
    "geomloss": {"transport"},
    "pykeops": {"transport"},
    "matplotlib": {"figures", "cli", "report", "experiments"},
    "zarr": {"results", "sweeps"},
    "tqdm": {"sweeps", "pretrained"},
    "dask": {"sweeps"},
    "distributed": {"sweeps"},
    "transformers": {"pretrained"},
    "pooch": {"corpora"},
    "safetensors": {"pretrained"},
    "huggingface_hub": {"pretrained"},
}
NO_TORCH = {"results", "figures", "bounds", "errors", "html"}
MOST_PUBLIC = 170


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
    return ".".join(parts)


def unit_of(name: str) -> str:
    """The module or subpackage directly under meanfield."""
    return name.split(".")[1]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def called(path: Path) -> list[tuple[str, ast.Call]]:
    """The calls in a file, with the names of the functions without their modules."""
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func).split(".")[-1], node) for node in nodes]


def calls(path: Path, *functions: str) -> list[ast.Call]:
    """The calls of functions of these names, with or without their module before them."""
    return [node for name, node in called(path) if name in functions]


def imported_by_call(path: Path) -> list[str]:
    """What `import_module` and `__import__` import; of an f-string what stands before the {."""
    found = []
    for call in calls(path, "import_module", "__import__"):
        name = call.args[0]
        parts = name.values if isinstance(name, ast.JoinedStr) else [name]
        assert isinstance(parts[0], ast.Constant), f"{path}: import of a computed name"
        found.append(str(parts[0].value).rstrip("."))
    return found


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, whether only for type checking), wherever in the file."""
    tree = parsed(path)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = [(name, False) for name in imported_by_call(path)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "meanfield":
                homes = [_HOMES.get(a.name, f"meanfield.{a.name}") for a in node.names]
                found += [(home, id(node) in typing_only) for home in homes]
            else:
                found.append((node.module, id(node) in typing_only))
    return found


def test_a_module_imports_only_from_lower_layers_and_from_wings_that_it_may_know():
    units = {name_of(path): unit_of(name_of(path)) for path in modules()}
    assert set(units.values()) == LEVEL.keys() == WING.keys(), "the table is .docs/house.py"
    across = {
        (units[name_of(path)], unit_of(name))
        for path in modules()
        for name, _ in imports(path)
        if name.startswith("meanfield.") and unit_of(name) != units[name_of(path)]
    }
    assert {pair for pair in across if LEVEL[pair[1]] >= LEVEL[pair[0]]} == set()
    for unit, other in across:
        known = BESIDE[WING[unit]] | {WING[unit]}
        assert WING[other] in known or other in BELOW_ALL, f"{unit} imports {other}"


def test_the_wings_that_are_told_are_those_that_are_held():
    told = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (`.*?`) \|", told, re.MULTILINE)
    tables = {wing: set(re.findall(r"`(\w+)`", names)) for wing, names in rows if wing in BESIDE}
    assert tables == {wing: set(names) for wing, (_, _, names) in HOUSE["WINGS"].items()}
    drawn = re.findall('class="unit">(\\w+)<', HOUSE["drawing"]())
    assert drawn == [name for row in reversed(HOUSE["LAYERS"]) for name in row]


def test_subpackages_have_no_import_cycles():
    # Annotations may name what stands above, as those of a base class that its subclasses fill.
    graph = {name_of(p): {n for n, typed in imports(p) if n[:10] == "meanfield." and not typed}
             for p in modules() if p.name != "__init__.py"}  # fmt: skip
    seen: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in seen or name not in graph:
            return
        for other in graph[name]:
            visit(other, (*trail, name))
        seen.add(name)

    for name in graph:
        visit(name, ())


def test_no_two_files_share_a_name():
    names = [path.name for path in modules() if path.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_third_party_packages_come_in_where_they_may():
    foreign = {
        (name_of(path), name.split(".")[0])
        for path in modules()
        for name, typing_only in imports(path)
        if not typing_only
    }
    own = {"meanfield", *sys.stdlib_module_names}
    assert {root for _, root in foreign} - own <= set(THIRD_PARTY)
    for importer, root in foreign:
        unit, allowed = unit_of(importer), THIRD_PARTY.get(root)
        assert allowed is None or unit in allowed, f"{importer} imports {root}"
        assert root != "torch" or unit not in NO_TORCH, f"{importer} imports torch"


def test_distances_are_taken_by_differences():
    """Never by |x|² + |y|² − 2⟨x, y⟩, as `torch.cdist` does beyond 25 points if it is not told."""
    for path in modules():
        for call in calls(path, "cdist"):
            direct = ast.unparse(call.func) == "cdist"  # SciPy's
            told = [ast.unparse(k.value) for k in call.keywords if k.arg == "compute_mode"]
            assert direct or told == ["'donot_use_mm_for_euclid_dist'"], path
        for node in ast.walk(parsed(path)):
            taken = ast.unparse(node.right) if isinstance(node, ast.BinOp) else ""
            expanded = isinstance(getattr(node, "op", None), ast.Sub) and re.match(
                r"2 \* .* @ ", taken
            )
            assert not expanded, f"{path}: {ast.unparse(node)}"


@cache
def public_names() -> dict[str, object]:
    """What stands in the `__all__` of any module, by name."""
    names = [name_of(path) for path in modules() if path.name != "__main__.py"]
    return {
        public: getattr(module, public)
        for module in map(importlib.import_module, ["meanfield", *names])
        for public in getattr(module, "__all__", [])
    }


def test_every_name_in_all_exists_is_shown_on_a_page_and_there_are_few():
    assert len(public_names()) <= MOST_PUBLIC
    root = PACKAGE.parent
    pages = [
        root / "README.md",
        root / "CONTRIBUTING.md",
        *(root / ".docs").rglob("*.md"),
        *(root / "examples").rglob("*.py"),
    ]
    pages += (root / ".docs" / "tutorials").glob("*.py")
    words = {
        word
        for page in pages
        if "_build" not in page.parts and "_generated" not in page.parts
        for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))
    }
    assert public_names().keys() - words == set(), "each is to be shown, or to go"


HEAVY = ("torch", "ot", "matplotlib", "transformers", "scipy", "xarray", "zarr", "geomloss")


def test_linear_algebra_and_transport_load_no_xarray_and_a_module_hides_no_function():
    code = (
        "import sys, types, meanfield.linalg, meanfield.transport\n"
        "assert 'xarray' not in sys.modules, 'xarray is loaded'\n"
        "import meanfield.sweeps\n"
        "from meanfield import sweep\n"
        "assert type(sweep) is types.FunctionType and meanfield.sweep is sweep\n"
        "assert meanfield.sweeps.sweep is sweep\n"
        "names = [getattr(meanfield, n) for n in meanfield.__all__]\n"
        "assert callable(meanfield.SelfAttention)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_and_asking_for_help_loads_nothing_heavy():
    code = f"""if True:
        import sys
        heavy = lambda: [m for m in {HEAVY!r} if m in sys.modules]
        import meanfield
        assert not heavy()
        from meanfield.cli import main
        assert not heavy()
        try:
            main(["--help"])
        except SystemExit:
            assert not heavy()
        main(["list"])
        assert not heavy()
        print("light")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "light"


def test_every_lazy_name_arrives():
    import meanfield

    assert all(getattr(meanfield, name) is not None for name in meanfield.__all__)


def test_an_unknown_name_is_an_attribute_error():
    import meanfield

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = meanfield.nonsense


def loaded(path: Path) -> ModuleType:
    return importlib.import_module(name_of(path))


def open_names() -> dict[str, set[str]]:
    """Name -> the modules that define a function or class of it, for others to import.

    The files of the experiments have the same members on purpose: each is one experiment.
    """
    found: dict[str, set[str]] = {}
    for path in modules():
        if name_of(path).startswith("meanfield.experiments."):
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(name_of(path))
    return found


SAME_NAME = {
    # A constant of all measures on a ball, and the same at one.
    "one_sided": {"meanfield.bounds.sharp", "meanfield.lipschitz.one_sided"},
    # The verb of two seams: each grades what somebody else has found, to an interval.
    "certify": {"meanfield.linalg.evidence", "meanfield.transport.grading"},
    # Inside their packages: evidence of a distance, weighted means and covariances.
    "centred": {"meanfield.attention.input_bounds", "meanfield.transport.certificate"},
}


def test_no_two_names_without_an_underscore_mean_different_things():
    several = {name: where for name, where in open_names().items() if len(where) > 1}
    assert several == SAME_NAME


def test_what_is_public_stands_in_the_list_of_a_package_or_of_a_page():
    pages = (PACKAGE.parent / ".docs" / "reference").glob("*.md")
    listed = re.findall(
        r"^   (meanfield\S*)$", "\n".join(map(Path.read_text, pages)), re.MULTILINE
    )
    public = {name_of(path) for path in modules() if "__all__" in vars(loaded(path))}
    assert {name for name in public if not name.startswith("meanfield.experiments")} <= set(listed)


# Where objects of other packages are looked at, which may or may not have a member. What a map, a
# kernel or an answer of ours can do is a member of its base class, with a default.
FOREIGN = {
    "checks": "arrays of any library, and torch's private state",
    "copies": "arrays of any library",
    "html": "arrays of any library",
    "results.labels": "arrays of any library, torch not imported",
    "sweeps.grid": "arrays of any library, torch not imported",
    "transport.pairs": "arrays of any library",
    "sweeps.executors": "executors of other packages",
    "sweeps.identity": "functions of the user",
    "sweeps.plan": "functions and settings of the user",
    "sweeps.values": "objects of the user",
    "sweeps.workers": "signals differ between systems",
    "cli": "signals differ between systems, notes of errors between versions of Python",
    "pretrained.modules": "configurations of transformers leave fields out",
    "images": "hints in messages, to somebody who passed what is no map",
}


def is_probe(call: ast.Call) -> bool:
    named = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    return ast.unparse(call.func) == "hasattr" or (named and len(call.args) == 3)


def test_nothing_is_asked_whether_it_has_a_member():
    asking = {
        name_of(path).removeprefix("meanfield.")
        for path in modules()
        if any(map(is_probe, calls(path, "hasattr", "getattr")))
    }
    assert asking == set(FOREIGN)  # an exception that is not needed is to go


def own_classes(expression: ast.expr, module: ModuleType) -> list[type]:
    """The classes of this package in the second argument of an `isinstance`."""
    try:
        value = eval(ast.unparse(expression), vars(module))
    except NameError:  # a local name
        return []
    kinds = value if isinstance(value, tuple) else get_args(value) or (value,)
    return [kind for kind in kinds if kind.__module__.startswith("meanfield")]


def test_no_object_is_held_against_a_list_of_our_classes():
    lists = [
        (name_of(path), ast.unparse(question))
        for path in modules()
        for question in calls(path, "isinstance", "issubclass")
        if len(own_classes(question.args[1], loaded(path))) > 1
    ]
    assert lists == []


# Beside `results.atomic`: folders of Zarr, and names of a store's files.
WRITERS = {"results.atomic", "results.files", "results.store"}


def writes(path: Path) -> bool:
    return (
        bool(calls(path, "write_text", "write_bytes", "fdopen", "tofile", "mkstemp"))
        or any({"'w'", "'wb'", "'a'", "'x'"} & modes(one) for one in calls(path, "open"))
        or any(moves(one) for one in calls(path, "rename", "replace", "link"))
    )


def test_files_are_written_whole_by_the_one_writer():
    assert {
        name_of(path).removeprefix("meanfield.") for path in modules() if writes(path)
    } <= WRITERS


def modes(call: ast.Call) -> set[str]:
    return {ast.unparse(value) for value in (*call.args, *(k.value for k in call.keywords))}


def moves(call: ast.Call) -> bool:
    """Whether a file is renamed; texts, dataclasses and Datasets have such methods too."""
    return ast.unparse(call.func).split(".")[0] in ("os", "path", "hidden", "target")


def assigned(path: Path) -> list[str]:
    """The names of the constants of a module, as often as they are assigned."""
    found = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in parsed(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return [target.id for targets in found for target in targets if isinstance(target, ast.Name)]


def test_no_constant_is_given_two_values():
    twice = {
        (path.name, name)
        for path in modules()
        for name in assigned(path)
        if assigned(path).count(name) > 1
    }
    assert not twice


def test_files_stay_readable():
    long = {name_of(p): len(p.read_text().splitlines()) for p in modules()}
    assert {name: n for name, n in long.items() if n > 600} == {}
