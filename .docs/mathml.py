"""Formulas in TeX as MathML that browsers show right, and break where a line is too short."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from docutils.utils.math.latex2mathml import tex2mathml

_SPACE = "http://www.w3.org/1998/Math/MathML"
_NAME = f"{{{_SPACE}}}"
ElementTree.register_namespace("", _SPACE)
_RELATIONS = {*"=<>≤≥≈≔∈⊂∝→↦,;≠"}
_SUMS = {*"+−-"}
_OPENING, _CLOSING, _BARS = {*"([{⟨"}, {*")]}⟩"}, {*"|‖"}
_ACCENTS = {*"˙¨¯ˉ˜~^ˆ→_"}
_SHORT, _LONG = 12, 24  # signs of a formula that is never broken, and of one that must be
_WITH_INDEX = {_NAME + kind for kind in ("msub", "msup", "msubsup", "munder")}


def displayed(code: str) -> str:
    """A formula on a line of its own.

    Raises:
        docutils.utils.math.MathError: what cannot be written.
    """
    if "&" in code and r"\begin" not in code:
        code = rf"\begin{{aligned}}{code}\end{{aligned}}"
    return ElementTree.tostring(_mathml(code, as_block=True), encoding="unicode")


def inline(code: str) -> str:
    """A formula in a line: pieces that a browser may put on two lines, as it breaks no formula.

    What follows at once, such as a comma, stays with the formula.

    Raises:
        docutils.utils.math.MathError: what cannot be written.
    """
    root = _mathml(code)
    pieces = []
    for part in _parts(list(root), sum(len(one) == 0 for one in root.iter())):
        piece = ElementTree.Element(root.tag)
        piece.extend(part)
        pieces.append(ElementTree.tostring(piece, encoding="unicode"))
    return "<wbr>".join(pieces) + "&#8288;"


def _parts(signs: list[ElementTree.Element], n_signs: int) -> list[list[ElementTree.Element]]:
    """The formula in parts that end with a relation; a long one also with sums and factors."""
    parts: list[list[ElementTree.Element]] = [[]]
    depth, bars = 0, set[str]()
    for k, sign in enumerate(signs):
        parts[-1].append(sign)
        text = _operator(sign)
        depth += (text in _OPENING) - (text in _CLOSING)
        bars ^= {text} & _BARS
        outside = not depth and not bars
        if text in _RELATIONS:
            ends = outside and n_signs > _SHORT
        elif text in _SUMS:
            ends = not bars and n_signs > _LONG and len(parts[-1]) > 1
        else:
            factor = text in _CLOSING | _BARS and k + 1 < len(signs)
            ends = factor and outside and n_signs > _LONG
            ends = ends and _operator(signs[k + 1]) in _OPENING | _BARS
        if ends:
            if text in _RELATIONS | _SUMS:
                sign.set("form", "infix")  # the spaces of one between its sides
            parts.append([])
    return [part for part in parts if part]


def _operator(sign: ElementTree.Element) -> str:
    """The operator that this is, whatever is raised or lowered at it; empty for anything else."""
    while sign.tag in _WITH_INDEX:
        sign = sign[0]
    return (sign.text or "").strip() if sign.tag == _NAME + "mo" else ""


def _mathml(code: str, *, as_block: bool = False) -> ElementTree.Element:
    made = tex2mathml(code, as_block=as_block)
    made = re.sub(r"&(?!amp;|lt;|gt;)\w+;", lambda found: html.unescape(found[0]), made)
    root = ElementTree.fromstring(re.sub(r"<mo>[:∶]</mo>\s*<mo>=</mo>", "<mo>≔</mo>", made))
    for sign in root.iter(_NAME + "mo"):
        if sign.text in {"|", "‖", "/"}:
            # Bars enclose; as operators they would have spaces on both sides.
            sign.attrib.update(lspace="0", rspace="0")
        if sign.text == "‖":
            # Norm bars keep their height: browsers would stretch one with an index alone.
            sign.attrib.update(stretchy="false")
    for row in root.iter():
        if row.tag not in _WITH_INDEX:
            _space_names(list(row))
        else:  # no room for spaces there
            for sign in (sign for index in row[1:] for sign in index.iter(_NAME + "mo")):
                sign.attrib.update(lspace="0", rspace="0")
    for table in root.iter(_NAME + "mtable"):
        if table.get("class") == "ams-align":
            table.set("displaystyle", "true")
    for sign in root.iter(_NAME + "munderover"):
        base, index, above = sign
        if above.text in _ACCENTS:
            # The index belongs to the letter with its accent, and stands beside both.
            sign.tag = _NAME + "msub"
            accented = ElementTree.Element(_NAME + "mover", accent="true")
            accented.extend([base, above])
            sign[:] = [accented, index]
    return root


def _space_names(row: list[ElementTree.Element]) -> None:
    """A thin space on each side of max, log, …, none beside a bracket."""
    names = [k for k, sign in enumerate(row) if _operator(sign).isalpha() or _applies(sign)]
    for k in names:
        sides = {"lspace": row[k - 1 : k], "rspace": row[k + 1 : k + 2]}
        for side, beside in sides.items():
            near = _applies(row[k]) and side == "lspace"
            near |= not beside or _operator(beside[0]) in _OPENING | _CLOSING | _RELATIONS
            for sign in row[k].iter(_NAME + "mo"):
                sign.set(side, "0" if near else "0.17em")
                break


def _applies(sign: ElementTree.Element) -> bool:
    return sign.text == "\N{FUNCTION APPLICATION}"
