"""The site: its first page runs, everything public is on it, and it builds without a warning."""

from __future__ import annotations

import ast
import doctest
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meanfield
from meanfield.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / ".docs"
SCRIPTS = sorted([*(ROOT / "examples").glob("*.py"), *(DOCS / "tutorials").glob("*.py")])


def listed() -> set[str]:
    """The modules that the reference names; the page of experiments is made from their list."""
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    pages.append(runpy.run_path(str(DOCS / "listing.py"))["page"]())
    return set(re.findall(r"^   (meanfield\S*)$", "\n".join(pages), re.MULTILINE))


@pytest.mark.parametrize("page", ["index.md", "pictures.md"])
def test_the_first_pages_show_what_the_library_returns(page):
    outcome = doctest.testfile(str(DOCS / page), module_relative=False)
    assert outcome.attempted > 0 and outcome.failed == 0


def test_every_public_module_and_experiment_is_in_the_reference():
    parts = (name for name in meanfield.__all__ if name not in meanfield._HOMES)
    modules = {f"meanfield.{name}" for name in parts} | {*meanfield._HOMES.values()}
    experiments = {f"meanfield.experiments.{name.replace('-', '_')}" for name in EXPERIMENTS}
    assert modules | experiments <= listed()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_is_a_page_with_a_title(path):
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    assert len(lines) > 3
    assert set(lines[1]) == {"="} and len(lines[1]) >= len(lines[0])


def build(folder: Path, *settings: str) -> Path:
    """The pages, made from a copy: Sphinx writes beside its sources."""
    for name in ("sphinx", "furo", "myst_parser", "sphinx_gallery", "sphinxcontrib.bibtex"):
        pytest.importorskip(name)
    built = shutil.ignore_patterns("_build", "_generated", "__pycache__")
    for part in (".docs", "examples", "data"):
        shutil.copytree(ROOT / part, folder / part, ignore=built)
    for page in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / page, folder)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *settings]
    command += [str(folder / ".docs"), str(folder / "pages")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "pages"


def test_every_name_that_a_script_takes_from_the_package_is_there():
    missing = []
    for path in (*(ROOT / "examples").glob("*.py"), *(DOCS / "tutorials").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meanfield"):
                line = f"from {node.module} import {', '.join(one.name for one in node.names)}"
                try:
                    exec(line, {})
                except ImportError as error:
                    missing.append(f"{path.name}: {error}")
    assert not missing


def test_examples_share_no_store_where_they_share_a_folder():
    named = [
        name
        for path in (ROOT / "examples").glob("*.py")
        for name in set(re.findall(r'"([\w-]+\.sweep)"', path.read_text(encoding="utf-8")))
    ]
    assert len(named) > 3 and len(set(named)) == len(named)


def test_the_pages_are_read_without_a_warning(tmp_path):
    """Links, citations and docstrings; nothing is run and nothing drawn."""
    build(tmp_path, "-b", "dummy", "-D", "plot_gallery=0")


@pytest.mark.slow
def test_the_site_builds_with_every_tutorial_and_example_run(tmp_path):
    pages = build(tmp_path, "-b", "html")
    transport = (pages / "_generated/reference/meanfield.transport.html").read_text("utf-8")
    assert 'id="meanfield.transport.solve_w2"' in transport
    assert "_modules/meanfield/transport/solve.html" in transport
    for path in SCRIPTS:
        kind = "gallery" if path.parent.name == "examples" else "tutorials"
        page = (pages / "_generated" / kind / f"{path.stem}.html").read_text("utf-8")
        assert "sphx-glr-script-out" in page, f"{path.stem} shows no output"
        assert f"_images/sphx_glr_{path.stem}_001" in page, f"{path.stem} shows no figure"


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (
            "‖V‖(D(c) + ‖A‖R²), c = 1+2c: a",
            r":math:`\|V\|(D(c) + \|A\|R^{2})`, :math:`c = 1+2c`: a",
        ),
        ("is √(1 + c²).", r"is :math:`\sqrt{1 + c^{2}}`."),
        ("max_t (te^{−c} + t)", r":math:`\max _{t} (te^{-c} + t)`"),
        ("maxᵢ ‖D_xΓ_μ(xᵢ)‖ of ẋ", r":math:`\max _{i} \|D_{x}Γ_{μ}(x_{i})\|` of :math:`\dot{x}`"),
        (
            "Σ_j ‖x‖^order + e^sink",
            r":math:`\sum _{j} \|x\|^{\mathrm{order}} + e^{\mathrm{sink}}`",
        ),
        ("a Σ_j of (a, b) at W_∞", r"a :math:`\sum _{j}` of (a, b) at :math:`W_{\infty }`"),
        ("of (Σᵢ aᵢ²)^½; +∞", r"of :math:`(\sum _{i} a_{i}^{2})^{1/2}`; :math:`+\infty`"),
        ("Wx̄ + b at f(y) ⟂ y", r":math:`W\bar{x} + b` at :math:`f(y) \perp  y`"),
        ("s = ln(n−1)/c in the ∞-norm", r":math:`s = \ln (n-1)/c` in the ∞-norm"),
        ("In = a · eps of (B_R) ≤ (1", "In = a · eps of :math:`(B_{R})` ≤ (1"),
        ("as √‖Df(X)‖ is", r"as :math:`\sqrt{\|Df(X)\|}` is"),
        ("(the ball B_R)", r"(the ball :math:`B_{R}`)"),
        ("n_tokens, ``W_p``, `x²`, log_weights, 1e-9, L2", "itself"),
    ],
)
def test_formulas_of_docstrings_become_mathematics_and_names_stay(words, written):
    formulas = runpy.run_path(str(DOCS / "formulas.py"))
    made = formulas["with_mathematics"](words, lambda code: True)
    assert made == (words if written == "itself" else written)
    assert formulas["with_mathematics"](words, lambda code: False) == words


def test_what_has_brackets_in_the_wrong_order_is_no_formula():
    tex = runpy.run_path(str(DOCS / "formulas.py"))["tex"]
    assert tex("(a) + (b)")
    assert not tex("a) + (b")
    assert not tex("(a")


def test_formulas_in_a_line_break_after_relations_and_long_ones_in_sums_only():
    inline = runpy.run_path(str(DOCS / "mathml.py"))["inline"]
    assert "<wbr>" not in inline("x = y")
    assert inline(r"f(x,\ y=1) = \|x + y + z\| = 1").count("<wbr>") == 2
    long = r"\|A\|(a + b + c)(b + c + d + e + f)\|b - c - d - e\|"
    assert inline(long).count("<wbr>") == 6 + 3
    for made in (inline(long), inline("a=b")):
        assert made.count("<math") == made.count("</math>") == made.count("<wbr>") + 1


def test_an_index_stands_beside_its_letter_with_an_accent_and_bars_stay_alike():
    mathml = runpy.run_path(str(DOCS / "mathml.py"))
    assert re.search(r"<msub>\s*<mover", mathml["inline"](r"\dot{\theta}_i"))
    bars = re.findall("<mo[^>]*>‖</mo>", mathml["inline"](r"\|T\|_2 \le \|S\|_{p\to p}"))
    assert len(bars) == 4
    assert all('stretchy="false"' in bar for bar in bars)
    names = mathml["inline"](r"\max (a) + \max b")
    assert re.findall('rspace="([^"]*)">max', names) == ["0", "0.17em"]
    rows = mathml["displayed"](r"a &= b \\ &= c")
    assert rows.count("<mtr>") == 2


def test_a_formula_on_lines_of_its_own_keeps_them():
    displayed = runpy.run_path(str(DOCS / "formulas.py"))["displayed"]
    lines = ["It is", "", "    p = 1   maxᵢ xᵢ,", "    p = 2   ‖J‖.", "", "Args:", "    x: ‖x‖"]
    marked = ["    \0 p = 1   maxᵢ xᵢ,", "    \0 p = 2   ‖J‖."]
    assert displayed(lines) == [*lines[:2], *marked, *lines[4:]]
