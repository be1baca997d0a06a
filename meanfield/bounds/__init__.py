"""The constants of the theorems, as functions of norms, radius and size.

They take numbers or arrays, broadcast them, and return a float or an array, to a relative accuracy
of 1e-12. An upper bound too large for float64 comes back as infinity.

The statements, and in brackets whose they are:

- `mean_field`: ‖V‖Λ(D(c), √(1+c²), c), W₂ on all measures of the ball, c = ‖A‖R² (this package)
- `masked_mean_field`: masked, at most ‖V‖(√2(1+c)e^c + 2√((1+2c)(1+c)) + c) (this package)
- `one_sided`: ‖V‖(½(D(c) + √(1+c²)) + c), the rate e^{ωt} of a plain flow (this package)
- `tokens`: ‖V‖Λ(min(√C_n, D(c)), √(1+c²), c), n tokens, about c√(n/2) (this package)
- `two_dirac_lower`: √(t(1−t))(1+2(1−t)c)e^c is reached for V = I (this package)
- `masked_two_dirac_lower`: p/(p−1) times that (this package)
- `tokens_lower`: about c√(n/2) is reached, and c√n/2 up to n = e^{2c} (this package)
- `capped_mean_field`, `l2_mean_field`: other scores than ⟨Ax, y⟩ (this package)
- `local_upper`: the constant at one μ, from its attention weights (this package)
- `theorem_3_3`: √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^½, n tokens, masked too ([CAP24] Thm 3.3, 4.3)
- `theorem_3_5`: ‖V‖(1 + 3‖A‖R²)e^{2‖A‖R²}, W₂ on all measures of the ball ([CAP24] Thm 3.5)
- `proposition_3_4`: √(n−1) / (1 + (n−1)e^{−2γR²}) is reached, V = I ([CAP24] Prop. 3.4)
- `proposition_3_6`: ½(1 + γR²)e^{γR²}, the paper's own two Diracs, V = I ([CAP24] Prop. 3.6)
- `l2_attention_inf`: tied L2 attention on n tokens of R^d, in the ∞-norm ([KPM21])
- `l2_spread`: what n tokens can have of Σⱼ P_ij |uᵢ−uⱼ|² in it ([KPM21])
- `l2_theorem_3_2`: the same in the Euclidean norm ([KPM21])
- `l2_attention_2`, `l2_attention_max`: in the Euclidean norm, in maxᵢ |xᵢ| (this package)
- `table`: every statement for one layer and one ball (as each row says); also the rate e^{E/2} of
  a given A, and scores of bounded oscillation

[CAP24]: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024. [KPM21]: Kim,
Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention*, ICML 2021. "This package" marks
statements that are not in the papers; the page "Sharp constants" of the documentation proves them.
"""

# Files: `sharp` (this package's upper bounds), `running` (under a mask),
# `diracs` (the lower ones), `rates` (for a given A), `scores` (other kernels), `theorems` (the
# papers' own), `layer` (from heads to a layer), `l2` (L2 attention on n tokens), `tables` (all of
# them at once: `statements`, `theorem_list`).

from meanfield.bounds.diracs import masked_two_dirac_lower as masked_two_dirac_lower
from meanfield.bounds.diracs import (
    tokens_lower,
    two_dirac_best_log_ratio,
    two_dirac_lower,
)
from meanfield.bounds.l2 import (
    l2_attention_2,
    l2_attention_inf,
    l2_attention_max,
    l2_spread,
)
from meanfield.bounds.l2 import l2_theorem_3_2 as l2_theorem_3_2
from meanfield.bounds.scores import capped_mean_field as capped_mean_field
from meanfield.bounds.scores import l2_mean_field
from meanfield.bounds.sharp import masked_mean_field, mean_field, one_sided, tokens
from meanfield.bounds.tables import table
from meanfield.bounds.theorems import (
    local_upper,
    proposition_3_4,
    proposition_3_6,
    scaling_factor,
    theorem_3_3,
    theorem_3_5,
)
from meanfield.habits import hint_names

# What is imported `as` itself is not in the list, but may be taken from here as well.
__all__ = [
    "l2_attention_2",
    "l2_attention_inf",
    "l2_attention_max",
    "l2_mean_field",
    "l2_spread",
    "local_upper",
    "masked_mean_field",
    "mean_field",
    "one_sided",
    "proposition_3_4",
    "proposition_3_6",
    "scaling_factor",
    "table",
    "theorem_3_3",
    "theorem_3_5",
    "tokens",
    "tokens_lower",
    "two_dirac_best_log_ratio",
    "two_dirac_lower",
]
hint_names(__name__, __all__)
