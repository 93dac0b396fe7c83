"""The tokenizer that the metadata of a GGUF file describes, built with the tokenizers package.

Two kinds: `gpt2`, byte-level BPE with merges in the file, split as `tokenizer.ggml.pre` says; and
`llama`, SentencePiece BPE whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from fasttps.gguf.header import BrokenGguf, Header, UnsupportedGguf

CONTROL, USER_DEFINED = 3, 4  # ggml's types of tokens that are matched whole
SPACE = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What `tokenizer.ggml.pre` stands for, after llama.cpp's src/llama-vocab.cpp: the pattern by which
# text is cut before the merges.
_SPLITS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_WORDS_FIRST = {  # words that are tokens are taken whole, before the merges
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("glm4", "tekken"),
}
_BEGIN_FIRST = _WORDS_FIRST - {"glm4"}  # a text begins with its token unless the file says not
_GPT2 = {None, "default", "gpt-2", "olmo", "phi-2"}  # the pattern of GPT-2
# Each digit alone first.
_GPT2_DIGITS = {"smollm", "starcoder", "refact", "command-r", "exaone", "codeshell", "mellum2"}


def tokenizer(header: Header) -> Any:
    """A PreTrainedTokenizerFast with the file's special tokens and chat template.

    Raises:
        UnsupportedGguf: a kind of tokenizer, or of splitting, that is not known.
        BrokenGguf: there is none, or its parts do not fit.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = header.metadata
    kind, tokens = _get(metadata, "model", str), _get(metadata, "tokens", list)
    if not all(isinstance(token, str) for token in tokens):
        raise BrokenGguf("has tokenizer.ggml.tokens that are no strings")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind)
    if build is None:
        raise UnsupportedGguf(f"has a tokenizer of the kind {kind!r}; gpt2 and llama are known")
    made = build(metadata, tokens)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    for wanted in (CONTROL, USER_DEFINED):
        made.add_tokens(
            [
                AddedToken(token, normalized=False, special=wanted == CONTROL)
                for token, its_type in zip(tokens, types)
                if its_type == wanted
            ]
        )
    named = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    special = {
        name: _token(metadata, tokens, key)
        for name, key in named.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGIN_FIRST
    _add_ends(made, metadata, tokens, special, default_bos=begins)
    ready = PreTrainedTokenizerFast(tokenizer_object=_Given(made), padding_side="left", **special)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        ready.chat_template = template
    return ready


class _Given:
    """Hands a Tokenizer over: the class would copy it, by way of its JSON."""

    def __init__(self, made: Tokenizer) -> None:
        self._made = made

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._made


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _get(metadata, "merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise BrokenGguf("has tokenizer.ggml.merges that are no pairs")
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, (str, type(None))):
        raise BrokenGguf(f"has tokenizer.ggml.pre = {pre!r}")
    made = Tokenizer(_bpe(_vocabulary(tokens), merges, ignore_merges=pre in _WORDS_FIRST))
    if pre in _SPLITS:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _GPT2 | _GPT2_DIGITS:
        cut: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre in _GPT2_DIGITS:
            cut.insert(0, pre_tokenizers.Digits(individual_digits=True))
        made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    else:
        raise UnsupportedGguf(f"has a tokenizer that splits text in the unknown way {pre!r}")
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = _vocabulary(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise BrokenGguf("has no score for each token")
    unknown = _token(metadata, tokens, "unknown_token_id", default=0)
    made = Tokenizer(
        _bpe(
            vocabulary,
            list(_merges_by_score(vocabulary, tokens, scores)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    ends: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        ends.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(ends)
    return made


def _merges_by_score(
    vocabulary: dict[str, int], tokens: list[str], scores: Iterable[float]
) -> Iterable[tuple[str, str]]:
    """Every pair of tokens that makes a token, the pairs of the best token first."""
    by_score = sorted(zip(scores, range(len(tokens))), key=lambda pair: (-pair[0], pair[1]))
    for _, at in by_score:
        token = tokens[at]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right


def _bpe(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # tokenizers raises nothing more special
        raise BrokenGguf(f"has a tokenizer that makes no sense: {error}") from error


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token to id; of two equal tokens the first, as in llama.cpp."""
    made: dict[str, int] = {}
    for at, token in enumerate(tokens):
        made.setdefault(token, at)
    return made


def _add_ends(
    made: Tokenizer,
    metadata: dict[str, Any],
    tokens: list[str],
    special: dict[str, str],
    default_bos: bool,
) -> None:
    """Put the tokens for begin and end around a text, where the file says so."""
    bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    ends = [
        special[name] if wanted and name in special else None
        for name, wanted in (("bos_token", bos), ("eos_token", eos))
    ]
    if not any(ends):
        return
    parts = [part for part in (ends[0], "$A", ends[1]) if part]
    pair = [part for part in (ends[0], "$B", ends[1]) if part]
    used = [(token, tokens.index(token)) for token in dict.fromkeys(filter(None, ends))]
    made.post_processor = processors.TemplateProcessing(
        single=parts, pair=parts + [f"{part}:1" for part in pair], special_tokens=used
    )


def _token(
    metadata: dict[str, Any], tokens: list[str], key: str, default: int | None = None
) -> str:
    at = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(at, int) or not 0 <= at < len(tokens):
        raise BrokenGguf(f"has tokenizer.ggml.{key} = {at!r} and {len(tokens)} tokens")
    return tokens[at]


def _get(metadata: dict[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        raise BrokenGguf(f"lacks tokenizer.ggml.{key}")
    return value
