r"""Texts, and the windows of tokens that are cut from them.

A text is a file of your own, or *Alice's Adventures in Wonderland*, which [CAP24] use. Their
other text, AG_NEWS, becomes such a file in two lines, on a machine that has the package
``datasets``::

    rows = datasets.load_dataset("fancyzhx/ag_news", split="test")["text"][:10_000]
    pathlib.Path("ag_news.txt").write_text("\n".join(rows), encoding="utf-8")

Numbers depend on the edition of a text, so each carries its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanfield import checks
from meanfield.errors import MissingExtraError
from meanfield.habits import with_hints

__all__ = ["corpus", "windows"]

ALICE_SHA256 = "84157c64cf991c7cd7f3fc39aa8fddefebae13710268f448f6034559db37f884"
_ALICE_FILE = "carroll-alice.txt"
_ALICE_ARCHIVE = (
    "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/gutenberg.zip"
)
_FOLDER_VARIABLE = "MEANFIELD_DATA"
_START = re.compile(r"^\*\*\* ?START OF .*\n", re.MULTILINE)
_END = re.compile(r"^\*\*\* ?END OF ", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """A text and what identifies it.

    Attributes:
        name: "alice", or the name of the file.
        text: with Unix line ends, and without the licence text of Project Gutenberg.
        sha256: of the bytes of the file.
    """

    name: str
    text: str
    sha256: str

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self.text)} characters, sha256={self.sha256[:12]}…)"


@with_hints
def corpus(source: str | os.PathLike[str], *, download: bool = True) -> Corpus:
    """Read a text.

    Args:
        source: path of a UTF-8 file; or ``"alice"``, in the edition of the NLTK Gutenberg
            selection. That one is looked for as carroll-alice.txt in the folder named by the
            environment variable MEANFIELD_DATA, then in the cache of pooch, then fetched.
        download: whether Alice may be fetched.

    Raises:
        FileNotFoundError: the text is not there; the message says where it may be put.
        ValueError: an empty file, not UTF-8, or an Alice of another edition.
        MissingExtraError: Alice has to be fetched and pooch is not installed.
    """
    if os.fspath(source) == "alice":
        return _alice(download)
    path = Path(source).expanduser()
    if not os.path.isfile(path):  # a whole text is too long a name to ask pathlib for
        raise FileNotFoundError(
            f'source: expected "alice" or the path of a text file, got {os.fspath(source)!r:.80}'
        )
    return _decoded(path.name, path.read_bytes())


@with_hints
def windows(tokens: Any, n: int, count: int) -> Tensor:
    """Windows of n consecutive tokens, evenly spread and disjoint.

    Window j starts at token ⌊jL/count⌋ of L, whatever n: windows of different lengths start at
    the same places of the text. So a trend in n compares the same places, and confidence
    intervals resample places.

    Args:
        tokens: ids of the whole text, shape (L,).
        n: length of a window.
        count: number of windows.

    Returns:
        Shape (count, n), int64.

    Raises:
        ValueError: the text is too short for so many disjoint windows.

    Example:
        >>> windows(range(10), 2, 3)
        tensor([[0, 1],
                [3, 4],
                [6, 7]])
    """
    if isinstance(tokens, (str, Corpus)):
        got = checks.describe(tokens)
        raise TypeError(f"tokens: expected ids, as of source.encode(text), got {got}")
    ids = checks.as_tensor(tokens)
    if ids.ndim != 1 or ids.dtype.is_floating_point:
        raise ValueError(
            f"tokens: expected integers of shape (L,), got {ids.dtype}, shape {tuple(ids.shape)}"
        )
    n, count = checks.count(n, "n"), checks.count(count, "count")
    starts = torch.arange(count, device=ids.device) * len(ids) // count
    if n > len(ids) // count:
        raise ValueError(
            f"expected at least {n * count} tokens for {count} disjoint windows of {n}, got "
            f"{len(ids)}; take fewer or shorter windows, or a longer text"
        )
    return ids[starts[:, None] + torch.arange(n, device=ids.device)].long()


def _decoded(name: str, raw: bytes) -> Corpus:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8, got {error}; convert the file") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if start := _START.search(text):
        text = text[start.end() :]
    if end := _END.search(text):
        text = text[: end.start()]
    if not text.strip():
        raise ValueError(f"{name}: expected a text, got none")
    return Corpus(name, text.strip("\n") + "\n", hashlib.sha256(raw).hexdigest())


def _alice(download: bool) -> Corpus:
    folder = os.environ.get(_FOLDER_VARIABLE)
    own = Path(folder).expanduser() / _ALICE_FILE if folder else None
    if own is not None and own.is_file():
        return _checked_alice(own)
    if not download:
        raise FileNotFoundError(_ways_to_alice("download=False"))
    return _checked_alice(_fetched_alice())


def _fetched_alice() -> Path:
    try:
        import pooch
    except ModuleNotFoundError:
        raise MissingExtraError("pooch", "corpora") from None
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        # The archive is repacked from time to time, so the checksum is of the text inside.
        files = pooch.retrieve(
            _ALICE_ARCHIVE,
            known_hash=None,
            fname="nltk-gutenberg.zip",
            path=pooch.os_cache("meanfield"),
            processor=pooch.Unzip(members=[f"gutenberg/{_ALICE_FILE}"]),
        )
    except Exception as error:  # requests, urllib3, zipfile and the system have their own
        raise FileNotFoundError(_ways_to_alice(type(error).__name__)) from error
    finally:
        logger.setLevel(level)
    return Path(files[0])


def _checked_alice(path: Path) -> Corpus:
    found = _decoded("alice", path.read_bytes())
    if found.sha256 != ALICE_SHA256:
        raise ValueError(
            f"{path.name}: expected the edition with SHA-256 {ALICE_SHA256}, got {found.sha256}; "
            "pass the path of the file to use another edition under its own name"
        )
    return found


def _ways_to_alice(reason: str) -> str:
    return (
        f"alice is not at hand ({reason}). Put {_ALICE_FILE} (SHA-256 {ALICE_SHA256}, in "
        f"{_ALICE_ARCHIVE}) into a folder and name it in the environment variable "
        f"{_FOLDER_VARIABLE}, or pass the path of a text of your own"
    )
