"""The norm of a GPT-2-sized linearisation beside solvers on a linearisation kept by hand.

    python tests/benchmarks/bench_lipschitz.py [--quick]

d = 768, 12 heads, causal, float32, LayerNormed inputs; and the adversarial inputs of Proposition
3.4 (head 0, R = 100). Ours goes on until the error is at most 1e-4 *and* the norm is at most 1 %
larger but for a probability of 1e-3. The peers prove nothing: `scipy.sparse.linalg.svds` (ARPACK)
and `lobpcg`, tolerance 1e-4, on q, k, v and P kept: thirty lines of torch. The row is beside the
faster of the two.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lobpcg, svds
from tables import least, machine, main
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, sampling
from meanfield.linalg import Lanczos, operator_norm

DIM, HEADS = 768, 12


def layer() -> SelfAttention:
    """The initialisation of GPT-2: normal entries of standard deviation 0.02."""
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(
        DIM, n_heads=HEADS, std=0.02, dtype=torch.float32, generator=generator
    )
    return SelfAttention(parameters, causal=True)


def inputs(F: SelfAttention, kind: str, n: int) -> ParticleMeasure:
    if kind == "adversarial":
        return sampling.adversarial(F.parameters.A[0].double(), 100.0, n).to(torch.float32)
    generator = torch.Generator().manual_seed(n)
    # Token + position embeddings through a LayerNorm, as before the first attention of GPT-2.
    X = torch.randn(50, DIM, generator=generator)[torch.randint(50, (n,), generator=generator)]
    X = X + torch.randn(n, DIM, generator=generator)
    return ParticleMeasure.from_sequence(torch.nn.functional.layer_norm(X, (DIM,)))


class Kept:
    """J and Jᵀ of causal attention with uniform weights; q, k, v and P are kept."""

    def __init__(self, F: SelfAttention, mu: ParticleMeasure) -> None:
        par, x = F.parameters, mu.points
        self.shape, scale = x.shape, 1 / math.sqrt(DIM // HEADS)
        self.W = torch.cat([scale * par.query.flatten(0, 1), par.key.flatten(0, 1)])
        self.W = torch.cat([self.W, par.value.flatten(0, 1)])
        self.out = par.output.movedim(0, 1).flatten(1)
        self.q, self.k, self.v = self.split(x)
        n = len(x)
        scores = self.q @ self.k.mT
        scores += torch.full((n, n), -math.inf).triu(1)
        self.p = scores.softmax(-1)
        self.mean = self.p @ self.v

    def split(self, x: Tensor) -> list[Tensor]:
        parts = (x @ self.W.T).unflatten(-1, (3, HEADS, -1))
        return list(parts.movedim(0, -2).unbind(0))

    def forth(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        s = (q @ self.k.mT + self.q @ k.mT) * self.p
        heads = self.p @ v + s @ self.v - s.sum(-1, keepdim=True) * self.mean
        return heads.transpose(0, 1).flatten(1) @ self.out.T

    def back(self, y: Tensor) -> Tensor:
        z = (y @ self.out).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        s = (z @ self.v.mT - (z * self.mean).sum(-1, keepdim=True)) * self.p
        parts = torch.stack([s @ self.k, s.mT @ self.q, self.p.mT @ z])
        return parts.movedim(-2, 0).flatten(1) @ self.W


def by_svds(kept: Kept) -> float:
    def flat(product: Any) -> Any:
        def run(v: np.ndarray) -> np.ndarray:
            return product(torch.from_numpy(v.astype(np.float32)).reshape(kept.shape)).ravel()

        return run

    size = math.prod(kept.shape)
    J = LinearOperator(
        (size, size), matvec=flat(kept.forth), rmatvec=flat(kept.back), dtype=np.float32
    )
    return float(svds(J, k=1, tol=1e-4, return_singular_vectors=False, random_state=0)[0])


def by_lobpcg(kept: Kept) -> float:
    def gram(X: np.ndarray) -> np.ndarray:
        columns = torch.from_numpy(X.astype(np.float32)).T.reshape(-1, *kept.shape)
        return torch.stack([kept.back(kept.forth(x)).ravel() for x in columns], -1).numpy()

    size = math.prod(kept.shape)
    start = np.random.default_rng(0).standard_normal((size, 1)).astype(np.float32)
    G = LinearOperator((size, size), matvec=gram, matmat=gram, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, _ = lobpcg(G, start, tol=1e-4, maxiter=200)
    return math.sqrt(float(values[0]))


def by_us(F: SelfAttention, mu: ParticleMeasure) -> float:
    return float(operator_norm(F.linearize(mu), rtol=1e-4, solver=Lanczos()).value)


def row(F: SelfAttention, kind: str, n: int, lobpcg_too: bool) -> dict:
    mu = inputs(F, kind, n)
    runs = {"meanfield": lambda: by_us(F, mu), "svds": lambda: by_svds(Kept(F, mu))}
    if lobpcg_too:
        runs["lobpcg"] = lambda: by_lobpcg(Kept(F, mu))
    values = {}

    def keeping(name: str) -> Any:
        def run() -> None:
            values[name] = runs[name]()

        return run

    times = dict(zip(runs, least(map(keeping, runs), lasting=0.0), strict=True))
    ours = times.pop("meanfield")
    peer = min(times, key=lambda name: times[name])
    found = {"case": f"{kind}, n = {n:,}", "peer": f"{peer} on a kept linearisation"}
    found |= {"ours_s": ours, "peer_s": times[peer], "ratio": times[peer] / ours, "asked": 2.0}
    apart = {name: value / values["meanfield"] - 1 for name, value in values.items()}
    return found | {"machine": machine(), "others_s": times, "relative_to_ours": apart}


def rows(quick: bool, device: str) -> Iterator[dict]:
    if torch.device(device).type != "cpu":
        raise SystemExit("bench_lipschitz: SciPy's solvers are on the host; bench_device measures")
    F = layer()
    for n in (16,) if quick else (128, 512, 1024):
        for kind in ("LayerNormed", "adversarial"):
            yield row(F, kind, n, lobpcg_too=n <= 128)


if __name__ == "__main__":
    main(__file__, rows)
