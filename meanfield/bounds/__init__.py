"""The constants of the theorems, as functions of norms, radius and size.

Files: `theorems` (most of the formulas below), `layer` (the norms of a layer that they need),
`l2` (L2 attention), `tables` (all of them at once). Every function of `theorems` takes numbers or
arrays, broadcasts them, and returns a float or an array. A bound beyond the range of float64
comes back as infinity, which is still a bound.

| function | statement | source |
|---|---|---|
| `general` | Lip(f on B_Rⁿ) ≤ √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^½, masked too | [CAP24] Thm 3.3, 4.3 |
| `general_lower` | Lip(f on B_Rⁿ) ≥ √(n−1) / (1 + (n−1)e^{−2γR²}), V = I | [CAP24] Prop. 3.4 |
| `mean_field` | Lip^{W₂}(F on P(B_R)) ≤ ‖V‖(1 + 3‖A‖R²)e^{2‖A‖R²} | [CAP24] Thm 3.5 |
| `masked_mean_field` | Lip_{d_p} ≤ ‖V‖(‖A‖R² + p/(p−1) (1+2‖A‖R²)e^{2‖A‖R²}) | this package |
| `two_dirac_entry`, `two_dirac_lower` | Lip^{W₂} ≥ √(t(1−t))(1+2(1−t)c)e^c | this package |
| `local_upper` | the constant at one μ, from its attention weights | this package |
| `multi_head` | Lip ≤ Σ_h ‖W^h‖ Lip(f^h) | [CAP24] Lemma 3.8 |
| `general_of_layer` | `general` summed over the heads of a layer, query biases included | both |
| `l2_attention_inf` | tied L2 attention on n tokens of R^d, in the ∞-norm | [KPM21] |
| `l2_attention_2`, `l2_attention_max` | in the Euclidean norm, in maxᵢ |xᵢ| | this package |
| `table` | every statement for one layer and one ball | as each row says |

[CAP24]: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. [KPM21]: Kim,
Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021. "This package" marks
statements that are not in the papers: derived here and tested numerically.
"""

from meanfield.bounds.l2 import l2_attention_2, l2_attention_inf, l2_attention_max, l2_spread
from meanfield.bounds.layer import LayerNorms, general_of_layer, layer_norms
from meanfield.bounds.tables import BoundRow, BoundTable, table
from meanfield.bounds.theorems import (
    general,
    general_lower,
    local_upper,
    masked_mean_field,
    mean_field,
    multi_head,
    scaling_factor,
    two_dirac_best_log_ratio,
    two_dirac_entry,
    two_dirac_lower,
)

__all__ = [
    "BoundRow",
    "BoundTable",
    "LayerNorms",
    "general",
    "general_lower",
    "general_of_layer",
    "l2_attention_2",
    "l2_attention_inf",
    "l2_attention_max",
    "l2_spread",
    "layer_norms",
    "local_upper",
    "masked_mean_field",
    "mean_field",
    "multi_head",
    "scaling_factor",
    "table",
    "two_dirac_best_log_ratio",
    "two_dirac_entry",
    "two_dirac_lower",
]
