"""Formulas in docstrings as mathematics: what a terminal shows in Unicode becomes TeX.

A formula is a run of words that hold a sign of mathematics, with the letters, numbers and
operators between them. What cannot be written stays as it is.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable

_WORDS = {
    **{name: rf"\{name} " for name in ("max", "min", "sup", "inf", "log", "exp", "lim", "det")},
    **{name: rf"\{name} " for name in ("cos", "sin", "tanh", "ln")},
}
_SIGNS = {
    "‖": r"\|",
    "∞": r"\infty ",
    "Σ": r"\sum ",
    "∏": r"\prod ",
    "∫": r"\int ",
    "∬": r"\iint ",
    "∂": r"\partial ",
    "∇": r"\nabla ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∝": r"\propto ",
    "∈": r"\in ",
    "⊂": r"\subset ",
    "⟂": r"\perp ",
    "→": r"\to ",
    "↦": r"\mapsto ",
    "·": r"\cdot ",
    "×": r"\times ",
    "±": r"\pm ",
    "∘": r"\circ ",
    "⊗": r"\otimes ",
    "♯": r"\sharp ",
    "−": "-",
    "…": r"\ldots ",
    "½": r"\tfrac{1}{2}",
    "¼": r"\tfrac{1}{4}",
    "{": r"\{",
    "}": r"\}",
}
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˢᵈᵖᵏᵀ", (*"0123456789+-nsdpk", r"\top "), strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₐₑᵢⱼₖₗₘₙₚₛₜ", "0123456789+-aeijklmnpst", strict=True))
_ACCENTS = {"̇": r"\dot", "̄": r"\bar", "̃": r"\tilde", "̂": r"\hat"}
_DOTTED = "\u0307\u0304\u0303\u0302\u022f\u1e00-\u1eff"
_LETTERS = f"A-Za-zα-ωΑ-Ωℓϕϵ{_DOTTED}"

_NAMED = r"(?:max|min|sup|inf|lim|log|exp|diag|Cov|join)"
_STRONG = re.compile(
    f"[‖√∫∬Σ∏∂∇⟨⟩≤≥∈∞→↦·×±♯⊗∘≈≠∝½¼⟂α-ωΓΔΘΛΞΠΦΨΩℓ{_DOTTED}"
    + "".join([*_RAISED, *_LOWERED])
    + rf"]|(?<![A-Za-z_])[A-Za-z]{{1,2}}[_^][\w{{(∞−-]|\b{_NAMED}_[a-zα-ω{{]|^[A-Z]\([\w, ]\)"
)
# Once its brackets are gone: numbers and letters with operators between them, or an operator.
_TERM = rf"(?:\d+(?:[.,]\d+)*[A-Za-z]?(?:\^\w+)?|(?:log|ln|exp)?[b-zA-HJ-Z]\d*|{_NAMED})"
_WEAK = re.compile(rf"{_TERM}(?:[-+−/=<>]{_TERM})*|[-+−/=<>≔…|]")
# A function of letters, f(y), or a product of a matrix and a vector, Wx, that is no word.
_PRODUCT = re.compile(
    r"[A-Za-z]\(\w(?:,\w)*\)|(?!In|If|Of|It|At|As|An|No|On|To|Is|By|Or|So|We|Do|Up)[A-Z][a-z]"
)
_NEVER = re.compile(
    r"[\"'`\\@#%&\0]|[\w∞]-[A-Za-z]{2}|__|_[A-Za-z]{4}|\d[eE]-?\d"
    rf"|(?<![A-Za-z_])(?!{_NAMED}_\w?\b)(?:[A-Za-z]{{3,}}_|[A-Za-z]{{2,}}_[A-Za-z])"
)
_OPERATOR = re.compile(r"[=<>+−≤≥∈≈≠·×/|→↦∝≔∘⟂⊗±-]$|^[=<>+−≤≥∈≈≠·×/→↦∝∘⟂⊗±-]")
_BRACKETS = str.maketrans("", "", "()[]{}|")
_PAIRS = {"(": ")", "[": "]", "{": "}", "⟨": "⟩"}
_SECTION = re.compile(r"\s*(?:[A-Z]\w+( \w+)?:|.*::)$")
_LITERAL = re.compile(r"(``.*?``|`[^`]*`_*|:[a-z:]+:`.*?`|\[[A-Z0-9]{3,}\])", re.DOTALL)


def with_mathematics(text: str, works: Callable[[str], bool]) -> str:
    """The text with its formulas as ``:math:`` roles; literals and links stay.

    Args:
        text: paragraphs, without doctests.
        works: whether a formula in TeX can be written.
    """
    parts = _LITERAL.split(text)
    parts[::2] = [_in_prose(part, works) for part in parts[::2]]
    return "".join(parts)


def displayed(lines: list[str]) -> list[str]:
    """The lines, those of formulas that stand on their own marked with a null in front."""
    marked = list(lines)
    for k in range(1, len(lines)):
        above = next((one for one in reversed(lines[:k]) if one.strip()), "")
        if lines[k - 1].strip() or not lines[k].strip() or _SECTION.match(above):
            continue
        end = next((j for j in range(k, len(lines)) if not lines[j].strip()), len(lines))
        block = lines[k:end]
        deeper = all(_indent(one) >= _indent(above) + 4 for one in block)
        if deeper and all(_STRONG.search(one) and ">>>" not in one for one in block):
            marked[k:end] = [" " * _indent(one) + "\0 " + one.lstrip() for one in block]
    return marked


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _in_prose(text: str, works: Callable[[str], bool]) -> str:
    pieces = re.split(r"(\s+)", text)
    out, k = [], 0
    while k < len(pieces):
        end = _end_of_run(pieces, k)
        if end == k:
            out.append(pieces[k])
            k += 1
            continue
        before, run, after = _trimmed("".join(pieces[k:end]))
        code = tex(run) if _STRONG.search(run) or re.search("[=<>]", run) else ""
        written = f":math:`{code}`" if code and works(code) else run
        if after[:1].isalnum():
            written = run
        out.append(before + written + after)
        k = end
    return "".join(out)


def _end_of_run(pieces: list[str], start: int) -> int:
    """Behind the last word of the formula that begins here; `start` if none does."""
    depth, strong, end, is_formula = 0, False, start, False
    for k in range(start, len(pieces), 2) if not pieces[start].isspace() else ():
        word = pieces[k]
        core = word.rstrip(",;:.") if depth <= 0 else word
        is_strong = bool(_STRONG.search(core))
        if not core or _NEVER.search(core) or not (is_strong or _is_weak(pieces, k)):
            break
        if k > start and "\n\n" in pieces[k - 1]:
            break
        # A letter beside a formula belongs to it through an operator only.
        if k > start and not (_joined(pieces[k - 2], word) or depth > 0):
            break
        strong |= is_strong or core in ("=", "<", ">")
        depth += sum((c in "([{⟨") - (c in ")]}⟩") for c in core)
        if depth <= 0:
            end, is_formula = k + 1, strong
            if word[-1:] in ",;:.":
                break
    return end if is_formula else start


def _is_weak(pieces: list[str], k: int) -> bool:
    """Whether a word belongs to a formula that stands beside it."""
    core = pieces[k].rstrip(",;:.").translate(_BRACKETS)
    if core in ("a", "I"):  # mostly words
        sides = pieces[max(k - 2, 0)] * (k > 1), "".join(pieces[k + 2 : k + 3])
        return any(side[:1] and side[:1] in "=<>+−≤≥·" for side in sides)
    if _PRODUCT.fullmatch(pieces[k].rstrip(",;:.")):
        return True
    return bool(_WEAK.fullmatch(core)) or (not core and pieces[k] in ("|",))


def _joined(left: str, right: str) -> bool:
    strong = bool(_STRONG.search(left)), bool(_STRONG.search(right))
    product = (strong[0] and right[:1] == "(") or (strong[1] and left[-1:] == ")")
    return bool(all(strong) or product or _OPERATOR.search(left) or _OPERATOR.match(right))


def _trimmed(run: str) -> tuple[str, str, str]:
    """What stands before the formula, the formula, and what stands after: its brackets match."""
    before, after = "", ""
    while (
        run
        and run[-1] in ",;:. =<>≤≥+−·×/→↦|"
        and not (run[-1] == "|" and run.count("|") % 2 == 0)
    ):
        run, after = run[:-1], run[-1] + after
    while run and run[0] in "·=<>≤≥+×/ " and not re.match(r"\+[\w∞]", run):
        run, before = run[1:], before + run[0]
    for _ in range(len(run)):
        depth, lowest = 0, 0
        for c in run:
            depth += (c in "([{⟨") - (c in ")]}⟩")
            lowest = min(lowest, depth)
        if lowest < 0 and run[-1] in ")]}":
            run, after = run[:-1], run[-1] + after
        elif depth > 0 and run[0] in "([{":
            run, before = run[1:], before + run[0]
        else:
            break
    return before, run, after


def tex(formula: str) -> str:
    """TeX of a formula in Unicode; empty if its brackets do not match."""
    text = " ".join(formula.split())
    for opening, closing in _PAIRS.items():
        depths = itertools.accumulate((c == opening) - (c == closing) for c in text)
        if min(depths := [*depths], default=0) < 0 or depths[-1:] not in ([], [0]):
            return ""
    if text.count("‖") % 2:
        return ""
    return _translated(text).strip()


def _translated(text: str) -> str:
    out, k = [], 0
    while k < len(text):
        code, k = _next(text, k)
        out.append(code)
    return "".join(out)


def _next(text: str, k: int) -> tuple[str, int]:
    """TeX of what begins at k, and where it ends."""
    c = text[k]
    for table, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        if c in table:
            end = k
            while end < len(text) and text[end] in table:
                end += 1
            return f"{mark}{{{''.join(table[x] for x in text[k:end])}}}", end
    if c in "^_":
        inner, end = _script(text, k + 1)
        return f"{c}{{{_translated(inner.replace('½', '1/2').replace('¼', '1/4'))}}}", end
    if c == "√":
        inner, end = _argument(text, k + 1)
        return rf"\sqrt{{{_translated(inner)}}}", end
    if word := re.compile("[A-Za-z]{2,}(?![\u0304\u0307])").match(text, k):
        return _word(word[0]), word.end()
    letter = unicodedata.normalize("NFD", text[k : k + 2])
    if len(letter) > 1 and letter[0].isalpha() and letter[1] in _ACCENTS:
        whole = len(unicodedata.normalize("NFD", c)) > 1
        return f"{_ACCENTS[letter[1]]}{{{letter[0]}}}", k + (1 if whole else 2)
    return _SIGNS.get(c, c), k + 1


def _word(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    # Two letters are a product; more are a name, unless they are capitals.
    return word if len(word) < 3 or word.isupper() else rf"\mathrm{{{word}}}"


def _script(text: str, k: int) -> tuple[str, int]:
    """What is raised or lowered by a sign before it."""
    if text[k : k + 1] in ("{", "("):
        return _argument(text, k)
    found = re.compile(r"[-−+]?(?:\d+(?:/\d+)?|[½¼∞]|(?:[a-z]+|[A-Zα-ωΓ])[₀-₉ᵢⱼ]?)").match(text, k)
    return (found[0], found.end()) if found else (text[k : k + 1], k + 1)


def _argument(text: str, k: int) -> tuple[str, int]:
    """A group without its brackets, or one sign with what is raised and lowered at it."""
    opening = text[k : k + 1]
    if opening in _PAIRS and opening != "⟨":
        depth = 0
        for end in range(k, len(text)):
            depth += (text[end] == opening) - (text[end] == _PAIRS[opening])
            if not depth:
                return text[k + 1 : end], end + 1
    if opening == "‖" and (end := text.find("‖", k + 1) + 1):
        return text[k:end], end
    found = re.compile(rf"\d+|[{_LETTERS}][{''.join(_LOWERED)}]*").match(text, k)
    return (found[0], found.end()) if found else (opening, k + 1)
