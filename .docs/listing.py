"""The page of the experiments in the reference, made from their list."""

from __future__ import annotations

from meanfield.experiments import EXPERIMENTS

_PAGE = """# Experiments

Each is a sweep with its figures: `meanfield run NAME`, or in Python
`experiments.get(NAME).run()`.

```{{eval-rst}}
.. autosummary::
   :toctree: ../_generated/reference
   :template: autosummary/module.rst

{modules}
```
"""


def page() -> str:
    """The text of ``reference/experiments.md``."""
    names = ["meanfield.experiments", "meanfield.experiments.experiment"]
    names += [f"meanfield.experiments.{name.replace('-', '_')}" for name in EXPERIMENTS]
    return _PAGE.format(modules="\n".join(f"   {name}" for name in names))
