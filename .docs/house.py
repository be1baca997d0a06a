"""How the house is built: the packages in rows and wings, and a drawing of them.

The page of the house shows the drawing, which is made when the site is built, and
`tests/interface/test_architecture.py` holds the table.
"""

from __future__ import annotations

# A module imports only from layers below its own; inside a subpackage, in the order listed there.
LAYERS = [
    ["errors", "html", "checks"],
    ["habits", "copies"],
    ["results", "measure_arguments"],
    ["measures", "linalg"],
    ["images"],
    ["maps"],
    ["attention", "transport", "sampling", "sweeps", "figures"],
    ["bounds", "lipschitz", "layers", "corpora", "report"],
    ["dynamics", "pretrained"],
    ["experiments"],
    ["cli"],
]
# Wing -> what it knows, its colour, its packages.
WINGS = {
    "core": (
        "the mathematics",
        "#cfe3f5",
        [
            *(
                "errors",
                "html",
                "checks",
                "copies",
                "habits",
                "measure_arguments",
                "measures",
                "linalg",
                "images",
                "maps",
                "attention",
            ),
            *("transport", "sampling", "bounds", "lipschitz", "layers"),
        ],
    ),
    "models": ("flows, checkpoints", "#e3d9f2", ["dynamics", "pretrained"]),
    "bookkeeping": ("cases, files, labels", "#fbe0c3", ["results", "sweeps"]),
    "lab": (
        "questions, answers",
        "#d6ecd2",
        ["experiments", "figures", "report", "corpora", "cli"],
    ),
}
# The base classes in italics, which users may subclass.
SEAMS = {
    "pretrained": "Family",
    "attention": "Kernel, RowWise",
    "maps": "Map",
    "linalg": "NormSolver",
}
_WIDTH, _GAP, _ROW = 740, 8, 38
_STYLE = """text { font-family: sans-serif; fill: #222; text-anchor: middle; }
.unit { font-size: 15px; }
.seam { font-size: 12px; font-style: italic; }
.key { font-size: 11px; text-anchor: start; }"""


def drawing() -> str:
    """The rows as SVG, the lowest layer at the bottom, with a key of the wings."""
    colours = {name: colour for _, colour, names in WINGS.values() for name in names}
    parts = []
    for k, row in enumerate(reversed(LAYERS)):
        width, y = (_WIDTH + _GAP) / len(row) - _GAP, 10 + k * (_ROW + _GAP)
        for column, name in enumerate(row):
            x = 10 + column * (width + _GAP)
            parts.append(_box(x, y, width, _ROW, colours[name]))
            parts.append(_text(x + width / 2, y + (16 if name in SEAMS else 24), "unit", name))
            if name in SEAMS:
                parts.append(_text(x + width / 2, y + 32, "seam", SEAMS[name]))
    bottom = 18 + len(LAYERS) * (_ROW + _GAP)
    x = 10.0
    for wing, (what, colour, _) in WINGS.items():
        words = f"{wing}: {what}"
        parts.append(_box(x, bottom, 14, 14, colour))
        parts.append(_text(x + 20, bottom + 12, "key", words))
        x += 40 + 6 * len(words)
    size = f'width="{_WIDTH + 20}" height="{bottom + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>The layers of meanfield: each imports only from boxes below its row</title>"
    ground = f'<rect {size} fill="#fff"/>'
    return "\n".join([head, title, f"<style>{_STYLE}</style>", ground, *parts, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    at = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {at} rx="4" fill="{colour}"/>'


def _text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{words}</text>'
