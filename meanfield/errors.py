"""The exceptions that `meanfield` raises on its own account."""

from __future__ import annotations

__all__ = [
    "CertificateError",
    "ConvergenceError",
    "MissingExtraError",
    "NoDerivativeError",
]


class CertificateError(RuntimeError):
    """Evidence for an answer contradicts itself, so that no interval can be given.

    A solver or a formula has not kept what it promises: potentials that are not feasible, a lower
    bound above the upper one, parts that do not weigh what the whole does.
    """


class ConvergenceError(RuntimeError):
    """An iteration stopped before it reached the accuracy asked for.

    Functions with an argument `strict` return the flagged answer instead under ``strict=False``.

    Attributes:
        result: the flagged answer, where there is one.
    """

    def __init__(self, message: str, *, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class MissingExtraError(ImportError):
    """Packages of an extra are needed and not installed.

    Args:
        packages: their names on the index, with spaces between them.
        extra: the name of the extra that holds them.
        what: needs them.
    """

    def __init__(self, packages: str, extra: str, what: str = "this") -> None:
        # The packages by name: on the index `meanfield` is somebody else's distribution.
        super().__init__(
            f"{what} needs what the extra {extra!r} holds, which is not installed: "
            f"pip install {packages}"
        )


class NoCases(ValueError):
    """A Dataset lacks what a figure shows: the settings left it out, or the run is older than it.

    Only this is answered by leaving the figure out; any other error of a figure is a defect.
    """


class NoDerivativeError(ValueError):
    """A map has no derivative at a measure: ReLU or |x| at exactly 0, a direction x/|x| at 0.

    Its local constant is not the norm of a derivative there; `bounds.local_upper` and
    `lipschitz.ball_upper` of layers that declare bounds hold at such places too.
    """
