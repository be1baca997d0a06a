"""The matrices of a multi-head attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from meanfield.checks import (
    as_bool,
    as_dtype,
    as_float_tensor,
    as_generator,
    check_finite,
    check_move,
    check_same_kind,
    count,
    describe,
    number,
    without_autocast,
)
from meanfield.copies import own_copy
from meanfield.habits import Hinted, NoArithmetic, with_hints
from meanfield.html import html_table, span
from meanfield.maps import Map
from meanfield.maps.map import as_map
from meanfield.results.labels import copied


@dataclass(frozen=True, eq=False, repr=False, init=False)
class AttentionParameters(NoArithmetic, Hinted):
    """Query, key, value and output matrices of H heads, with biases.

    Head h of dot-product attention sends a query point x and atoms yⱼ to
    W^h Σⱼ Pⱼ (V^h yⱼ + b_V^h), Pⱼ ∝ aⱼ exp(scale · ⟨Q^h x + b_Q^h, K^h yⱼ + b_K^h⟩);
    the layer sums the heads and adds b_O ([CAP24] Def. 2.1, 2.2 and App. E.3). Under the softmax
    of dot products a key bias changes nothing; with rotary positions, or for other kernels, it
    does. Several query heads may share one key and value head (grouped heads): query head h then
    uses key and value head ⌊hG/H⌋. Matrices map columns, as the weights of `torch.nn.Linear` do:
    outputs × inputs, here and everywhere else. The matrices of [KPM21] and those that multiply
    rows, X W^Q, are their transposes. They are copies, through which gradients go to what they
    were made of; after a step of an optimiser this is to be made anew.

    Args:
        query: Q, shape (H, k, d); a matrix (k, d) is one head.
        key: K, shape (H, k, d), or (G, k, d) with G dividing H.
        value: V, shape (H, v, d), or (G, v, d).
        output: W, shape (H, d_out, v); the identity if None, which needs one head.
        query_bias: b_Q, shape (H, k).
        value_bias: b_V, shape (H, v) or (G, v).
        output_bias: b_O, shape (d_out,).
        scale: factor of the scores, a number or one per head (H,); 1/√k if None.
        key_bias: b_K, shape (H, k) or (G, k).

    Raises:
        ValueError: shapes that do not fit, NaN or infinite entries, devices that differ.
        TypeError: dtypes that differ or are not float32 or float64.
        RuntimeError: by ``backward()``, where what it was made of has been changed since.
    """

    _instead = "they are matrices, .A, .V, .query, .key, .value, .output"
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    scale: Tensor
    _inner: Tensor
    _widths: list[int]
    _outer: Tensor | None

    @with_hints
    def __init__(
        self,
        query: Any,
        key: Any,
        value: Any,
        output: Any = None,
        query_bias: Any = None,
        value_bias: Any = None,
        output_bias: Any = None,
        scale: Any = None,
        key_bias: Any = None,
    ) -> None:
        given = {"query": query, "key": key, "value": value, "output": output}
        heads = {
            name: _heads(matrix, name) for name, matrix in given.items() if matrix is not None
        }
        if not {"query", "key", "value"} <= heads.keys():
            raise TypeError("query, key, value: expected matrices, got None")
        q, k, v, w = *(heads[name] for name in ("query", "key", "value")), heads.get("output")
        for name, matrix in heads.items():
            check_same_kind(q, "query", matrix, name)
        _check_shapes(q, k, v, w)
        # All heads side by side, so that a product reads its points once; the matrices are views.
        joined = torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)])
        inner = own_copy(joined, "AttentionParameters")
        parts = inner.split([part.shape[:2].numel() for part in (q, k, v)])
        outer = None if w is None else own_copy(w.movedim(0, 1).flatten(1), "AttentionParameters")
        out_dim = v.shape[-2] if w is None else w.shape[-2]
        values = {
            "query": parts[0].unflatten(0, q.shape[:2]),
            "key": parts[1].unflatten(0, k.shape[:2]),
            "value": parts[2].unflatten(0, v.shape[:2]),
            "output": None if outer is None else outer.unflatten(1, (len(q), -1)).movedim(1, 0),
            "query_bias": _bias(query_bias, "query_bias", q, tuple(q.shape[:2])),
            "key_bias": _bias(key_bias, "key_bias", q, tuple(k.shape[:2])),
            "value_bias": _bias(value_bias, "value_bias", q, tuple(v.shape[:2])),
            "output_bias": _bias(output_bias, "output_bias", q, (out_dim,)),
            "scale": _scale(scale, q),
            "_inner": inner,
            "_widths": [len(part) for part in parts],
            "_outer": outer,
        }
        vars(self).update(values)

    @classmethod
    @with_hints
    def from_bilinear(cls, bilinear: Any, value: Any) -> AttentionParameters:
        """Parameters with scores ⟨A x, y⟩ and value V (for several heads, V^h is W^h V^h).

        Args:
            bilinear: A, shape (d, d) or (H, d, d): query A, key identity, scale 1.
            value: V, shape (d_out, d) or (H, d_out, d).
        """
        A = _heads(bilinear, "bilinear")
        V = _heads(value, "value")
        if A.shape[-1] != A.shape[-2]:
            raise ValueError(f"bilinear: expected square matrices, got {tuple(A.shape)}")
        key = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        output = None
        if V.shape[0] > 1:
            eye = torch.eye(V.shape[-2], dtype=V.dtype, device=V.device)
            output = eye.expand(V.shape[0], -1, -1)
        return cls(A, key, V, output, scale=1.0)

    @classmethod
    @with_hints
    @without_autocast
    def tied_l2(cls, query: Any, value: Any, output: Any = None) -> AttentionParameters:
        """The L2 attention of [KPM21], for ``kernel=kernels.l2``.

        P_ij ∝ exp(−‖Q(xᵢ − xⱼ)‖²/√k), heads Σⱼ Pᵢⱼ V QᵀQ xⱼ/√k, summed behind their outputs:
        queries and keys are one, and the values see only what the queries see, without which
        L2 attention would not be Lipschitz.

        Args:
            query: Q = W^Qᵀ, shape (H, k, d) or (k, d).
            value: V = W^Vᵀ, shape (H, v, d) or (v, d).
            output: the transposes of the H blocks of rows of W^O, shape (H, d_out, v); the
                identity if None, which needs one head.
        """
        Q, V = _heads(query, "query"), _heads(value, "value")
        check_same_kind(Q, "query", V, "value")
        _check_shapes(Q, Q, V, None if output is None else _heads(output, "output"))
        return cls(Q, Q, V @ Q.mT @ Q / math.sqrt(Q.shape[-2]), output)

    @classmethod
    def from_module(cls, module: torch.nn.MultiheadAttention) -> AttentionParameters:
        """The matrices and biases of a `torch.nn.MultiheadAttention` as self-attention.

        They are those of the module now, and carry its gradients until it changes. Whether
        attention is masked is said at a call of the module, and so by
        ``SelfAttention(parameters, causal=…)``.

        Args:
            module: with or without biases, whatever its ``batch_first``. Dropout is left out, as
                it is in evaluation mode.

        Raises:
            TypeError: no such module, or a subclass with a forward of its own.
            ValueError: keys and values of other dimensions (``kdim``, ``vdim``), which no points
                of one cloud have, key and value atoms added to those of the cloud
                (``add_bias_kv``, ``add_zero_attn``), or a module with forward hooks.

        Example:
            >>> module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
            >>> AttentionParameters.from_module(module).dim
            8
        """
        _check_multihead(module)
        H, packed = module.num_heads, module.in_proj_bias
        # One below the other; the rows of each are heads, the columns of the last are.
        query, key, value = module.in_proj_weight.unflatten(0, (3, H, -1))
        biases = (None, None, None) if packed is None else packed.unflatten(0, (3, H, -1))
        return cls(
            query,
            key,
            value,
            module.out_proj.weight.unflatten(1, (H, -1)).movedim(1, 0),
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=module.out_proj.bias,
        )

    @classmethod
    @with_hints
    def random(
        cls,
        dim: int,
        *,
        n_heads: int = 1,
        head_dim: int | None = None,
        std: float | None = None,
        biases: bool = False,
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | int | None = None,
    ) -> AttentionParameters:
        """Independent normal entries, as at the initialisation of a transformer.

        Args:
            dim: d.
            n_heads: H.
            head_dim: k = v; d/H if None.
            std: standard deviation of the entries; 1/√d if None.
            biases: whether query, value and output biases are drawn too (otherwise none).
            dtype: float32 or float64.
            generator: source of the randomness, or a seed; torch's own generator if None, so that
                `torch.manual_seed` counts.
        """
        dim, n_heads = count(dim, "dim"), count(n_heads, "n_heads")
        head_dim = None if head_dim is None else count(head_dim, "head_dim")
        std = None if std is None else number(std, "std", least=0)
        biases, generator = as_bool(biases, "biases"), as_generator(generator)
        dtype = as_dtype(dtype)
        if head_dim is None and dim % n_heads:
            raise ValueError(f"expected dim divisible by n_heads, got {dim} and {n_heads}")
        k = dim // n_heads if head_dim is None else head_dim
        sigma = dim**-0.5 if std is None else std

        def draw(*shape: int) -> Tensor:
            where = generator.device
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device=where)
            return (sigma * drawn).to(dtype)

        query, key, value = (draw(n_heads, k, dim) for _ in range(3))
        output = draw(n_heads, dim, k)
        return cls(
            query,
            key,
            value,
            output,
            query_bias=draw(n_heads, k) if biases else None,
            value_bias=draw(n_heads, k) if biases else None,
            output_bias=draw(dim) if biases else None,
        )

    # --- all heads at once ---

    def project(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Qx, Kx, Vx of points ``(*batch, n, d)``: ``(*batch, H, n, ·)``; no bias, no scale."""
        joined = points @ self._inner.mT
        if self.n_heads == 1:
            q, k, v = joined.unsqueeze(-3).split_with_sizes(self._widths, -1)
            return q, k, v
        counts = self.n_heads, self.n_groups, self.n_groups
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(-2, -3)
            for part, heads in zip(joined.split(self._widths, -1), counts, strict=True)
        )
        if self.n_groups == self.n_heads:
            return q, k, v
        copies = self.n_heads // self.n_groups
        return q, k.repeat_interleave(copies, -3), v.repeat_interleave(copies, -3)

    def project_transposed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Σ_h Qᵀq + Kᵀk + Vᵀv, the transpose of `project`; ``(*batch, n, d)``."""
        if self.n_groups != self.n_heads:
            groups = (self.n_groups, self.n_heads // self.n_groups)
            k, v = k.unflatten(-3, groups).sum(-3), v.unflatten(-3, groups).sum(-3)
        return torch.cat([_side_by_side(part) for part in (q, k, v)], -1) @ self._inner

    def join(self, heads: Tensor) -> Tensor:
        """Σ_h W^h of each head's ``(*batch, H, n, v)``, without bias; ``(*batch, n, d_out)``."""
        if self._outer is None:
            return heads.squeeze(-3)
        return _side_by_side(heads) @ self._outer.mT

    def join_transposed(self, covector: Tensor) -> Tensor:
        """W^hᵀ of ``(*batch, n, d_out)`` for each head, the transpose of `join`."""
        if self._outer is None:
            return covector[..., None, :, :]
        covector = covector @ self._outer
        if self.n_heads == 1:
            return covector.unsqueeze(-3)
        return covector.unflatten(-1, (self.n_heads, -1)).transpose(-2, -3)

    def per_head(self, grouped: Tensor) -> Tensor:
        """(G, ...) repeated to one entry per query head, (H, ...)."""
        return grouped.repeat_interleave(self.n_heads // len(grouped), 0)

    @property
    def requires_grad(self) -> bool:
        """Whether a matrix, a bias or the scale does."""
        return any(part.requires_grad for part in self._given().values())

    @property
    def n_groups(self) -> int:
        """G, the number of key and value heads."""
        return self.key.shape[0]

    @property
    def n_heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def dim(self) -> int:
        """d, of the points that come in."""
        return self.query.shape[-1]

    @property
    def out_dim(self) -> int:
        """d_out, of the points that go out."""
        return (self.value if self.output is None else self.output).shape[-2]

    @property
    @without_autocast
    def A(self) -> Tensor:
        """A^h = scale · K^hᵀ Q^h, so that the scores are ⟨A x, y⟩ (+ bias terms); (H, d, d)."""
        return self.scale[:, None, None] * (self.per_head(self.key).mT @ self.query)

    @property
    @without_autocast
    def V(self) -> Tensor:
        """V^h = W^h times the value matrix, (H, d_out, d): what one head does to a mean."""
        value = self.per_head(self.value)
        return value if self.output is None else self.output @ value

    @with_hints
    def head(self, index: int) -> AttentionParameters:
        """Head `index` alone, without the output bias."""
        index = count(index, "index", least=-(10**12))
        if not -self.n_heads <= index < self.n_heads:
            raise IndexError(f"expected a head in 0..{self.n_heads - 1}, got {index}")
        parts = {name: part for name, part in self._given().items() if name != "output_bias"}
        picked = {name: self.per_head(part)[index][None] for name, part in parts.items()}
        return AttentionParameters(**picked)

    @with_hints
    def after(self, norm: Map) -> AttentionParameters:
        """The parameters at γ ∘ z + β, as a function of z: the gain of a normalisation absorbed.

        Qγz stands for Q, Qβ + b_Q for b_Q, likewise for keys and values; if z has mean 0
        (LayerNorm), also less the mean of each row. So attention after the norm is attention of
        these parameters after the same norm with γ = 1 and β = 0, whose points have length √d at
        most: bounds on the ball see ‖ΓAΓ‖d in place of ‖A‖ max|γ|²d ([CAP24] §2.3).

        Args:
            norm: `meanfield.layers.LayerNorm`, `meanfield.layers.RMSNorm`.

        Raises:
            TypeError: a map that declares no gain.
            ValueError: another dimension.

        Example:
            >>> from meanfield.layers import RMSNorm
            >>> AttentionParameters([[1.0]], [[1.0]], [[1.0]]).after(RMSNorm([3.0])).A
            tensor([[[9.]]], dtype=torch.float64)
        """
        gain = as_map(norm, "norm").gain
        if gain is None:
            raise TypeError(f"norm: expected LayerNorm or RMSNorm, got {describe(norm)}")
        if len(gain.weight) != self.dim:
            raise ValueError(f"norm: expected one of dimension {self.dim}, got {len(gain.weight)}")
        check_same_kind(self.query, "the parameters", gain.weight, "the norm")
        shift = gain.bias

        def moved(matrix: Tensor) -> Tensor:
            scaled = matrix * gain.weight
            return scaled - scaled.mean(-1, keepdim=True) if gain.centred else scaled

        def bias(own: Tensor | None, matrix: Tensor) -> Tensor | None:
            if shift is None:
                return own
            return matrix @ shift if own is None else own + matrix @ shift

        changed: dict[str, Tensor | None] = {}
        for name in ("query", "key", "value"):
            matrix = getattr(self, name)
            changed[name] = moved(matrix)
            changed[f"{name}_bias"] = bias(getattr(self, f"{name}_bias"), matrix)
        return AttentionParameters(**self._given() | changed)

    def to(self, *args: Any, **kwargs: Any) -> AttentionParameters:
        """The same matrices in another dtype or on another device (as `torch.Tensor.to`)."""
        check_move(self.query, *args, **kwargs)
        moved = {name: part.to(*args, **kwargs) for name, part in self._given().items()}
        return AttentionParameters(**moved)

    def detach(self) -> AttentionParameters:
        """The same matrices without their gradients."""
        return AttentionParameters(**{k: part.detach() for k, part in self._given().items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionParameters:
        return copied(self, memo)

    def _given(self) -> dict[str, Any]:
        """What the layer is made from, by the names of the arguments, but for what is None."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name[0] != "_")
        return {name: part for name, part in named if part is not None}

    def _repr_html_(self) -> str:
        parts = self._given()
        scale = parts.pop("scale")
        rows = [(name, " × ".join(map(str, part.shape))) for name, part in parts.items()]
        return html_table("Attention parameters", [*rows, ("scale", span(scale))])

    def __repr__(self) -> str:
        biases = [name for name in self._given() if name.endswith("_bias")]
        extra = f", {', '.join(biases)}" if biases else ""
        return (
            f"AttentionParameters(n_heads={self.n_heads}, dim={self.dim}, "
            f"head_dim={self.query.shape[-2]}, out_dim={self.out_dim}{extra})"
        )


def _side_by_side(heads: Tensor) -> Tensor:
    """``(*batch, H, n, v)`` as ``(*batch, n, H·v)``."""
    if heads.shape[-3] == 1:  # a view, whatever the strides
        return heads.squeeze(-3)
    return heads.transpose(-2, -3).flatten(-2)


def _heads(matrix: Any, name: str) -> Tensor:
    tensor = as_float_tensor(matrix, name)
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or 0 in tensor.shape:
        raise ValueError(
            f"{name}: expected a matrix (rows, columns) or one per head (H, rows, columns), "
            f"got {tuple(tensor.shape)}"
        )
    check_finite(tensor, name)
    return tensor


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> None:
    H, width, d = q.shape
    if k.shape[1:] != q.shape[1:] or H % k.shape[0]:
        raise ValueError(
            f"key: expected the shape of query, {tuple(q.shape)}, or (G, {width}, {d}) with G "
            f"dividing {H}, got {tuple(k.shape)}"
        )
    if v.shape[0] != k.shape[0] or v.shape[-1] != d:
        turned = v.shape[-1] != d and v.shape[-2] == width
        hint = "; matrices are outputs × inputs, so give .mT of all of X W" * turned
        raise ValueError(
            f"value: expected shape ({k.shape[0]}, v, {d}), got {tuple(v.shape)}{hint}"
        )
    if w is None:
        if H > 1:
            raise ValueError(
                f"output: expected shape ({H}, d_out, {v.shape[-2]}), got None; "
                "only a single head has the identity as its default"
            )
    elif w.shape[0] != H or w.shape[-1] != v.shape[-2]:
        raise ValueError(
            f"output: expected shape ({H}, d_out, {v.shape[-2]}), got {tuple(w.shape)}"
        )


def _bias(value: Any, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    if value is None:
        return None
    tensor = as_float_tensor(value, name, like=like)
    check_same_kind(like, "query", tensor, name)
    if tensor.shape != shape and (1, *tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    check_finite(tensor, name)
    return own_copy(tensor.reshape(shape), "AttentionParameters")


def _scale(value: Any, query: Tensor) -> Tensor:
    H, width = query.shape[:2]
    if value is None:
        return query.new_full((H,), 1 / math.sqrt(width))
    tensor = as_float_tensor(value, "scale", like=query).to(query)
    if tensor.ndim > 1 or (tensor.ndim == 1 and tensor.shape[0] != H):
        raise ValueError(
            f"scale: expected a number or one per head ({H},), got shape {tuple(tensor.shape)}"
        )
    check_finite(tensor, "scale")
    return own_copy(tensor, "AttentionParameters").expand(H)


def _check_multihead(module: Any) -> None:
    """Refuse what `AttentionParameters.from_module` would read wrongly."""
    kind = torch.nn.MultiheadAttention
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        raise TypeError(
            "module: expected a torch.nn.MultiheadAttention with its own forward, got "
            f"{describe(module)}; of a whole encoder pretrained.read(module) makes maps"
        )
    if (module.kdim, module.vdim) != (module.embed_dim, module.embed_dim):
        raise ValueError(
            f"module: expected queries, keys and values of one cloud in dimension "
            f"{module.embed_dim}, got kdim={module.kdim}, vdim={module.vdim}"
        )
    if module.bias_k is not None or module.add_zero_attn:
        which = "add_zero_attn" if module.add_zero_attn else "add_bias_kv"
        raise ValueError(
            f"module: expected attention to the atoms of the cloud alone, got {which}=True, which "
            "adds an atom of weight 1/n"
        )
    parts = (module, module.out_proj)
    if any(part._forward_pre_hooks or part._forward_hooks for part in parts):
        raise ValueError(
            "module: expected one without forward hooks, which may change its weights, its input "
            "or its output; remove them (pruned weights stay with "
            "torch.nn.utils.prune.remove(module, name))"
        )
