"""Calls that are wrong as a whole, as people type them, and odd ones that mean something.

Swapped arguments, habits from other libraries, and mistakes that only the whole call shows; one
wrong argument alone is made by `right_calls`. ``python -m tests.interface.wrong_calls`` prints
what each says, to be read by eye.
"""

from __future__ import annotations

MEASURES = """
ParticleMeasure(x, [1, 1, 1])
ParticleMeasure(x, [0.5, 0.6, -0.1])
ParticleMeasure(x, weights=a, log_weights=np.log(a))
ParticleMeasure(x, positions=[1, 2, 3])
ParticleMeasure(frame_of_x, shuffled)
np.asarray(mu)
list(mu)
mu[0]
len(mu)
mu + mu
2 * mu
mu @ mu
-mu / 2
mu < mu
abs(mu)
round(mu)
int(mu)
np.mean(mu)
float(mu)
np.add(mu, 1)
torch.as_tensor(mu)
mu.to("float32")
mu.to("cuda:99")
mu.to(torch.float16)
mu.replace(torch.ones(2, 2, dtype=torch.float64))
pushforward(lambda p, s: p, mu, use_positions=True)
stack(mu)
stack([])
disintegrate(mu)
"""

TRANSPORT = """
w2(x)
w2(a, a, np.ones((3, 3)))
w2(x, y, weights=a)
w2([x, y], [x, y, x])
w2(x, y, p=1)
w2(x, y, method="sinkhorn")
w2(x, y, rtol=0)
w2(frame_of_x, (frame_of_x, shuffled))
w2(frame_of_x, frame_of_x[frame_of_x.columns[::-1]])
w2(frame_of_x, frame_of_x.rename(columns={1: 2}))
solve_w2(x, y)["value"]
list(solve_w2(x, y))
len(solve_w2(x, y))
torch.tensor(solve_w2(x, y))
w2(frame_of_x, frame_of_x.set_axis(["1", "0"], axis=1))
w2((frame_of_x, a), (frame_of_x[frame_of_x.columns[::-1]], a))
transport.certify(x, y, plan=np.ones((2, 2)))
transport.certify(x, y, plan=np.ones((3, 3)))
transport.certify(x, y, plan=-np.eye(3) / 3)
transport.certify(x, y, plan=np.full((3, 3), np.nan))
transport.certify(x, y, potentials=np.ones(3))
transport.certify(x, y, potentials=(np.ones(3), np.ones(5)))
transport.certify(x, y, potentials=(np.ones(3), np.ones(3), np.ones(3)))
transport.certify(x, y, plan="simplex")
transport.conditional_w2(x, y, conditions=a)
"""

ATTENTION = """
AttentionParameters(np.ones((2, 2, 4)), np.ones((2, 2, 4)), np.ones((2, 2, 4)))
AttentionParameters.from_bilinear(np.ones((2, 3)), V)
AttentionParameters.random(5, n_heads=2)
AttentionParameters.random(4, dtype="float32")
AttentionParameters.from_module(torch.nn.Linear(2, 2))
AttentionParameters.from_module(torch.nn.MultiheadAttention(4, 2, kdim=3))
F.parameters.to("gpu")
F.parameters.head(3)
F.parameters.head(0.5)
F.parameters.head("0")
F.parameters * 2
np.asarray(F.weights(mu))
linalg.LinearMap.diagonal(torch.ones(2))
F + F
2 * F
F @ F
F ** 2
kernels.l2(1.0)
local_lipschitz(kernels.l2, mu)
layers.Pointwise(kernels.l2)
local_lipschitz(layers.Pointwise(np.tanh), mu)
local_lipschitz(lambda m: m.replace(torch.from_numpy(np.tanh(m.points.numpy()))), mu)
pushforward(kernels.l2, mu)
normalizations.softmax(x)
SelfAttention(F.parameters, normalization=normalizations.sink([0.1, 0.2, 0.3]))(mu)
F.parameters.after(F)
SelfAttention(F.parameters, True, normalization=normalizations.sinkhorn())
SelfAttention(F.parameters, kernel=kernels.alibi([0.5, 0.25]))(seq)
SelfAttention(F.parameters, kernel=kernels.rotary())(mu)
kernels.window(128)
SelfAttention(F.parameters, kernel=kernels.rotary(dim=3))(seq)
F(mu, nu)
SelfAttention(F.parameters, causal=True).field(seq)(x)
kernels.soft_cap(2.0, inner="l2")
kernels.qk_norm(query_gain=None)
kernels.qk_norm(1.0, np.nan)
linearize(F, mu).atoms @ x
np.asarray(linearize(F, mu).atoms)
np.asarray(solve_w2(x, y).coupling)
solve_w2(x, y).coupling @ x
layers.Pointwise(torch.tanh, lipschitz="abc")
lipschitz.Readout(np.ones((3, 0)))
bounds.l2_mean_field(1.0, 1.0, 1.0, 1, causal=np.array([True, False]))
normalizations.RowWise("exp")
"""

LAYERS = """
layers.Chain(F)
layers.Chain([F, torch.nn.Linear(2, 2)])
layers.Residual(torch.nn.Linear(2, 2))
layers.Chain([])
layers.Pointwise(torch.sin, lipschitz=-1)
"""

CONSTANTS = """
local_lipschitz(lambda m: m.replace(m.points.detach() * 2), mu)
local_lipschitz(lambda m: m.replace(torch.randn_like(m.points)), mu)
local_lipschitz(lambda m: m.replace(m.points.mean(-2, keepdim=True) + m.points), light)
local_lipschitz(lambda m: m.replace(m.points.reshape(3, 2) * 2), mu)
local_lipschitz(lambda m: m.replace(torch.relu(m.points)), ParticleMeasure(np.zeros((2, 2))))
secant_ratio(F, mu, mu)
secant_ratio(F, mu, seq)
secant_ratio(F, mu, seq, conditional=True)
lipschitz.ball_upper(F, mu, [[0.1, 0.2], [0.3]])
lipschitz.certified_radius(lambda m: ParticleMeasure(m.points[:2]), lipschitz.Readout(A), mu)
lipschitz.worst_case(lambda m: m, 1.0)
lipschitz.worst_case(F, 1.0, dim=3)
lipschitz.local_order(F, mu)
lipschitz.certified_radius(F, lipschitz.Readout(np.ones((2, 5))), mu)
lipschitz.certified_radius(F, lipschitz.Readout(np.ones((2, 2)), token=9), mu)
"""

BOUNDS = """
bounds.mean_field(A, V, 3.0)
bounds.l2_attention_inf(SelfAttention(tied), 3)
bounds.table(F, 0.0, 2)
bounds.table((A, V, V), 1.0)
bounds.table(layers.Chain([F, F]), 1.0)
bounds.table(F, 1.0).row("theorem")
"""

DYNAMICS = """
dynamics.flow(F, mu, 5.0)
dynamics.flow(F, mu, [0.0, 1.0], method="rk4")
dynamics.flow(F, mu, [0.0, 1.0], step=0.1)
dynamics.flow(F, mu, [0.0, 1.0], constraint="ball")
dynamics.flow(F, mu, [0.0, 1.0], constraint=True)
dynamics.flow([F], mu, [0.0, 1.0])
dynamics.flow(F, mu, [0.0, 1.0], observe={"a": 3})
dynamics.flow(F, mu, [0.0, 1.0], observe={"a": kernels.l2})
dynamics.flow(SelfAttention(F.parameters, causal=True), mu, [0.0, 1.0])
dynamics.stability(F, mu, [0.0, 1.0], method="euler")
dynamics.measure_at(flown, 5)
dynamics.log_energy(mu, np.ones((3, 3)))
dynamics.log_energy(mu, torch.eye(2))
dynamics.log_energy(mu, np.full((2, 2), np.nan))
sampling.ball(3, 2, dtype="float32")
"""

BOOKKEEPING = """
sweep(f, {})
sweep(f, {"radius": 1.0})
sweep(f, {"wrong": [1.0, 2.0]})
sweep(f, {"radius": [1.0]}, fixed={"radius": 2.0})
sweep(f, {"radius": [1.0]}, fixed=2)
sweep(kernels.l2, {"radius": [1.0]})
sweep(f, {"radius": [1.0]}, executor=0)
sweep(f, {"radius": [1.0]}, executor="dask")
sweep(lambda radius: {"y": radius}, {"radius": [1.0]}, executor=2)
sweep(f, {"radius": [1.0]}, store=3)
sweep(f, {"radius": [1.0]}, store=tmp / "s.nc")
sweep(f, {"radius": [1.0]}, progress="tqdm")
sweep(f, {"radius": [1.0]}, store=__file__)
sweep(f, {"radius": [1.0]}, shard=(0, 2))
sweep(f, {"radius": [1.0]}, shard="0/2", store=tmp / "s")
sweep(f, {"radius": [1.0]}, case_timeout=1.0)
sweeps.status("/nowhere/at/all.sweep")
sweeps.status(__file__)
results.read_dataset("/nowhere/at/all.nc")
results.read_dataset(__file__)
results.read_dataset(3)
results.read_dataset(tmp)
results.write_dataset(ds, tmp / "a.csv")
results.write_dataset(ds, __file__)
results.to_cube(flown)
results.to_cube(ds, parameters=["radiuss"])
results.numbers(flown.points.values)
results.fit_power([1.0], [1.0])
experiments.get("two_dirac")
experiments.get(2)
figures.plot_particle_paths(ds)
figures.plot_growth(ds)
figures.plot_constants(ds)
figures.style("papr")
list(figures.save_all({}, {}, tmp, formats=("bmp",)))
corpora.windows("abc", 3, 4)
corpora.windows(corpora.Corpus("abc", "abc", ""), 3, 4)
corpora.windows([1, 2, 3], 0.5, 2)
write_report(ds, tmp / "page.pdf")
write_report(mu, tmp / "page.html")
experiments.get("two-dirac").figures["growth-in-n"](flown)
pretrained.load("/nowhere/at/all")
pretrained.load("random:bert-large-uncased-xyz")
pretrained.load("random:gpt5")
pretrained.load(3)
pretrained.read(torch.nn.Linear(2, 2))
encoder().attention(5)
encoder().attention(0.5)
encoder().block("0")
encoder().embeddings("a text")
"""

# Typed from the README and the gallery, in a first hour.
FIRST_HOUR = """
ParticleMeasure(x.T, a)
ParticleMeasure(frame_of_x.rename(columns={1: "weight"}))
w2(frame_of_x.rename(columns={1: "weights"}), y)
ParticleMeasure(xr.DataArray(x, dims=("dim", "sample")))
ParticleMeasure(x, xr.DataArray(a, dims="token"))
w2(x_labelled, y_swapped)
w2(frame_of_x, y_swapped)
ParticleMeasure(x_labelled, xr.DataArray(a, [("particle", [2, 1, 0])]))
conditional_w2(frame_of_x, y, conditions=(shuffled, s))
lipschitz.localize(local_lipschitz(F, mu), F, mu.replace(2 * mu.points))
lipschitz.localize(local_lipschitz(F, mu), lambda m: m.replace(2 * F(m).points), mu)
solve_w2(x, y).coupling.interpolate(np.linspace(0, 1, 5))
local_lipschitz(layers.Pointwise(lambda p: p - p.mean(0)), mu)
layers.Pointwise(lambda p: p.cumsum(0)).local_upper(mu)
mu.replace(points=y, weights=a)
mu.replace(y, a)
F(mu, causal=True)
F(x, y)
solve_w2(x, y).save(3)
solve_w2(x, y).save("w2.json")
transport.certify(x, y, plan=[0, 1])
transport.certify(x, y, plan=[0, 1, 5])
transport.certify(x, y, plan=solve_w2(x, y))
AttentionParameters.from_module(torch.nn.MultiheadAttention(4, 2, add_bias_kv=True))
SelfAttention(F.parameters, kernel=kernels.soft_cap)
layers.MLP(A, A, "gelu")
local_lipschitz(torch.nn.MultiheadAttention(2, 1).double(), mu)
local_lipschitz(lambda m: m.replace(torch.nn.Linear(2, 2)(m.points)), mu)
dynamics.flow(F, ParticleMeasure(np.zeros((2, 2))), [0.0, 1.0], constraint="sphere")
sweep(f, {"radius": [1.0, "2"]})
sweep(f, {"radius": [[1.0, 2.0]]})
sweep(lambda radius: 2 * radius, {"radius": [1.0]})
sweep(lambda radius: {"y": np.ones(2)}, {"radius": [1.0]})
results.write_dataset(tmp / "a.nc", ds)
results.fit_power(ds, "radius")
figures.plot_growth(ds, x="raduis", y="y")
figures.plot_particle_paths(flown, ax=3)
experiments.get("two-dirac").run({"radii": [1.0]})
experiments.get("two-dirac").run(radii=[1.0])
pretrained.load("gpt2", download="yes")
pretrained.load("random:llama", config={"num_layers": 2})
pretrained.load("random:llama", config=3)
pretrained.load("random:llama", dtype="float32")
encoder().constants(mu)
encoder().embeddings(x)
"""

# What may be typed for what, and means it.
EQUAL = """
w2(frame_of_x, y) | w2(x, y)
w2(x.tolist(), torch.tensor(y)) | w2(x, y)
w2(x.astype(">f8"), y[:, ::-1][:, ::-1]) | w2(x, y)
w2((torch.tensor(x), torch.tensor(a).float()), ParticleMeasure(y)) | w2((x, a), y)
w2((x, [a, a[::-1]]), y) | [w2((x, a), y), w2((x, a[::-1]), y)]
w2((x, [a, a[::-1]]), (y, a)) | [w2((x, a), (y, a)), w2((x, a[::-1]), (y, a))]
F(ParticleMeasure(x, [a, a[::-1]])).points[1] | F(ParticleMeasure(x, a[::-1])).points
w2((x, a.tolist()), ParticleMeasure(y)) | w2((x, a), y)
w2(x, y, weights=(a, None)) | w2((x, a), y)
w2([x, y[:2]], [x]) | [0.0, w2(y[:2], x)]
w2(np.int8([[100, 0]]), [[-100, 0]]) | 200.0
ParticleMeasure(frame_of_x, pd.Series(a)).weights | a
mu.to("cpu", torch.float64).points | x
mu.to(dtype=torch.float32).to(torch.float64).points | x.astype(np.float32)
transport.sinkhorn_divergence(x[:1], x[:1]) | 0.0
transport.conditional_sinkhorn_divergence(seq, seq) | 0.0
transport.conditional_w2(seq, ParticleMeasure.from_sequence(x[:2])) | np.inf
AttentionParameters(A.tolist(), torch.tensor(V), V).A[0] | A / np.sqrt(2)
AttentionParameters.tied_l2(A, V).value[0] | V @ A.T @ A / np.sqrt(2)
bounds.mean_field(np.float32(1), True + 0, [3.0])[0] | bounds.mean_field(1.0, 1.0, 3.0)
[constant < 3, 3 > constant, constant <= constant, constant >= 2] | [1, 1, 1, 0]
[2 * constant, constant - 1, 1 / constant] | 2 * C, C - 1, 1 / C
[constant**2, round(constant, 2), -1 + constant] | C**2, round(C, 2), C - 1
[-constant, abs(-constant), constant == C, constant != C] | -C, C, True, False
[bool(solve_w2(x, x)), bool(constant), constant == constant] | False, True, True
[np.mean([constant, constant]), max(0.0, constant)] | [C, C]
np.arange(2.0) * solve_w2(mu, nu) | [0.0, w2(mu, nu)]
J.shape | J.to_dense().shape
[len(stack([mu, mu, mu])), bool(mu), bool(stack([mu]))] | [3, 1, 1]
w2(frame_of_x, frame_of_x.rename(columns={0: "u", 1: "v"})) | 0.0
split(mu, np.int64(2)).points | np.repeat(x, 2, 0)
dynamics.FlowMap(F, 0)(mu).points | x
np.array([F, F.parameters], dtype=object).shape | [2]
pd.DataFrame({"layer": [F.parameters]}).shape | [1, 1]
layers.Chain([torch.nn.Identity(), torch.nn.Sequential(torch.nn.Identity())])(mu).points | x
lipschitz.compare_lemma_3_2(F, x, steps=0.1).step | [0.1]
sampling.sphere(2, 3, dtype=torch.float32).norm(dim=-1) | [1.0, 1.0]
"""

GROUPS = {
    "measures": MEASURES,
    "transport": TRANSPORT,
    "attention": ATTENTION,
    "layers": LAYERS,
    "constants": CONSTANTS,
    "bounds": BOUNDS,
    "dynamics": DYNAMICS,
    "bookkeeping": BOOKKEEPING,
    "first hour": FIRST_HOUR,
}
PAIRS = [line.split(" | ") for line in EQUAL.strip().splitlines()]
LINES = [line for text in GROUPS.values() for line in text.strip().splitlines()]


if __name__ == "__main__":
    import sys
    import tempfile
    import warnings
    from pathlib import Path

    from tests.interface import calls

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        for line in LINES:
            verdict, said = calls.ending(line, Path(name))
            sys.stdout.write(
                f"{'' if verdict == 'clear' else verdict.upper() + ' '}{line}\n    {said}\n"
            )
