"""`fasttps.generate`: tokens after a prompt, by a thin loop over a stepper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fasttps.generation.decode_stepper import DecodeStepper
from fasttps.generation.sampling import Sampler, Sampling
from fasttps.generation.stepper import ModelStepper, Stepper
from fasttps.generation.text import StopStrings

# Called after each step with the new token of every sequence, None for one that has ended;
# generation ends where it returns something true.
OnTokens = Callable[[list[int | None]], Any]

# Of a model's generation_config: what `generate` of transformers would obey and ours does not, and
# the values at which it does nothing.
_NOT_OBEYED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "remove_invalid_values": (None, False),
    "sequence_bias": (None,),
    "watermarking_config": (None,),
}


@dataclass(frozen=True)
class Generation:
    """What was generated, and how fast.

    Attributes:
        token_ids: the new tokens of each sequence, the token that ended it included.
        finish_reasons: of each sequence: "stop" (a stop token or string), "length", "callback".
        prefill_s: seconds from the call to the first new token.
        decode_s: seconds from the first new token to the last.
    """

    token_ids: list[list[int]]
    finish_reasons: list[str]
    prefill_s: float
    decode_s: float


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    on_tokens: OnTokens | None = None,
    cache: Any = None,
) -> Generation:
    """Generate tokens after `input_ids` with a causal language model of transformers.

    The tokens are those of the model's own `generate` where both are greedy; drawn ones have the
    same distribution. Of the model's generation_config only the end tokens, the repetition
    penalty and the suppressed tokens count; an entry that would change the answer and is not
    known here (a ban of repeated n-grams, a least length) is an error.

    Args:
        input_ids: int64 [batch, tokens].
        max_new_tokens: the most tokens of each answer.
        attention_mask: [batch, tokens], 0 where a prompt is padded, at its left; None: nowhere.
        temperature: 0: greedy, and the three filters must be off.
        top_k, top_p, min_p, repetition_penalty: see `Sampling`. The penalty is by default the
            one of the generation_config.
        seed: draw the same tokens each time; or `generator`; neither: torch's own generator.
        stop_token_ids: tokens that end an answer; by default the model's end tokens; (): none.
        stop_strings: strings that end an answer as soon as its text holds one; needs `tokenizer`.
        on_tokens: called after each step with a list: the new token of each sequence, None for
            one that has ended. Generation ends where it returns something true.
        cache: of transformers' kind, with room for prompt and answer, empty or holding the first
            tokens of the prompt; by default a `StaticKVCache`, of the `kv` of the patch.

    Raises:
        ValueError: an argument out of its range; the prompt is empty or not padded at its left.
        TypeError: an argument of another type.
    """
    begin = time.perf_counter()
    if not callable(model):
        raise TypeError(f"generate: model wanted a model, got {type(model).__name__}")
    mask = _checked_prompt(input_ids, attention_mask)
    _check_count("max_new_tokens", max_new_tokens)
    defaults = getattr(model, "generation_config", None)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if temperature == 0 and replace(sampling, temperature=1.0) != Sampling(1.0):
        raise ValueError("generate: top_k, top_p and min_p want a temperature above 0, got 0")
    sampling = _with_defaults(sampling, defaults, repetition_penalty)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generate: generator wanted a torch.Generator, got {type(generator).__name__}"
        )
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"generate: seed wanted an int, got {type(seed).__name__}")
        if generator is not None:
            raise ValueError("generate: seed and generator exclude each other, got both")
        generator = torch.Generator(input_ids.device).manual_seed(seed)
    if on_tokens is not None and not callable(on_tokens):
        raise TypeError(f"generate: on_tokens wanted a callable, got {type(on_tokens).__name__}")
    ends = _Ends(input_ids.size(0), max_new_tokens, _stop_ids(stop_token_ids, defaults), on_tokens)
    if stop_strings:
        ends.watch(tokenizer, stop_strings)
    max_seq_len = input_ids.size(1) + max_new_tokens
    with torch.inference_mode():
        stepper = _stepper(model, cache, max_seq_len)
        return _run(stepper, input_ids, mask, Sampler(sampling, generator), ends, begin)


def _run(
    stepper: Stepper,
    input_ids: Tensor,
    mask: Tensor | None,
    sampler: Sampler,
    ends: _Ends,
    begin: float,
) -> Generation:
    sampling, seen = sampler.sampling, _Seen(sampler.sampling, input_ids, mask, ends.max_new_tokens)
    tokens = sampler(stepper.prefill(input_ids, mask), seen.ids)
    first = last = 0.0
    while True:
        going = ends.push(tokens.tolist())
        last = time.perf_counter()
        first = first or last
        if not going:
            return Generation(ends.token_ids, ends.reasons, first - begin, last - first)
        if sampling.is_argmax:
            tokens = stepper.greedy_step(tokens)
        else:
            seen.push(tokens)
            tokens = sampler(stepper.step(tokens), seen.ids)


class _Seen:
    """The ids that the repetition penalty counts: a buffer, filled as they come."""

    def __init__(
        self, sampling: Sampling, input_ids: Tensor, mask: Tensor | None, max_new_tokens: int
    ) -> None:
        self._wanted = sampling.repetition_penalty != 1
        self._filled = input_ids.size(1)
        if not self._wanted:
            return
        batch = input_ids.size(0)
        self._buffer = input_ids.new_zeros(batch, self._filled + max_new_tokens)
        # Padding becomes the last token of its prompt, which counts anyway.
        prompt = input_ids if mask is None else input_ids.where(mask != 0, input_ids[:, -1:])
        self._buffer[:, : self._filled] = prompt

    @property
    def ids(self) -> Tensor | None:
        return self._buffer[:, : self._filled] if self._wanted else None

    def push(self, tokens: Tensor) -> None:
        if self._wanted:
            self._buffer[:, self._filled] = tokens
            self._filled += 1


class _Ends:
    """The answers as they grow, and when each is over."""

    def __init__(
        self,
        batch: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        on_tokens: OnTokens | None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.token_ids: list[list[int]] = [[] for _ in range(batch)]
        self.reasons = [""] * batch
        self._stop_ids = stop_ids
        self._on_tokens = on_tokens
        self._strings: list[StopStrings] = []

    def watch(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if not isinstance(strings, Iterable):
            raise TypeError(
                f"generate: stop_strings wanted a list of strings, got {type(strings).__name__}"
            )
        if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(
                f"generate: stop_strings wanted strings that are not empty, got {strings!r}"
            )
        if tokenizer is None:
            raise ValueError("generate: stop_strings want a tokenizer, got None")
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(
                f"generate: tokenizer wanted a tokenizer, got {type(tokenizer).__name__}"
            )
        self._strings = [StopStrings(tokenizer, strings) for _ in self.token_ids]

    def push(self, tokens: list[int]) -> bool:
        """Take a step's tokens; whether some sequence goes on."""
        reasons = self.reasons
        new: list[int | None] = [None if reasons[at] else token for at, token in enumerate(tokens)]
        for at, token in enumerate(new):
            if token is None:
                continue
            self.token_ids[at].append(token)
            if token in self._stop_ids or (self._strings and self._strings[at].push(token)):
                reasons[at] = "stop"
            elif len(self.token_ids[at]) == self.max_new_tokens:
                reasons[at] = "length"
        if self._on_tokens is not None and self._on_tokens(new):
            self.reasons = [reason or "callback" for reason in reasons]
        return not all(self.reasons)


def _stepper(model: Any, cache: Any, max_seq_len: int) -> Stepper:
    """The fastest way to run this model into this cache."""
    if cache is None:
        from fasttps.kv_cache import StaticKVCache  # here: it imports transformers

        cache = StaticKVCache.for_model(model, max_seq_len)
    if not callable(getattr(cache, "get_seq_length", None)):
        raise TypeError(
            f"generate: cache wanted a cache of transformers' kind, got {type(cache).__name__}"
        )
    kind = DecodeStepper if hasattr(model, "decode") else ModelStepper
    return kind(model, cache, max_seq_len)


def _checked_prompt(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The mask, or None where nothing is padded."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"generate: input_ids wanted an int64 tensor, got {kind}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"generate: input_ids wanted [batch, tokens] of at least one each, "
            f"got {list(input_ids.shape)}"
        )
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"generate: attention_mask wanted a tensor, got {type(attention_mask).__name__}"
        )
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: attention_mask wanted {list(input_ids.shape)} like input_ids, "
            f"got {list(attention_mask.shape)}"
        )
    mask = (attention_mask != 0).to(torch.int64)
    if bool(mask.all()):
        return None
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise ValueError(
            "generate: attention_mask wanted padding at the left of each prompt only; "
            'a tokenizer with padding_side="left" gives it'
        )
    return mask


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"generate: {name} wanted an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"generate: {name} wanted at least 1, got {value}")


def _with_defaults(sampling: Sampling, defaults: Any, penalty: float | None) -> Sampling:
    """With what the model's generation_config adds, as transformers would add it."""
    for name, idle in _NOT_OBEYED.items():
        value = getattr(defaults, name, None)
        if value not in idle:
            raise ValueError(
                f"generate: the model's generation_config sets {name} = {value!r}, which "
                "fasttps.generate does not do; model.generate does, or set it to None"
            )
    if penalty is None:
        penalty = getattr(defaults, "repetition_penalty", None) or 1.0
    suppressed = tuple(getattr(defaults, "suppress_tokens", None) or ())
    return replace(sampling, repetition_penalty=penalty, suppress_tokens=suppressed)


def _stop_ids(asked: Sequence[int] | None, defaults: Any) -> frozenset[int]:
    if asked is None:
        asked = getattr(defaults, "eos_token_id", None)
        if asked is None:
            return frozenset()
    if isinstance(asked, Tensor):
        asked = asked.flatten().tolist()
    ids = list(asked) if isinstance(asked, Iterable) else [asked]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise TypeError(f"generate: stop_token_ids wanted ints, got {ids!r}")
    return frozenset(ids)
