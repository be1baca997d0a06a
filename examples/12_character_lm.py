"""Character language models
=========================

Four kinds of attention, and the inverse of the contractive one.

::

    python examples/12_character_lm.py [--quick] [--out DIR] [--text FILE] [sizes, see --help]

After [KPM21] Section 5.3, at a size that a CPU trains in minutes: dot-product attention, L2
attention, tied L2 attention, and tied L2 attention in residual layers x + c f(x)/L that can be
inverted. The blocks are the maps of measures of this package, so that what is trained is what is
measured and inverted. A run that is killed goes on from its last checkpoint, bit by bit the same.
"""

# %%
import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from meanfield import bounds, corpora, figures, results, sweep
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.figures.selection import by_level, select
from meanfield.layers import MLP, Bounded, Chain, LayerNorm, Residual, invert
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.sweeps import Task

VARIANTS = ("dot product", "L2", "tied L2", "contractive L2")
EVALUATIONS = 10  # points of the loss curves
SLOPE = 1.12891  # sup |φ'| of gelu, see meanfield.layers.ACTIVATIONS

parser = argparse.ArgumentParser(description="Character language models")
parser.add_argument("--quick", action="store_true", help="a smoke test: tiny sizes")
parser.add_argument("--out", type=Path, default=Path("results/12_character_lm"))
parser.add_argument("--text", default=None, help="a text file; 'alice' where MEANFIELD_DATA is")
parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
parser.add_argument("--depths", nargs="+", type=int, default=(1, 2, 4))
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--dim", type=int, default=32)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--rate", type=float, default=3e-3, help="of Adam, fixed")
parser.add_argument("--factor", type=float, default=0.7, help="c of the contractive layers")
parser.add_argument("--checkpoint-every", type=int, default=50)


# %%
# The text: characters as numbers, the last tenth for validation.
@dataclass(frozen=True)
class Text:
    """Characters as numbers."""

    train: Tensor
    valid: Tensor
    n_symbols: int

    @classmethod
    def of(cls, text: str) -> "Text":
        """The last tenth is for validation."""
        symbols = sorted(set(text))
        numbers = torch.tensor([symbols.index(c) for c in text])
        cut = len(numbers) * 9 // 10
        return cls(numbers[:cut], numbers[cut:], len(symbols))

    def batch(self, count: int, context: int, seed: int, step: int) -> Tensor:
        """Windows of context + 1 characters: a function of seed and step, so nothing is stored."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - context, (count,), generator=generator)
        return torch.stack([self.train[s : s + context + 1] for s in starts.tolist()])

    def windows(self, context: int, most: int = 64) -> Tensor:
        """Validation windows that do not overlap."""
        count = min(most, (len(self.valid) - 1) // context)
        return torch.stack([self.valid[k * context : (k + 1) * context + 1] for k in range(count)])


# %%
# The model: named matrices, and the maps that they make.
@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    variant: str
    depth: int
    dim: int
    heads: int
    context: int
    factor: float
    n_symbols: int


def initial(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Independent normal entries of standard deviation 1/√(columns); norms start at one."""
    generator = torch.Generator().manual_seed(seed)
    d, k = shape.dim, shape.dim // shape.heads

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) / math.sqrt(size[-1])

    found = {"symbols": draw(shape.n_symbols, d), "places": draw(shape.context, d)}
    found |= {"gain": torch.ones(d), "readout": draw(shape.n_symbols, d)}
    for b in range(shape.depth):
        matrices = {"query": (shape.heads, k, d), "value": (shape.heads, k, d), "output": (d, d)}
        if shape.variant in ("dot product", "L2"):
            matrices["key"] = (shape.heads, k, d)
        matrices |= {"inner": (4 * d, d), "outer": (d, 4 * d)}
        found |= {f"{b}.{name}": draw(*size) for name, size in matrices.items()}
        if shape.variant != "contractive L2":
            found |= {f"{b}.gain{i}": torch.ones(d) for i in (1, 2)}
    return found


def norm(matrix: Tensor) -> Tensor:
    """The spectral norm, exact and differentiable."""
    return torch.linalg.matrix_norm(matrix, 2)


def attention(shape: Shape, w: dict[str, Tensor]) -> SelfAttention:
    """The attention of one block; contractive: times c over its constant in maxᵢ|xᵢ|."""
    kernel = kernels.dot_product if shape.variant == "dot product" else kernels.l2
    output = w["output"].unflatten(1, (shape.heads, -1)).movedim(1, 0)
    if "key" in w:
        parameters = AttentionParameters(w["query"], w["key"], w["value"], output)
        return SelfAttention(parameters, causal=True, kernel=kernel)
    if shape.variant == "contractive L2":
        # ‖[W_h]‖ (Σ ‖B_h‖²‖Q_h‖²)^½ (1 + 4c), one of the forms of bounds.l2_attention_max.
        middles = w["value"] @ w["query"].mT / math.sqrt(w["query"].shape[-2])
        sizes = (norm(middles) * norm(w["query"])).square().sum().sqrt()
        constant = (1 + 4 * bounds.l2_spread(shape.context)) * sizes * norm(w["output"])
        output = shape.factor * output / constant
    parameters = AttentionParameters.tied_l2(w["query"], w["value"], output)
    return SelfAttention(parameters, causal=True, kernel=kernel)


def feed_forward(shape: Shape, w: dict[str, Tensor]) -> MLP:
    """The MLP of one block; contractive: times c over ‖W₂‖ sup|φ'| ‖W₁‖."""
    outer = w["outer"]
    if shape.variant == "contractive L2":
        outer = shape.factor * outer / (SLOPE * norm(outer) * norm(w["inner"]))
    return MLP(w["inner"], outer, activation="gelu")


def network(shape: Shape, weights: dict[str, Tensor]) -> Chain:
    """The blocks as maps of measures: pre-norm, or without norms where they are contractive."""
    maps = []
    for b in range(shape.depth):
        w = {n.split(".", 1)[1]: t for n, t in weights.items() if n.startswith(f"{b}.")}
        for i, make in enumerate((attention, feed_forward), start=1):
            layer = make(shape, w)
            if shape.variant != "contractive L2":
                layer = Chain([LayerNorm(w[f"gain{i}"]), layer])
            maps.append(Residual(layer))
    return Chain(maps)


def embedded(weights: dict[str, Tensor], numbers: Tensor) -> ParticleMeasure:
    """Tokens as the measure of a sequence, (batch, n, d)."""
    return ParticleMeasure.from_sequence(
        weights["symbols"][numbers] + weights["places"][: numbers.shape[-1]]
    )


def loss(shape: Shape, weights: dict[str, Tensor], windows: Tensor) -> Tensor:
    """Mean cross entropy in nats per character."""
    mu = network(shape, weights)(embedded(weights, windows[:, :-1]))
    logits = LayerNorm(weights["gain"])(mu).points @ weights["readout"].mT
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def bits(shape: Shape, weights: dict[str, Tensor], text: Text) -> float:
    """Validation bits per character."""
    with torch.no_grad():
        return float(loss(shape, weights, text.windows(shape.context))) / math.log(2)


# %%
# Checkpoints: weights, both moments of Adam, the step and the curve, in one atomic file.
def save(path: Path, weights: dict[str, Tensor], adam: torch.optim.Adam, state: dict) -> None:
    tensors = {f"weight.{n}": t.detach().contiguous() for n, t in weights.items()}
    for name, tensor in weights.items():
        for key, value in adam.state.get(tensor, {}).items():
            tensors[f"{key}.{name}"] = value.contiguous()
    temporary = path.with_suffix(".part")
    save_file(tensors, temporary, metadata={"state": json.dumps(state)})
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def restore(path: Path, weights: dict[str, Tensor], adam: torch.optim.Adam) -> dict:
    with safe_open(path, "pt") as file, torch.no_grad():
        keys = set(file.keys())
        for name, tensor in weights.items():
            tensor.copy_(file.get_tensor(f"weight.{name}"))
            parts = {key: f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
            if parts["step"] in keys:
                adam.state[tensor] = {k: file.get_tensor(full) for k, full in parts.items()}
        return json.loads(file.metadata()["state"])


# %%
# Training one model.
def train(shape: Shape, text: Text, path: Path, *, seed: int, steps: int, batch: int, rate: float,
          every: int) -> tuple[dict[str, Tensor], list[float]]:  # fmt: skip
    """The weights after `steps` of Adam, and the bits along the way."""
    weights = {n: t.requires_grad_() for n, t in initial(shape, seed).items()}
    adam = torch.optim.Adam(weights.values(), lr=rate)
    state = {"step": 0, "curve": []}
    if path.exists():
        state = restore(path, weights, adam)
        print(f"{path.name}: goes on from step {state['step']}")
    marks = {steps * (k + 1) // EVALUATIONS for k in range(EVALUATIONS)}
    bar = tqdm(range(state["step"], steps), initial=state["step"], total=steps, disable=None,
               desc=path.stem, leave=False)  # fmt: skip
    for step in bar:
        value = loss(shape, weights, text.batch(batch, shape.context, seed, step))
        now = float(value.detach())
        if not math.isfinite(now):
            raise FloatingPointError(f"{path.stem}: the loss is {now} at step {step}")
        adam.zero_grad()
        value.backward()
        adam.step()
        done = step + 1
        if done in marks:
            state["curve"].append(bits(shape, weights, text))
        if done % every == 0 or done == steps:
            state["step"] = done
            save(path, weights, adam, state)
        bar.set_postfix(bits=f"{now / math.log(2):.3f}")
    return {n: t.detach() for n, t in weights.items()}, state["curve"]


# %%
# What is certain of the trained contractive model.
def certified(shape: Shape, weights: dict[str, Tensor]) -> Chain:
    """The network in float64, each layer with its bound: c is computed again, not believed."""
    maps = []
    for layer in network(shape, {n: t.double() for n, t in weights.items()}).maps:
        F = layer.map
        attends = isinstance(F, SelfAttention)
        constant = bounds.l2_attention_max(F, shape.context) if attends else F.global_upper
        maps.append(Residual(Bounded(F, constant, "max"), layer.scale))
    return Chain(maps)


def inverted(shape: Shape, weights: dict[str, Tensor], text: Text) -> dict[str, float]:
    """Embeddings found again from the last hidden states of validation text."""
    G = certified(shape, weights)
    double = {n: t.double() for n, t in weights.items()}
    mu = embedded(double, text.windows(shape.context, 4)[:, :-1])
    found = invert(G, G(mu), rtol=5e-7, strict=False)
    length = torch.linalg.vector_norm
    sizes = length(mu.points, dim=(-2, -1)) / shape.context**0.5
    off = length(found.measure.points - mu.points, dim=(-2, -1)) / shape.context**0.5
    return {
        "inverse_certified": float((found.error / sizes).max()),
        "inverse_error": float((off / sizes).max()),
        "inverse_converged": bool(found.converged.all()),
        "inverse_steps": found.n_steps,
        "inverse_factor": found.factor,
    }


def constants(shape: Shape, weights: dict[str, Tensor], text: Text) -> tuple[list, list]:
    """The Euclidean constant of each contractive layer at validation text, and its bound."""
    double = {n: t.double() for n, t in weights.items()}
    mu = embedded(double, text.windows(shape.context, 1)[0, :-1])
    measured, upper = [], []
    for layer in network(shape, double).maps:
        F = layer.map
        attends = isinstance(F, SelfAttention)
        here = local_lipschitz(
            F, mu, geometry="euclidean", rtol=1e-2, upper_rtol=0.1, solver=Lanczos()
        )
        measured.append(float(here.value))
        upper.append(bounds.l2_attention_2(F, shape.context) if attends else F.global_upper)
        mu = layer(mu)
    return measured, upper


def case(variant: str, depth: int, replica: int, *, text: Text, options: argparse.Namespace,
         folder: Path) -> dict:  # fmt: skip
    """Train one model and look at it."""
    shape = Shape(variant, depth, options.dim, options.heads, options.context, options.factor,
                  text.n_symbols)  # fmt: skip
    path = folder / f"{variant.replace(' ', '-')}_{depth}_{replica}.safetensors"
    how = {"steps": options.steps, "batch": options.batch, "rate": options.rate}
    weights, curve = train(shape, text, path, seed=replica, every=options.checkpoint_every, **how)
    layers = 2 * max(options.depths)
    nothing = [math.nan] * layers
    answer = {"bits": curve[-1], "curve": curve, "measured": nothing, "bound": nothing,
              "inverse_certified": math.nan, "inverse_error": math.nan,
              "inverse_converged": True, "inverse_steps": math.nan,
              "inverse_factor": math.nan}  # fmt: skip
    if variant == "contractive L2":
        answer |= inverted(shape, weights, text)
        for name, found in zip(
            ("measured", "bound"), constants(shape, weights, text), strict=True
        ):
            answer[name] = found + [math.nan] * (layers - len(found))
    return answer


Variable = results.Variable
VARIABLES = (
    Variable("bits", "validation bits per character", "bit"),
    Variable("curve", "validation bits per character along the training", "bit", ("evaluation",)),
    Variable("measured", "Euclidean constant of the layer at validation text", dims=("layer",)),
    Variable("bound", "upper bound of that constant", dims=("layer",)),
    Variable("inverse_certified", "certified relative error of the embeddings found again"),
    Variable("inverse_error", "true relative error of the embeddings found again"),
    Variable("inverse_converged", "whether 1e-6 was certified", dtype="bool"),
    Variable("inverse_steps", "evaluations of layers that the inverse took"),
    Variable("inverse_factor", "largest certified contraction factor"),
)
PARAMETERS = (
    Variable("variant", "kind of attention", dtype="str"),
    Variable("depth", "number of blocks", dtype="int64"),
    Variable("replica", "seed", dtype="int64"),
    Variable("evaluation", "training steps", dims=("evaluation",), dtype="int64"),
    Variable("layer", "layer: attention and feed-forward in turn", dims=("layer",), dtype="int64"),
)


# %%
def main() -> None:
    options = parser.parse_args()
    if options.quick:
        small = {"depths": (1, 2), "seeds": 1, "dim": 16, "heads": 2, "context": 16, "batch": 8}
        vars(options).update(small, steps=20, checkpoint_every=5)
    source = options.text or ("alice" if os.environ.get("MEANFIELD_DATA") else __file__)
    corpus = corpora.corpus(source, download=False)
    text = Text.of(corpus.text)
    folder = options.out / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{corpus}, {text.n_symbols} symbols")

    sizes = {name: getattr(options, name) for name in ("dim", "heads", "context", "batch",
                                                       "steps", "rate", "factor")}  # fmt: skip
    # Checkpoints and results of other settings are other runs.
    marks = sizes | {"text": corpus.sha256, "layers": 2 * max(options.depths)}
    record = options.out / "settings.json"
    if record.exists() and json.loads(record.read_text()) != marks:
        raise SystemExit(f"{options.out} holds a run with other settings; choose another --out")
    record.write_text(json.dumps(marks))
    coords = {
        "evaluation": [options.steps * (k + 1) // EVALUATIONS for k in range(EVALUATIONS)],
        "layer": range(1, 2 * max(options.depths) + 1),
    }

    def model(variant: str, depth: int, replica: int) -> dict:
        return case(variant, depth, replica, text=text, options=options, folder=folder)

    # Seed by seed, so that a run that is stopped early has compared all variants.
    grid = {"replica": range(options.seeds), "depth": options.depths,
            "variant": options.variants}  # fmt: skip
    task = Task(model, VARIABLES, PARAMETERS, coords, name="character-lm")
    ds = sweep(task, grid, store=options.out / "runs.zarr", batch_size=1, attrs=marks,
               progress=False)  # fmt: skip
    report(ds, options.out)


def report(ds, out: Path) -> None:
    """The table, the files and the figures."""
    results.write_dataset(ds, out / "character_lm.nc")
    table = ds[["bits", "inverse_certified", "inverse_error", "inverse_steps"]].to_dataframe()
    table = table.set_index(["variant", "depth", "replica"])
    print(table.drop(columns=["status", "message"], errors="ignore").to_string())
    print("messages:", [m for m in ds.message.values if m] or "none")
    with figures.style():
        bits_per_character(ds).figure.savefig(out / "bits.png")
        training_curves(ds).figure.savefig(out / "curves.png")
        contractive = np.flatnonzero(ds.variant.values == "contractive L2")
        if len(contractive):
            deepest = contractive[np.argmax(ds.depth.values[contractive])]
            layers = ds.isel(case=deepest).dropna("layer", subset=["measured"])
            layer_constants(layers).figure.savefig(out / "constants.png")


@figures.figure("bits")
def bits_per_character(ds, *, ax):
    """Validation bits per character against depth: each seed a dot, lines through the means."""
    for colour, variant, rows in by_level(ds, "variant"):
        means = rows.groupby("depth").mean()
        ax.plot(rows.depth, rows.bits, "o", color=colour, alpha=0.4)
        ax.plot(means.depth, means.bits, "-", color=colour, label=variant)
    ax.set(xlabel="number of blocks", ylabel="validation bits per character")
    ax.set_title("Character language model, a small replica")
    ax.set_xticks(np.unique(ds.depth.values))
    return ax


@figures.figure("curve")
def training_curves(ds, *, ax):
    """Validation bits per character along the training of the deepest models, means over seeds."""
    depth = int(ds.depth.max())
    for colour, variant, rows in by_level(select(ds, depth=depth), "variant"):
        ax.plot(rows.evaluation, rows.curve.mean("case"), "-", color=colour, label=variant)
        ax.plot(rows.evaluation, rows.curve.T, ".", color=colour, alpha=0.4)
    ax.set(xlabel="training steps", ylabel="validation bits per character")
    ax.set_title(f"Training of {depth} blocks at a fixed rate")
    return ax


@figures.figure("bound", "measured")
def layer_constants(ds, *, ax):
    """The constant of each trained layer at the text, beside its bound."""
    ax.plot(ds.layer, ds.bound, "s--", color="tab:red", label="bound")
    ax.plot(ds.layer, ds.measured, "o-", color="tab:blue", label="measured at the text")
    ax.set(yscale="log", xlabel="layer", ylabel="Lipschitz constant")
    ax.set_title("The trained layers, and what is certain of them")
    ax.set_xticks(ds.layer.values)
    return ax


if __name__ == "__main__":
    main()
