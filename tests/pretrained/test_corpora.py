"""Texts are complete and identified; windows are disjoint, at the same places for all lengths."""

from __future__ import annotations

import hashlib
import os
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanfield import corpora


def test_a_file_is_read_with_its_hash_and_plain_line_ends(tmp_path):
    path = tmp_path / "walk.txt"
    path.write_bytes("\ufeffÉté\r\nautomne\r\n".encode())
    corpus = corpora.corpus(path)
    assert corpus.text == "Été\nautomne\n"
    assert corpus.name == "walk.txt"
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_licence_around_a_gutenberg_text_is_left_out(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(
        "Licence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nStory.\n\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nMore licence\n"
    )
    assert corpora.corpus(path).text == "Story.\n"


@pytest.mark.parametrize(
    ("content", "message"), [(b" \n", "expected a text"), (b"\xff\xfe", "expected UTF-8")]
)
def test_files_that_hold_no_text_are_refused(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpora.corpus(path)


def test_an_absent_file_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        corpora.corpus("no-such-file.txt")


def test_alice_without_a_file_says_where_to_put_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MEANFIELD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{corpora.ALICE_SHA256}.*MEANFIELD_DATA"):
        corpora.corpus("alice", download=False)


def test_alice_of_another_edition_is_refused(monkeypatch, tmp_path):
    (tmp_path / "carroll-alice.txt").write_text("Down the rabbit hole\n")
    monkeypatch.setenv("MEANFIELD_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="expected the edition"):
        corpora.corpus("alice")


def test_alice_is_fetched_from_an_archive_and_its_text_is_checked(monkeypatch, tmp_path):
    pooch = pytest.importorskip("pooch")
    content = b"Alice was beginning to get very tired\n"
    archive = tmp_path / "gutenberg.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("gutenberg/carroll-alice.txt", content)
    cache = tmp_path / "cache"

    def copy(url, output_file, pooch):
        assert url.endswith("gutenberg.zip")
        with open(output_file, "wb") as target:
            target.write(archive.read_bytes())

    monkeypatch.delenv("MEANFIELD_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: cache)
    monkeypatch.setattr(pooch.core, "choose_downloader", lambda url, progressbar: copy)
    with pytest.raises(ValueError, match="expected the edition"):
        corpora.corpus("alice")
    monkeypatch.setattr(corpora, "ALICE_SHA256", hashlib.sha256(content).hexdigest())
    assert corpora.corpus("alice").text == content.decode()


def test_alice_without_a_network_fails_with_the_ways_out(monkeypatch, tmp_path):
    pooch = pytest.importorskip("pooch")

    def unreachable(url, progressbar):
        raise ConnectionError("no route")

    monkeypatch.delenv("MEANFIELD_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path)
    monkeypatch.setattr(pooch.core, "choose_downloader", unreachable)
    with pytest.raises(FileNotFoundError, match=r"\(ConnectionError\).*MEANFIELD_DATA"):
        corpora.corpus("alice")


@pytest.mark.data
def test_the_real_alice_begins_down_the_rabbit_hole():
    if not os.environ.get("MEANFIELD_DATA"):
        pytest.skip("MEANFIELD_DATA names no folder with carroll-alice.txt")
    corpus = corpora.corpus("alice", download=False)
    assert "CHAPTER I. Down the Rabbit-Hole" in corpus.text
    assert corpus.sha256 == corpora.ALICE_SHA256


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 12))
def test_windows_are_consecutive_and_disjoint_or_refused(length, n, count):
    if n * count > length:
        with pytest.raises(ValueError, match="disjoint windows"):
            corpora.windows(range(length), n, count)
        return
    cut = corpora.windows(range(length), n, count)
    assert torch.equal(cut, cut[:, :1] + torch.arange(n))
    assert len(cut.unique()) == n * count


def test_longer_windows_stand_where_shorter_ones_do():
    tokens = torch.arange(1000) % 37
    assert torch.equal(corpora.windows(tokens, 98, 10)[:, :5], corpora.windows(tokens, 5, 10))
