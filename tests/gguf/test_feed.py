"""Pieces of a file's tensors that another thread reads ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fasttps.gguf import feed as feeding
from fasttps.gguf.header import read_header
from fasttps.gguf.load import open_file

FILE = Path(__file__).parent / "fixtures/llama.gguf"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture
def tensors():
    return open_file(FILE, read_header(FILE))[2]


@pytest.fixture
def order(tensors, monkeypatch):
    """More pieces than are read ahead, some with rows of RoPE pairs."""
    monkeypatch.setattr(feeding, "PIECE_BYTES", 1)
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in PARTS]
    found = [
        piece
        for name in names
        for piece in feeding.pieces(tensors, name, 0, tensors.places[name].shape[0])
    ]
    assert len(found) > 2 * feeding.AHEAD
    return found


def test_pieces_are_the_rows_in_order(tensors, order):
    with feeding.Feed(tensors, order) as feed:
        for piece in order:
            assert torch.equal(feed.take(piece), tensors.rows(*piece)), piece


def test_a_piece_out_of_turn_disturbs_no_other(tensors, order):
    with feeding.Feed(tensors, order) as feed:
        for at, piece in enumerate(order):
            other = order[(7 * at) % len(order)]
            assert other == piece or torch.equal(feed.take(other), tensors.rows(*other))
            assert torch.equal(feed.take(piece), tensors.rows(*piece)), piece
        assert torch.equal(feed.take(order[0]), tensors.rows(*order[0]))


def test_what_was_taken_holds_until_the_next_call(tensors, order):
    with feeding.Feed(tensors, order) as feed:
        for piece in order:
            taken = feed.take(piece)
            feed._pool.submit(int).result()  # after every read that is under way
            assert torch.equal(taken, tensors.rows(*piece)), piece


def test_threads_are_given_back(tensors, order):
    before = torch.get_num_threads()
    with pytest.raises(KeyError), feeding.Feed(tensors, order):
        assert torch.get_num_threads() == max(1, before - 1)
        raise KeyError
    assert torch.get_num_threads() == before
