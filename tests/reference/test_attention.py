"""The attention twin against the definition, element by element in Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttps import reference
from tests.support.attention import attention_inputs, copies, randn


def rotate_by_definition(x: list[float], cos: list[float], sin: list[float], interleaved: bool):
    r = len(cos)
    out = list(x)
    for j in range(r):
        if interleaved:
            turned = -x[j + 1] if j % 2 == 0 else x[j - 1]
        else:
            turned = -x[j + r // 2] if j < r // 2 else x[j - r // 2]
        out[j] = x[j] * cos[j] + turned * sin[j]
    return out


def attention_by_definition(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Every output element from positions kept in a dictionary: no slots, no ring, no tensors."""
    query, key = inputs["query"], inputs["key"]
    batch, new_tokens, num_heads, head_dim = query.shape
    num_kv_heads, max_seq_len = inputs["k_cache"].shape[1:3]
    seq_lens = inputs["seq_lens"].expand(batch).tolist()
    query_start = inputs.get("query_start")
    starts = seq_lens if query_start is None else query_start.expand(batch).tolist()
    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = mask.expand(batch, num_heads, new_tokens, mask.size(3))
    scale = inputs.get("scale") or 1 / math.sqrt(head_dim)
    out = torch.zeros(batch, new_tokens, num_heads, head_dim, dtype=torch.float64)
    lse = torch.zeros(batch, num_heads, new_tokens, dtype=torch.float64)

    def turn(x: Tensor, b: int, i: int) -> list[float]:
        if inputs.get("cos") is None:
            return x.tolist()
        table = b if inputs["cos"].size(0) > 1 else 0
        cos, sin = inputs["cos"][table, i].tolist(), inputs["sin"][table, i].tolist()
        return rotate_by_definition(x.tolist(), cos, sin, inputs["interleaved"])

    for b in range(batch):
        for h in range(num_heads):
            kv_head = h // (num_heads // num_kv_heads)
            rows = {}  # position -> (slot, key row, value row)
            for p in range(max(0, seq_lens[b] - max_seq_len), seq_lens[b]):
                slot = p % max_seq_len
                k, v = inputs["k_cache"][b, kv_head, slot], inputs["v_cache"][b, kv_head, slot]
                rows[p] = (slot, k.tolist(), v.tolist())
            if key is not None:
                for i in range(new_tokens):
                    p = seq_lens[b] + i
                    rows.pop(p - max_seq_len, None)  # overwritten
                    value = inputs["value"][b, i, kv_head].tolist()
                    rows[p] = (p % max_seq_len, turn(key[b, i, kv_head], b, i), value)
            for i in range(new_tokens):
                q = turn(query[b, i, h], b, i)
                terms = []
                for p, (slot, k, v) in rows.items():
                    at = starts[b] + i
                    seen = p <= at
                    if inputs.get("window") is not None:
                        seen = seen and p > at - inputs["window"]
                    if inputs.get("kv_start") is not None:
                        seen = seen and p >= int(inputs["kv_start"][b])
                    if mask is not None:
                        seen = seen and bool(mask[b, h, i, slot])
                    if seen:
                        score = scale * sum(x * y for x, y in zip(q, k))
                        if inputs.get("softcap") is not None:
                            score = inputs["softcap"] * math.tanh(score / inputs["softcap"])
                        terms.append((score, v))
                weights = [math.exp(score) for score, _ in terms]
                total = sum(weights)
                if inputs.get("sinks") is not None:
                    total += math.exp(float(inputs["sinks"][h]))
                lse[b, h, i] = math.log(total) if total else -math.inf
                for d in range(head_dim):
                    numerator = sum(w * v[d] for w, (_, v) in zip(weights, terms))
                    out[b, i, h, d] = numerator / total if total else 0.0
    return out, lse


CASES = {
    "plain": {},
    "one_query_head_per_kv_head": {"num_heads": 2},
    "one_kv_head": {"num_kv_heads": 1, "num_heads": 3},
    "several_new_tokens": {"new_tokens": 4},
    "empty_cache": {"past": 0, "new_tokens": 3},
    "lengths_per_sequence": {"past": [0, 9], "new_tokens": 2},
    "rope_halves": {"rotary_dim": 8, "new_tokens": 2},
    "rope_interleaved": {"rotary_dim": 8, "interleaved": True, "new_tokens": 2},
    "partial_rope": {"rotary_dim": 4, "past": [3, 5]},
    "partial_interleaved_rope": {"rotary_dim": 4, "interleaved": True},
    "attend_only": {"attend_only": True, "new_tokens": 2},
    "not_causal": {"attend_only": True, "new_tokens": 3, "query_start": torch.tensor(7)},
    "rows_before_the_cache": {"new_tokens": 3, "query_start": torch.tensor([-2, 5])},
    "window": {"window": 3, "new_tokens": 4},
    "left_padding": {"kv_start": torch.tensor([2, 8]), "new_tokens": 2},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -2.0, 30.0])},
    "ring": {"ring": True, "window": 5, "past": [30, 17], "new_tokens": 3, "max_seq_len": 8},
    "ring_not_full": {"ring": True, "window": 5, "past": 3, "max_seq_len": 8},
    "everything": {
        "new_tokens": 3,
        "past": [6, 9],
        "rotary_dim": 6,
        "interleaved": True,
        "window": 6,
        "kv_start": torch.tensor([3, 1]),
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -0.5, 1.0, 0.0]),
        "scale": 0.3,
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_float64_twin_meets_the_definition(name, masked):
    options = {"head_dim": 8, "max_seq_len": 16} | CASES[name]
    inputs = copies(attention_inputs(**options), torch.float64)
    if masked:
        batch, new_tokens, num_heads, _ = inputs["query"].shape
        noise = randn(9, batch, num_heads, new_tokens, inputs["k_cache"].size(2))
        inputs["attn_mask"] = noise > 0
    expected_out, expected_lse = attention_by_definition(inputs)
    out, lse = reference.rope_attention_decode(**inputs, return_lse=True)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


def test_both_attention_twins_are_one():
    assert reference.causal_prefill is reference.rope_attention_decode


def test_types_of_the_results():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = attention_inputs(dtype=dtype)
        assert reference.rope_attention_decode(**copies(inputs)).dtype == dtype
        out, lse = reference.rope_attention_decode(**copies(inputs), return_lse=True)
        assert out.dtype == lse.dtype == torch.float32
