"""Calls of public functions with well-formed arguments, and which mistakes are none.

Each argument is replaced by the mistakes of its kind (`mistakes.KINDS`), which follows from its
value; what is called at once, as in `layers.Clip(1.0)(mu)`, shows that the call before it works.
A public function without a call here or in `wrong_calls` fails `test_bad_calls`, and so does a
call of a function or argument that is gone.
"""

from __future__ import annotations

MEASURES = """
ParticleMeasure(x, weights=a)
ParticleMeasure(x, log_weights=np.log(a), positions=s)
ParticleMeasure.of(mu)
ParticleMeasure.of(x, a)
ParticleMeasure.from_sequence(x)
mu.replace(tensor(x))
pushforward(torch.tanh, mu, use_positions=False)
disintegrate(seq)
split(mu, 2)
merge(mu, 0.5)
stack([mu, nu])
mixture([mu, nu], [0.25, 0.75])
mu.sample(4, generator=0)
mu.detach()
mu.covariance()
sampling.two_diracs(1.0, -2.0, [1.0, 0.0], heavy_at=-1.0, positioned=False)
sampling.interleaved_diracs(1.0, -2.0, [1.0, 0.0], scales=3, growth=2.0)
sampling.adversarial(A, 1.0, 4, branch="best")
sampling.critical_pair(A, branch="best")
sampling.ball(3, 2, radius=1.0, generator=torch.Generator())
sampling.sphere(3, 2, radius=1.0, generator=torch.Generator())
"""

ATTENTION = """
AttentionParameters(A, V, V, scale=0.5, query_bias=[[0.1, 0.2]])
AttentionParameters.from_bilinear(A, V)
AttentionParameters.random(4, n_heads=2, head_dim=2, generator=torch.Generator())
AttentionParameters.random(4, std=0.5, biases=False, generator=torch.Generator())
AttentionParameters.tied_l2(V, V)
SelfAttention(params, False, kernels.dot_product, normalizations.softmax)(seq)
F(mu)
F.field(mu)
gamma(x)
masked_gamma(x, np.ones(3))
F.linearize(mu, geometry="euclidean")
kernels.soft_cap(2.0)
kernels.cosine(2.0, eps=0.5)
kernels.qk_norm(eps=0.5)
kernels.rotary(100.0, dim=2, length=4.0, interleaved=False)
kernels.window(0.5)
kernels.alibi([0.5, 0.25], length=4.0)
normalizations.sink(0.5)
normalizations.sinkhorn(rtol=1e-6, max_iterations=10, strict=True)
linearize(F, mu, geometry="euclidean")
"""

LAYERS = """
layers.LayerNorm([1.0, 2.0], bias=[0.0, 0.5], eps=0.1)(mu)
layers.RMSNorm([1.0, 2.0], eps=0.1)(mu)
layers.MLP(np.ones((3, 2)), np.ones((2, 3)), activation="gelu")(mu)
layers.Residual(F, scale=0.5)(mu)
layers.Chain([F, F])(mu)
layers.Sum([F, F])(mu)
layers.Clip(1.0)(mu)
layers.Bounded(F, 2.0, "l2")(mu)
layers.Pointwise(torch.sin)(mu)
layers.contractive(F, 0.5, constant=2.0, norm="l2")
layers.invert(growing, mu, rtol=1e-6, max_steps=50, strict=True)
"""

CONSTANTS = """
linalg.operator_norm(J, rtol=1e-3, solver=linalg.Dense(), strict=True)
linalg.Certified(rounds=2, max_steps=20)
linalg.Lanczos(max_steps=20, miss=1e-3, generator=torch.Generator())
local_lipschitz(F, mu, geometry="wasserstein", rtol=1e-3, solver=linalg.Dense(), strict=True)
secant_ratio(F, mu, nu, conditional=False)
euclidean_secant_ratio(lambda x: x**2, x, x + 0.5)
lipschitz.ball_upper(F, mu, 0.1, splitting=True, solver=linalg.Dense())
lipschitz.one_sided(F, mu, rtol=1e-3, upper_rtol=0.1, solver=linalg.Dense(), strict=True)
lipschitz.cache_error(x, (x, x), (y, y), log_weights=np.log(a), scale=1.0, epsilon=0.1)
lipschitz.cache_error(x, None, (y, y), sink=0.5, within=(0.1, s))
lipschitz.Readout([[1.0, 0.5], [0.0, 1.0]], bias=[0.0, 1.0], token=1)
lipschitz.certified_radius(F, lipschitz.Readout(A), mu, solver=linalg.Dense())
lipschitz.worst_case(F, 1.0, n_atoms=2, dim=2, positioned=False, starts=2, steps=1)
lipschitz.localize(constant, F, mu)
lipschitz.compare_lemma_3_2(F, x, steps=[0.1], conditional=False, generator=torch.Generator())
lipschitz.infinity_norm(F, mu)
lipschitz.local_order(F, mu, p=2.0)
"""

BOUNDS = """
bounds.mean_field(1.0, 1.0, 1.0, p=2.0, shift=0.5)
bounds.masked_mean_field(1.0, 1.0, 1.0, dim=1, p=2.0, shift=0.5)
bounds.capped_mean_field(1.0, 1.0, 1.0, 2.0, causal=False, shift=0.5, key_shift=0.5)
bounds.l2_mean_field(1.0, 1.0, 1.0, 2, causal=False)
bounds.mean_field(1.0, 1.0, 1.0, skip=1.0, sink=0.0)
bounds.one_sided(1.0, 1.0, 1.0, shift=0.5)
bounds.tokens(1.0, 1.0, 1.0, 10, causal=False, shift=0.5)
bounds.tokens_lower(1.0, 1.0, 5)
bounds.theorem_3_3(1.0, 1.0, 1.0, 10)
bounds.theorem_3_5(1.0, 1.0, 1.0)
bounds.proposition_3_4(1.0, 1.0, 5)
bounds.proposition_3_6(1.0, 1.0)
bounds.two_dirac_lower(1.0, 1.0, p=2.0)
bounds.masked_two_dirac_lower(1.0, 1.0, p=2.0)
bounds.two_dirac_best_log_ratio(1.0, 1.0, p=2.0)
bounds.scaling_factor(A)
bounds.l2_spread(5)
bounds.l2_theorem_3_2(tied, 5, value=None)
bounds.l2_attention_2(tied, 5)
bounds.l2_attention_inf(tied, 5)
bounds.l2_attention_max(tied, 5)
bounds.local_upper(F, mu)
bounds.table(params, 1.0, 5)
bounds.table(params, 2.0, points=mu)
"""

TRANSPORT = """
w2(mu, nu, method="auto", rtol=1e-9)
w1(mu, nu, rtol=1e-9)
wp(mu, nu, 1.5, rtol=1e-9)
solve_w2(mu, nu, method="auto", rtol=1e-9, exact_weights=False, strict=True)
solve_wp(mu, nu, 3.0, rtol=1e-9, exact_weights=False, strict=True)
transport.certify(mu, nu, p=3.0, rtol=1e-9)
transport.known_problem("gaussian-60-2")
transport.conditional_w2(seq, later, rtol=1e-9)
transport.solve_conditional_w2(seq, later, penalty=1.0, method="auto", rtol=1e-9, strict=True)
transport.sinkhorn_divergence(mu, nu, blur=0.5, scaling=0.5)
transport.conditional_sinkhorn_divergence(seq, later, penalty=1.0, blur=0.5, scaling=0.5)
transport.sinkhorn_plan(mu, nu, blur=0.5, steps=50)
"""

DYNAMICS = """
dynamics.flow(F, mu, [0.0, 1.0], method="rk4", step=0.5, coalesce=0.1)
dynamics.stability(F, mu, [0.0, 1.0], method="rk4", step=0.5)
dynamics.FlowMap(F, 0.5, method="rk4", step=0.5)
dynamics.Adaptive("dopri5", rtol=1e-3, atol=1e-6, max_steps=50)
dynamics.measure_at(flown, 1)
dynamics.cluster_count(mu, 0.1)
"""

BOOKKEEPING = """
cases_of({"a": [1, 2]})
sweep(f, {"radius": [1.0, 2.0]}, seed=0, batch_size=2)
results.fit_power([1.0, 4.0, 9.0], [3.0, 6.0, 9.5], exponent=0.5, level=0.9)
results.to_cube(cases)
results.read_provenance(ds)
results.write_dataset(cases, tmp / "cases.nc")
figures.plot_particle_paths(flown)
"""

GROUPS = {
    "measures": MEASURES,
    "attention": ATTENTION,
    "layers": LAYERS,
    "constants": CONSTANTS,
    "bounds": BOUNDS,
    "transport": TRANSPORT,
    "dynamics": DYNAMICS,
    "bookkeeping": BOOKKEEPING,
}
LINES = [line for text in GROUPS.values() for line in text.strip().splitlines()]
# What looks like a mistake and is none: mistakes, and where: at an argument of this name, at
# `function.argument`, or anywhere in a function, `function.*`.
_CLOUDS = "w1.* w2.* wp.* solve_w2.* solve_wp.* certify.* sinkhorn_divergence.* sinkhorn_plan.*"
_ALONE = "of.value pushforward.mu disintegrate.mu split.mu merge.mu cluster_count.mu table.points"
# Called later, and checked then.
_LATER = "FlowMap.F contractive.F Bounded.map"
_FINE = [
    (
        "0",
        "scale time eps temperature token radius epsilon constant rtol norm_A norm_V norm_G "
        "gamma shift key_shift rank log_ratio exponent coalesce penalty atol std "
        "logits max_iterations seed index heavy_at skip sink",
    ),
    ("-1.0", "scale exponent log_ratio gamma index logits seed heavy_at sink"),
    ("inf", "p n penalty width sink upper_rtol"),
    ("0", "upper_rtol sample.generator"),
    ("None", "Lanczos.generator compare_lemma_3_2.generator"),
    ("None", "cache_error.cache"),  # unknown, but for the steps of a quantiser
    ("-inf", "sink"),
    ("10**30", "n rank"),
    (
        "g + 0.5",
        "l2_spread.n l2_theorem_3_2.n l2_attention_2.n l2_attention_inf.n l2_attention_max.n rank",
    ),
    ("[]", "two_diracs.* interleaved_diracs.* epsilon"),
    ("3.0 | np.array(2.0)", "masked_gamma.s steps log_weights"),
    ("range(3)", "slopes direction times cache_error.log_weights"),
    ("spoilt(g, -inf)", "cache_error.log_weights"),
    ("np.ones((*np.shape(g)[:-1], np.shape(g)[-1] + 1))",
     "ParticleMeasure.points of.value from_sequence.points direction slopes steps Readout.weight"),
    ("np.zeros((*np.shape(g)[:-1], 0))", "Readout.weight"),
    ("tensor(g).float()",
     "points value direction slopes steps times A x y weight weights log_weights positions "
     "cache_error.*"),
    ("frame(array(g))", "weights log_weights positions"),
    ("torch.tensor(spoilt(g, nan))", "replace.points x y"),
    ("spoilt(g, nan)", "x y"),
    ("[g, g]", _CLOUDS),
    ("broken(g, nan) | broken(g, inf)", "F.mu field.mu pushforward.mu split.mu measures"),
    ("ParticleMeasure(torch.ones(3, 5, dtype=torch.float64)) | g.to(torch.float32)", _ALONE),
    ("ParticleMeasure(torch.ones(3, 5, dtype=torch.float64)) | g.to(torch.float32)", "invert.nu"),
    ("lambda mu: ParticleMeasure(mu.points, torch.softmax(mu.points[..., 0], -1))",
     f"Residual.map maps secant_ratio.F {_LATER}"),
    ("lambda mu: ParticleMeasure(mu.points[..., 1:, :])", f"maps secant_ratio.F {_LATER}"),
    ("lambda *a, **k: None | lambda mu: None | lambda mu: mu.points | lambda x: x**2 | "
     "lambda: mu | lambda mu, nu: mu | torch.tanh | torch.nn.Linear(2, 2).double()", _LATER),
    ("F", "table.layer"),
    ('xr.Dataset({"x": ("n", [1.0])})', "cases_of.grid read_provenance.ds write_dataset.ds"),
    ("dict", "sweep.fn"),
]  # fmt: skip
FINE = {
    (mistake, place)
    for wrong, places in _FINE
    for mistake in wrong.split(" | ")
    for place in places.split()
}
