"""What a map declares, how a plain function is wrapped, and wrong arguments."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from meanfield import Map, ParticleMeasure, SelfAttention, bounds, linearize
from meanfield.layers import Chain, LayerNorm, Particlewise, Pointwise
from meanfield.linalg import LinearMap
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.maps import BallBounds, Linearisation
from meanfield.maps.autodiff import linearize_by_autodiff
from meanfield.maps.map import as_map
from tests.maps import small_maps as small

F64 = torch.float64


class Lookalike:
    """A map that declares its mask without being a `Map`."""

    causal = True

    def __call__(self, mu):
        return mu


class Halves(torch.nn.Module):
    """A module that is called with a measure."""

    def forward(self, mu):
        return mu.replace(0.5 * mu.points)


class Both(Map, torch.nn.Module):
    """A module that declares something."""

    particlewise = True

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.factor = torch.nn.Parameter(torch.tensor(0.5, dtype=F64))

    def __call__(self, mu):
        return mu.replace(self.factor * mu.points)


def test_a_map_is_itself_and_a_function_declares_nothing():
    F = small.attention(True)
    assert as_map(F) is F
    for plain in (small.plain, functools.partial(small.plain), Halves()):
        G = as_map(plain)
        assert (G.causal, G.particlewise, G.dim, G.heads) == (False, False, None, ())
        mu = small.cloud()
        assert torch.equal(G(mu).points, plain(mu).points)


def test_members_that_nobody_would_read_are_refused():
    mu = small.cloud()
    for ask in (as_map, lambda F: linearize(F, mu), lambda F: local_lipschitz(F, mu),
                lambda F: Chain([F])):  # fmt: skip
        with pytest.raises(TypeError, match=r"subclass of meanfield.Map, .* has causal; write"):
            ask(Lookalike())
    assert float(local_lipschitz(lambda mu: Lookalike()(mu), mu).value) == pytest.approx(1)


@pytest.mark.parametrize(
    "bad", [3, None, "attention", SelfAttention, small.attention().parameters]
)
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(TypeError, match="F: expected a map of measures"):
        as_map(bad)


def test_a_module_may_be_a_map():
    F, mu = Both(), small.cloud()
    assert as_map(F) is F
    assert float(local_lipschitz(F, mu).value.detach()) == pytest.approx(0.5)


def test_what_is_not_declared_is_refused_by_name():
    mu = small.cloud()
    with pytest.raises(
        NotImplementedError, match="F: expected a map that declares an upper bound, got plain"
    ):
        as_map(small.plain).local_upper(mu)
    with pytest.raises(NotImplementedError, match="F: expected a map .* got Drift"):
        ball_upper(small.Drift(), mu, 0.1)


def test_an_abstract_map_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Map()
    assert Pointwise(torch.sin).particlewise


class Declaring(Map):
    """x ↦ 2x, with bounds as they are given."""

    def __init__(self, upper, displacement=0.2):
        self.upper, self.displacement = upper, displacement

    def __call__(self, mu):
        return mu.replace(2 * mu.points)

    def local_upper(self, mu):
        return self.upper

    def ball_bounds(self, mu, radii, *, splitting=True):
        if self.displacement is None:
            return self.upper
        return BallBounds(self.upper, 0.0, self.upper, self.displacement)


MANY = ParticleMeasure(torch.zeros(2, 3, 1, dtype=F64))


@pytest.mark.parametrize("upper", [2, 2.0, torch.tensor(2.0), torch.full((2,), 2.0, dtype=F64)])
def test_declared_bounds_are_one_for_each_measure_in_its_dtype(upper, monkeypatch):
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)
    F = Declaring(upper)
    wanted = torch.full((2,), 2.0, dtype=F64)
    for found in (bounds.local_upper(F, MANY), ball_upper(F, MANY, 0.1)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(bounds.local_upper(Chain([F, F]), MANY), 2 * wanted)
    assert F.ball_bounds(MANY, 0.1).displacement.shape == (2, 3)


def test_a_declared_bound_that_is_a_parameter_has_no_gradient():
    F = Declaring(torch.nn.Parameter(torch.tensor(2.0, dtype=F64)))
    ball = F.ball_bounds(MANY, 0.1)
    assert not any(t.requires_grad for t in (F.local_upper(MANY), ball.constant, ball.upper))


def test_a_declared_bound_is_not_rounded_down_in_single_precision():
    mu, upper = MANY.to(torch.float32), 1 + 2.0**-30
    found = Declaring(torch.tensor(upper, dtype=F64)).local_upper(mu)
    assert found.dtype == torch.float32
    assert bool((found.double() >= upper).all())
    assert Declaring(2.1).local_upper(MANY).tolist() == [2.1, 2.1]  # 2.0999999 in float32
    assert bool(Declaring(math.nan).local_upper(mu).isposinf().all())


@pytest.mark.parametrize(
    ("F", "error", "words"),
    [
        (Declaring(None), TypeError, "local_upper of Declaring: expected a tensor, got None"),
        (Declaring(torch.ones(7)), ValueError, r"local_upper of .*\(2,\), or .*, got \(7,\)"),
        (
            Declaring((2.0, 0.0), None),
            TypeError,
            "ball_bounds of .*: expected maps.BallBounds, got",
        ),
        (Declaring(2.0, torch.ones(2)), ValueError, r"displacement of .*\(2, 3\), .* got \(2,\)"),
    ],
)
def test_what_is_no_bound_is_refused(F, error, words, monkeypatch):
    monkeypatch.setattr("meanfield.maps.map._FACTORED", 0)
    with pytest.raises(error, match=words):
        bounds.local_upper(F, MANY) if "local" in words else ball_upper(F, MANY, 0.1)


W = torch.tensor([[1.0, 2.0], [-0.5, 0.3]], dtype=F64)
Z = torch.tensor([[0.1, 0.7], [0.2, -0.4]], dtype=F64)


class Drifting(Map):
    """x ↦ Wx + Z m, m the mean: Wε + Z Σ aⱼεⱼ, and W at one atom; each part may be a lie."""

    def __init__(self, lie=None):
        self.lie = lie

    def __call__(self, mu):
        return mu.replace(mu.points @ W.mT + (mu.mean() @ Z.mT)[..., None, :])

    def linearisation(self, mu, *, geometry="euclidean"):
        a, lie = mu.weights[..., None], self.lie
        is_weighted = geometry == "wasserstein" and lie != "geometry"
        root = torch.where(a > 0, a.sqrt(), 1.0) if is_weighted else torch.ones_like(a)
        own = W.mT if lie == "transposed" else W
        push = 2 * Z if lie == "others" else Z
        pull = Z.mT if lie == "backwards" else Z

        def matvec(eps):
            mean = (a * eps / root).sum(-2, keepdim=True)
            return eps @ own.mT + root * (mean @ push.mT)

        def rmatvec(zeta):
            return zeta @ own + a / root * ((root * zeta).sum(-2, keepdim=True) @ pull)

        apart = own + Z if lie == "field" else own
        field = apart.expand(*mu.points.shape[:-1], 1, *apart.shape)
        return Linearisation(LinearMap.of(mu.points, matvec, rmatvec), LinearMap.pointwise(field))


def test_a_declared_derivative_is_compared_in_the_precision_of_its_numbers(monkeypatch):
    """Under autocast the images would be of 8 bits."""
    monkeypatch.setattr(f"{__name__}.W", W.float())
    monkeypatch.setattr(f"{__name__}.Z", Z.float())
    mu = UNEQUAL.to(torch.float32)
    known = Drifting().linearisation(mu, geometry="wasserstein").atoms.to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Drifting().linearisation(mu, geometry="wasserstein").atoms.to_dense()
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-6)


LIES = ["transposed", "others", "backwards", "geometry", "field"]
UNEQUAL = ParticleMeasure([[1.0, 0.2], [-0.3, 0.4], [0.0, 2.0]], [0.1, 0.3, 0.6])


@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
@pytest.mark.parametrize("lie", LIES)
def test_a_declared_derivative_is_compared_with_the_values_of_the_map(lie, geometry):
    for F in (Drifting(lie), Chain([Pointwise(torch.sin), Drifting(lie)])):
        if geometry == "euclidean" and lie in ("geometry", "field"):
            linearize(F, UNEQUAL, geometry=geometry)  # neither counts
            continue
        with pytest.raises(ValueError, match="Drifting: (expected a map whose|its forward and)"):
            linearize(F, UNEQUAL, geometry=geometry)


@pytest.mark.parametrize("kind", [F64, torch.float32])
def test_a_declared_derivative_that_is_right_is_taken(kind, monkeypatch):
    mu, honest = UNEQUAL.to(kind), lambda mu: Drifting()(mu)
    monkeypatch.setattr(f"{__name__}.W", W.to(kind))
    monkeypatch.setattr(f"{__name__}.Z", Z.to(kind))
    light = ParticleMeasure(mu.points, log_weights=torch.tensor([-1e4, -900.0, 0.0], dtype=kind))
    absent = ParticleMeasure(mu.points, [0.0, 0.5, 0.5])
    for nu in (mu, light, absent, mu.replace(0 * mu.points)):
        for geometry in ("wasserstein", "euclidean"):
            found = linearize(Drifting(), nu, geometry=geometry)
            if nu is mu:
                known = linearize(honest, nu, geometry=geometry)
                for one, other in ((found.atoms, known.atoms), (found.field, known.field)):
                    torch.testing.assert_close(one.to_dense(), other.to_dense())


def test_a_declared_derivative_is_compared_beside_absent_atoms():
    absent = ParticleMeasure(UNEQUAL.points, [0.0, 0.3, 0.7])
    for lie in LIES:
        with pytest.raises(ValueError, match="Drifting: (expected a map whose|its forward and)"):
            linearize(Drifting(lie), absent, geometry="wasserstein")


class Shaped(Drifting):
    """One with a linearisation of other spaces, or none."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def linearisation(self, mu, *, geometry="euclidean"):
        return self.change(super().linearisation(mu, geometry=geometry))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda at: at.atoms, "linearisation of Shaped: expected maps.Linearisation, got"),
        (
            lambda at: Linearisation(at.atoms, LinearMap.pointwise(W.expand(3, 2, 2))),
            r"field of .* of Shaped: expected maps \(1, 2\) → \(1, 2\) with batch_shape=\(3,\)",
        ),
        (
            lambda at: Linearisation(at.atoms, LinearMap.pointwise(W.expand(2, 1, 2, 2))),
            r"field of .* of Shaped: expected maps \(1, 2\) → \(1, 2\) with batch_shape=\(3,\)",
        ),
        (
            lambda at: Linearisation(LinearMap.pointwise(W.expand(2, 2, 2)), at.field),
            r"atoms of .*: expected maps \(3, 2\) → \(3, 2\) with batch_shape=\(\), got Lin",
        ),
    ],
)
def test_a_declared_derivative_between_other_spaces_is_refused(change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        linearize(Shaped(change), UNEQUAL)


class Said(Map):
    """A function of measures, whose automatic derivative is declared."""

    def __init__(self, function):
        self.function = function

    def __call__(self, mu):
        return mu.replace(self.function(mu))

    def linearisation(self, mu, *, geometry="euclidean"):
        return Linearisation(*(part(mu, geometry) for part in (self.atoms, self.field)))

    def atoms(self, mu, geometry):
        return linearize_by_autodiff(Drifting(), mu, geometry=geometry).atoms

    def field(self, mu, geometry):
        return linearize_by_autodiff(Drifting(), mu).field


def test_a_map_with_a_derivative_of_its_own_is_a_map_of_measures_all_the_same():
    drifting, noise = Drifting(), torch.nn.Dropout(0.5)
    light = ParticleMeasure(
        UNEQUAL.points, log_weights=torch.tensor([-800.0, math.log(0.4), math.log(0.6)])
    )
    for mu in (UNEQUAL, light):  # of the light atom the weight is 0 in double precision
        linearize(Said(lambda mu: drifting(mu).points), mu, geometry="wasserstein")
    plain = Said(lambda mu: mu.points @ W.mT + (mu.points.mean(-2, keepdim=True) @ Z.mT))
    uniform = ParticleMeasure(UNEQUAL.points)
    with pytest.raises(ValueError, match="an image that depends on the measure alone"):
        linearize(plain, uniform, geometry="wasserstein")
    linearize(plain, uniform)
    with pytest.raises(ValueError, match="the same image of the same measure"):
        linearize(Said(lambda mu: noise(drifting(mu).points)), UNEQUAL)


def test_a_map_with_a_derivative_of_its_own_keeps_the_atoms():
    class Reweighting(Drifting):
        def __call__(self, mu):
            return ParticleMeasure(super().__call__(mu).points, mu.weights.flip(-1))

    for geometry in ("wasserstein", "euclidean"):
        with pytest.raises(ValueError, match="expected a map that keeps the atoms"):
            linearize(Reweighting(), UNEQUAL, geometry=geometry)


def test_a_derivative_is_not_compared_where_there_is_nothing_to_look_at():
    points = torch.stack([UNEQUAL.points, 2 * UNEQUAL.points])

    def pushed(x):
        return linearize(Drifting(), ParticleMeasure(x)).atoms.matvec(x)

    torch.testing.assert_close(torch.func.vmap(pushed)(points), pushed(points))
    assert pushed(points[:0]).shape == (0, 3, 2)


class Placed(Map):
    """x ↦ Wx + b, b an offset for each of three places, as of positional embeddings."""

    particlewise = True

    def __init__(self, atoms=W, field=W, mean=0.0):
        self.parts, self.mean = (atoms, field), mean

    def __call__(self, mu):
        offsets = torch.arange(6, dtype=F64).reshape(3, 2) + self.mean * mu.mean()[..., None, :]
        return mu.replace(mu.points @ W.mT + offsets)

    def linearisation(self, mu, *, geometry="euclidean"):
        atoms, field = (part.expand(3, 1, 2, 2) for part in self.parts)
        own = LinearMap.pointwise(atoms)
        at_once = [lambda t, f=f: f(t[..., None, :])[..., 0, :] for f in (own.matvec, own.rmatvec)]
        return Linearisation(LinearMap.of(mu.points, *at_once), LinearMap.pointwise(field))


@pytest.mark.parametrize("geometry", ["wasserstein", "euclidean"])
def test_a_map_of_each_atom_alone_is_compared_as_it_is(geometry):
    linearize(Placed(), UNEQUAL, geometry=geometry)  # which takes no six atoms
    for lie in (Placed(atoms=W.mT), Placed(field=2 * W), Placed(mean=0.5)):
        with pytest.raises(ValueError, match="Placed: expected a map whose derivative"):
            linearize(lie, UNEQUAL, geometry=geometry)


class Tripled(LayerNorm):
    """x ↦ 3x, with the derivative of a norm."""

    def __call__(self, mu):
        return mu.replace(3 * mu.points)


class Turned(Particlewise):
    """x ↦ Wx, with products that may be those of Wᵀ."""

    matrix = W

    def __call__(self, mu):
        return mu.replace(mu.points @ W.mT)

    def products(self, mu):
        return lambda eps: eps @ self.matrix.mT, lambda zeta: zeta @ self.matrix


class Backwards(Turned):
    matrix = W.mT


class Borrowed:
    """Members that are no map's."""

    def linearisation(self, mu, *, geometry="euclidean"):
        return Drifting().linearisation(mu, geometry=geometry)


class Borrowing(Borrowed, Map):
    """x ↦ 2x, with the derivative of another map."""

    def __call__(self, mu):
        return mu.replace(2 * mu.points)


class Still(Drifting):
    """x ↦ x, with the derivative of the class above."""

    def __call__(self, mu):
        return mu


@pytest.mark.parametrize("F", [Tripled([1.0, 1.0]), Backwards(), Borrowing(), Still()])
def test_a_derivative_that_is_inherited_is_compared_as_well(F):
    linearize(Turned(), UNEQUAL)
    words = f"{type(F).__name__}: (expected a map whose|its forward)"
    with pytest.raises(ValueError, match=words):
        linearize(F, UNEQUAL)
