"""From what people have (texts, ids, images, points) to runs of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Runs(NamedTuple):
    """The runs of a model that one input needs.

    Attributes:
        arguments: of each run, by name, with a batch axis in front; inputs of several lengths
            need several runs, since nothing is padded.
        single: whether there is one input without a batch axis, which the results have not either.
    """

    arguments: list[dict[str, Tensor]]
    single: bool


class ModelInputs(ABC):
    """How the models of a family take their inputs: texts, images, points.

    Example:
        >>> import torch
        >>> class Numbers(ModelInputs):
        ...     def runs(self, model, tokenizer, given):
        ...         return Runs([{"inputs": given[None]}], single=True)
        ...
        ...     def sample(self, model):
        ...         return torch.ones(3, 2)
        ...
        ...     def max_tokens(self, model):
        ...         return 100
        >>> Numbers().runs(None, None, torch.ones(3, 2)).arguments[0]["inputs"].shape
        torch.Size([1, 3, 2])
    """

    @abstractmethod
    def runs(self, model: Any, tokenizer: Any, given: Any) -> Runs:
        """The runs for what a user gives.

        Raises:
            ValueError: the model cannot take it.
            TypeError: nothing that it could take.
        """

    @abstractmethod
    def sample(self, model: Any) -> Any:
        """A small random input in the form that `runs` takes, the same at every call."""

    @abstractmethod
    def max_tokens(self, model: Any) -> int:
        """The longest sequence that the model has positions for."""

    def run(self, model: Any, arguments: Mapping[str, Any], causal: bool) -> Tensor:
        """One run of the model: its last hidden state, ``(batch, n, d)``."""
        hidden: Tensor = model(**arguments, return_dict=True).last_hidden_state
        return hidden

    def vocabulary(self, model: Any) -> int:
        """How many token ids the model knows."""
        raise ValueError(f"tokens: expected a model of texts, got {type(model).__name__}")

    def encode(self, model: Any, tokenizer: Any, text: str) -> Tensor:
        """Token ids of a text, where the model has such."""
        raise ValueError(f"text: expected a model of texts, got {type(model).__name__}")
