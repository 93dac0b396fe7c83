"""The tokenizer of a GGUF file, against the tokenizers that transformers has."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

pytest.importorskip("transformers", reason="transformers is not installed")

from fasttps.gguf import BrokenGguf, UnsupportedGguf
from fasttps.gguf.header import Header, read_header
from fasttps.gguf.tokenizer import tokenizer
from tests.support import tiny_folder
from tests.support.smollm2 import smollm2_tokenizer

TEXTS = (
    "The capital of France is Paris.",
    "12 + 345 = 357, and 1000000",
    "naïve — 你好 🙂 don't I'LL",
    "  spaces \t tabs\n\n\nlines ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
)


def test_the_tokens_of_smollm2() -> None:
    from fasttps.cli.demo import smollm2_path

    theirs = smollm2_tokenizer()
    ours = tokenizer(read_header(smollm2_path()))
    long = (Path(tiny_folder.__file__).parent / "teacher_text.txt").read_text()
    for text in (*TEXTS, long):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )


def sentencepiece(**changes: Any) -> Header:
    """A vocabulary as SentencePiece makes it: bytes, pieces with scores, the best first."""
    pieces = ["▁h", "el", "lo", "ello", "▁hello", "▁", "h", "e", "l", "o", "ö", "w", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": array("f", [0.0] * 259 + [-float(at) for at in range(13)]),
        "tokenizer.ggml.token_type": array("i", [2, 3, 3, *[6] * 256, *[1] * 13]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return Header(
        {key: value for key, value in metadata.items() if value is not None}, {}, "little"
    )


def tokens_of(header: Header, text: str) -> list[str]:
    made = tokenizer(header)
    return made.convert_ids_to_tokens(made(text)["input_ids"])


def test_sentencepiece_merges_the_best_pair_first_and_falls_back_to_bytes() -> None:
    assert tokens_of(sentencepiece(), "hello") == ["<s>", "▁hello"]
    assert tokens_of(sentencepiece(), "wö") == ["<s>", "▁w", "ö"]
    assert tokens_of(sentencepiece(), "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(sentencepiece(add_space_prefix=False), "hello") == ["<s>", "h", "ello"]
    assert tokens_of(sentencepiece(add_bos_token=False), "hello") == ["▁hello"]
    assert tokens_of(sentencepiece(add_eos_token=True), "hello") == ["<s>", "▁hello", "</s>"]


def test_sentencepiece_text_comes_back() -> None:
    made = tokenizer(sentencepiece())
    for text in ("hello hello", "wé  hello", " hello"):
        assert made.decode(made(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "rwkv"}, UnsupportedGguf, "'rwkv'"),
        ({"model": None}, BrokenGguf, "lacks tokenizer.ggml.model"),
        ({"tokens": None}, BrokenGguf, "lacks tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, BrokenGguf, "no strings"),
        ({"scores": None}, BrokenGguf, "score"),
        ({"scores": array("f", [0.0])}, BrokenGguf, "score"),
        ({"eos_token_id": 1000}, BrokenGguf, "eos_token_id"),
        ({"model": "gpt2", "pre": "own", "merges": []}, UnsupportedGguf, "'own'"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a"]}, BrokenGguf, "no pairs"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["q z"]}, BrokenGguf, "no sense"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer(sentencepiece(**changes))


# By hand, from the patterns of the models' own tokenizers.
DIGITS_AND_ENDINGS = "it's 12345 HelloWorld's\n\n x"
CUT = {
    "gpt-2": ["it", "'s", " 12345", " HelloWorld", "'s", "\n\n", " x"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", "5", " HelloWorld", "'s", "\n\n", " x"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", "5", " HelloWorld", "'s", "\n\n", " x"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", "5", " Hello", "World", "'s", "\n\n", " x"],
    "gpt-4o": ["it's", " ", "123", "45", " Hello", "World's", "\n\n", " x"],
    "llama-bpe": ["it", "'s", " ", "123", "45", " HelloWorld", "'s", "\n\n", " x"],
}
CUT |= dict.fromkeys(("lfm2", "chatglm-bpe", "glm4", "dbrx"), CUT["llama-bpe"])


@pytest.mark.parametrize("pre", CUT)
def test_text_is_cut_as_the_file_says(pre: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    changes = {"model": "gpt2", "pre": pre, "merges": ["a b"], "scores": None, "token_type": None}
    header = sentencepiece(
        **changes, tokens=["<s>", *letters, "ab"], bos_token_id=0, eos_token_id=0,
        unknown_token_id=None,
    )  # fmt: skip
    made = tokenizer(header)
    cut = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str(DIGITS_AND_ENDINGS)
    assert [DIGITS_AND_ENDINGS[begin:end] for _, (begin, end) in cut] == CUT[pre]
    begins = made("a")["input_ids"][0] == 0
    assert begins == (pre in ("llama-bpe", "lfm2", "tekken")), "llama.cpp's default for a begin"
