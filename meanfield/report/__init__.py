"""A finished Dataset as one page of HTML that stands alone: no script, no request, no folder.

The page says what was asked, draws the figures, and lists variables with their evidence, cases
in trouble, fits, the Dataset as xarray shows it, and provenance; any browser reads it.
"""

# Files, each importing only those before it: `summaries` (tables of what a Dataset says about
# itself), `pictures` (its figures), `page` (both in the template `page.html.j2`).

from meanfield.report.page import render, write_report

__all__ = ["render", "write_report"]
