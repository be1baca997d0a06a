"""The papers' own statements. Every function takes numbers or arrays and broadcasts them."""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import check_together, counts, exponent, norms, out, square
from meanfield.checks import as_floats, without_autocast
from meanfield.habits import with_hints


@with_hints
def theorem_3_3(norm_A: Any, norm_V: Any, radius: Any, n: Any) -> Any:
    """√3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^½: the Euclidean constant on n tokens in B_R, plain or masked.

    `tokens` is sharper.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        n: number of tokens.

    Source: [CAP24] Theorems 3.3 and 4.3.

    Example:
        >>> theorem_3_3(0.0, 1.0, 1.0, 3)
        3.0
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, n=n)
    c, v, n = exponent(norm_A, radius)[1], norms(norm_V, "norm_V"), counts(n)
    with np.errstate(over="ignore", invalid="ignore"):
        length = np.hypot(c * np.sqrt(4 * n + 1), np.sqrt(n))
        return out(np.where(v > 0, np.sqrt(3.0) * v * length, 0.0))


@with_hints
def theorem_3_5(norm_A: Any, norm_V: Any, radius: Any) -> Any:
    """‖V‖(1 + 3‖A‖R²)e^{2‖A‖R²}: the W₂ constant of F on all measures on B_R.

    `mean_field` is sharper, by a factor of 36,000 at ‖A‖R² = 9.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.

    Source: [CAP24] Theorem 3.5.
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius)
    c, v = exponent(norm_A, radius)[1], norms(norm_V, "norm_V")
    with np.errstate(over="ignore", invalid="ignore"):
        return out(np.where(v > 0, v * (1 + 3 * c) * np.exp(2 * c), 0.0))


@with_hints
def proposition_3_4(gamma: Any, radius: Any, n: Any) -> Any:
    """√(n−1) / (1 + (n−1)e^{−2γR²}): what the worst n tokens in B_R reach at least, for V = I.

    Args:
        gamma: scaling factor γ = max(−γ_min, γ_max/8) of the real eigenvalues of A
            (`scaling_factor`), or −γ, γ/8 of one of them; may be negative.
        radius: R.
        n: number of tokens.

    Source: [CAP24] Proposition 3.4; `meanfield.sampling.adversarial` builds the witness.
    """
    check_together(gamma=gamma, radius=radius, n=n)
    g, n = as_floats(gamma, "gamma", finite=True), counts(n)
    c = np.sign(g) * exponent(np.abs(g), radius)[0]
    with np.errstate(over="ignore", divide="ignore"):
        # 1/√(n−1) + √(n−1) e^{−2c}: the second part in logarithms, for n may be infinite.
        root = np.sqrt(n - 1)
        return out(1 / (1 / root + np.exp(np.log(root) - 2 * c)))


@with_hints
def proposition_3_6(gamma: Any, radius: Any) -> Any:
    """½(1 + γR²)e^{γR²}: what the paper's two Diracs in B_R reach at least in W₂, for V = I.

    Their light weight is 1/(1 + e^{2γR²}), so that the heavy atom pays half of its attention to
    the light one. `two_dirac_lower` has the best weight: 1.256 times more at γR² = 9, 3√3/4
    times in the limit.

    Args:
        gamma: scaling factor γ = max(−γ_min, γ_max/8) of the real eigenvalues of A.
        radius: R.

    Source: the configuration and the growth are [CAP24] Propositions 3.6 and C.8, as R → ∞; that
    this holds at every R is this package's. Proved (`diracs.two_dirac_entry` at that weight).

    Example:
        >>> proposition_3_6(1.0, 3.0)
        40515.42
    """
    check_together(gamma=gamma, radius=radius)
    c = exponent(gamma, radius, name="gamma")[0]
    with np.errstate(over="ignore"):
        return out((1 + c) / 2 * np.exp(c))


def scaling_factor(A: Any) -> float:
    """γ = max(−γ_min, γ_max/8) over the real eigenvalues of A; 0 if that is negative or none is.

    Args:
        A: square matrix (d, d).

    Source: [CAP24] Proposition 3.4.
    """
    eigenvalues = np.linalg.eigvals(square(A))
    real = eigenvalues[np.isreal(eigenvalues)].real
    return float(max(-real.min(), real.max() / 8, 0.0)) if real.size else 0.0


@with_hints
@without_autocast
def local_upper(F: Any, mu: Any) -> Any:
    """An upper bound of the local Wasserstein constant at μ, both components.

    Certain, not probable: ‖J‖² ≤ maxⱼ Σ_g c_g w_gj from weights w for the blocks of J's rows, of
    this package; proved on the page "Sharp constants" of the documentation. A few per cent to
    80 % above the constant, and equal to it where n · d is at most 1,024, which is factored. For
    attention under a softmax or another normalisation of rows, with any kernel here, alone or in
    a block with normalisations, residual and feed-forward layer; several such blocks multiply.
    See `meanfield.linalg.Certified` for its settings. For uniform weights it bounds the Euclidean
    constant ‖Df(X)‖ too. No gradient is recorded: as a penalty take
    `meanfield.lipschitz.local_lipschitz`.

    Args:
        F: a map of measures that declares one (`meanfield.Map.local_upper`), as `SelfAttention`
            and what is in `meanfield.layers` do; or any, where it is small enough to be factored.
        mu: a measure, or a batch of them.

    Returns:
        The bound, a tensor of the measure's batch shape.

    Raises:
        NotImplementedError: F is large and declares none.
    """
    from meanfield.maps.map import constant_upper  # loads torch
    from meanfield.measures import check_measure

    return constant_upper(F, check_measure(mu))
