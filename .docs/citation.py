"""CITATION.cff from `references.bib`: `python .docs/citation.py` writes the references anew."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parents[1]
CITATION = ROOT / "CITATION.cff"
_ACCENTS = {"'": "\u0301", "`": "\u0300", "c": "\u0327"}
_KINDS = {"inproceedings": "conference-paper", "phdthesis": "thesis"}


def entries() -> list[dict[str, str]]:
    """The fields of every entry, with `kind` and `key`, accents as letters and no braces."""
    text = (ROOT / ".docs" / "references.bib").read_text(encoding="utf-8")
    found = []
    for kind, key, body in re.findall(
        r"^@(\w+)\{(\w+),\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
    ):
        fields = dict(re.findall(r"^  (\w+) += \{(.*)\},?$", body, re.MULTILINE))
        words = {name: _plain(value) for name, value in fields.items()}
        found.append({"kind": kind, "key": key, **words})
    return found


def _plain(text: str) -> str:
    accented = re.sub(
        r"\{\\(['`c])\{?(\w)\}?\}",
        lambda m: unicodedata.normalize("NFC", m[2] + _ACCENTS[m[1]]),
        text,
    )
    return accented.replace("{", "").replace("}", "").replace("--", "–")


def references() -> str:
    """The list of references of the citation file."""
    lines = ["references:"]
    for one in entries():
        lines += [
            f"  - type: {_KINDS.get(one['kind'], 'article')}",
            f'    title: "{one["title"]}"',
        ]
        lines += ["    authors:"]
        for author in one["author"].split(" and "):
            family, _, given = author.partition(", ")
            person = f'family-names: "{family}", given-names: "{given}"'
            lines += [f"      - {{{person}}}" if given else '      - {name: "and others"}']
        if "booktitle" in one:
            lines += [f'    conference: {{name: "{one["booktitle"]}"}}']
        lines += [f'    journal: "{one["journal"]}"'] if "journal" in one else []
        lines += [f'    institution: {{name: "{one["school"]}"}}'] if "school" in one else []
        lines += [f"    year: {one['year']}"]
        lines += [f'    doi: "{one["doi"]}"'] if "doi" in one else []
        if "eprint" in one:
            lines += [f'    identifiers: [{{type: other, value: "arXiv:{one["eprint"]}"}}]']
    return "\n".join(lines) + "\n"


def written() -> str:
    """The citation file with these references."""
    return CITATION.read_text(encoding="utf-8").partition("references:")[0] + references()


if __name__ == "__main__":
    CITATION.write_text(written(), encoding="utf-8")
