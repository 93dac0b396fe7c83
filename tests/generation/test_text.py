"""Text piece by piece is the text as a whole; stop strings are found wherever they begin."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from fasttps.generation import StopStrings, TextStream
from tests.support import tiny_folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes with a few merges: a character outside ASCII is several tokens."""
    return tiny_folder.tokenizer()


def streamed(tokenizer: Any, ids: list[int], **options: Any) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize(
    "text", ["hello", "hello hello", "naïve — 你好 🙂 end", "a\n\n b", "", "<user>hi<end>"]
)
@pytest.mark.parametrize("skip", [True, False])
def test_the_pieces_joined_are_the_text(tokenizer: Any, text: str, skip: bool) -> None:
    ids = tokenizer(text)["input_ids"]
    pieces = streamed(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_with_its_last_token(tokenizer: Any) -> None:
    ids = tokenizer("🙂")["input_ids"]
    assert len(ids) == 4
    assert streamed(tokenizer, ids) == ["", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_told(tokenizer: Any) -> None:
    ids = tokenizer("a🙂")["input_ids"][:-1]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("stop", ["lo w", "hello", "d", "<end>", "öl"])
def test_a_stop_string_is_found_with_its_last_token(tokenizer: Any, stop: str) -> None:
    ids = tokenizer("hello wörld öl<end>!")["input_ids"]
    stops = StopStrings(tokenizer, ["never", stop])
    found = next(at for at, token in enumerate(ids) if stops.push(token))
    assert stop in tokenizer.decode(ids[: found + 1])
    assert stop not in tokenizer.decode(ids[:found])
