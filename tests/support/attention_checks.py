"""One call of an attention op, judged in all that it returns and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttps.reference import attention as reference_attention
from tests.support.accuracy import FLOOR, assert_accurate
from tests.support.attention import (
    attention_in_float64,
    attention_in_same_dtype,
    without_key,
)
from tests.support.devices import Device
from tests.support.errors import bits


def run(device: Device, op: str, inputs: dict[str, Any], **options: Any) -> Any:
    """The op's result on the CPU; the inputs are kept."""
    result = device.call(op, **device.arguments(inputs | options))
    return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()


def slots_written(inputs: dict[str, Any]) -> Tensor:
    """bool [batch, max_seq_len]: the slots of the new tokens."""
    batch, new_tokens = inputs["query"].shape[:2]
    max_seq_len = inputs["k_cache"].size(2)
    written = torch.zeros(batch, max_seq_len, dtype=torch.bool)
    if inputs["key"] is not None:
        for sequence, first in enumerate(inputs["seq_lens"].expand(batch).tolist()):
            written[sequence, (first + torch.arange(new_tokens)) % max_seq_len] = True
    return written


def assert_caches(inputs: dict[str, Any], caches: dict[str, Tensor]) -> None:
    """Old rows keep their bits; new values are exact; new keys are the rotated keys, rounded once.

    inputs: before the call. caches: the tensors after it, on the CPU.
    """
    written = slots_written(inputs)[:, None].expand(inputs["k_cache"].shape[:3])
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name in inputs:
            kept_before, kept_after = inputs[name][~written], caches[name][~written]
            assert torch.equal(bits(kept_before), bits(kept_after)), f"{name}: an old row changed"
    if inputs["key"] is None:
        return
    new = {"k": inputs["key"], "v": inputs["value"]}
    rope = (inputs.get("cos"), inputs.get("sin"), inputs.get("interleaved", False))
    for name, rows in new.items():
        rotated = name == "k" and rope[0] is not None
        exact = reference_attention.apply_rope(rows.double(), *rope) if rotated else rows.double()
        cache = torch.zeros(inputs["k_cache"].shape, dtype=torch.float64)
        reference_attention.write_rows(cache, None, exact, inputs["seq_lens"], ring=True)
        exact, stored = cache[written], caches[f"{name}_cache"][written]
        if f"{name}_scale" in inputs:
            assert_quantized(stored, caches[f"{name}_scale"][written], exact, rotated)
        elif rotated:
            error = (stored.double() - exact).abs().max()
            assert error <= 1.01 * FLOOR[stored.dtype] * exact.abs().max(), name
        else:
            assert torch.equal(stored.double(), exact), f"{name}_cache: not a copy"


def assert_quantized(stored: Tensor, scale: Tensor, exact: Tensor, rotated: bool) -> None:
    """int8 rows of float32 numbers; rotated: these were computed, which may move a tie by one."""
    quantized, exact_scale = reference_attention.quantize_rows(exact.float())
    if rotated:
        torch.testing.assert_close(scale, exact_scale, rtol=FLOOR[torch.float32], atol=0)
        assert (stored.int() - quantized.int()).abs().max() <= 1
    else:
        assert torch.equal(scale, exact_scale)
        assert torch.equal(stored, quantized)


def check_attention(device: Device, op: str, inputs: dict[str, Any]) -> None:
    """Output and caches of one call, against float64 and PyTorch in the same dtype."""
    query, seq_lens = inputs["query"], inputs["seq_lens"]
    arguments = device.arguments(inputs)
    out = device.call(op, **arguments)
    assert out.dtype == query.dtype
    assert out.is_contiguous()
    assert torch.equal(arguments["seq_lens"].cpu(), seq_lens), "seq_lens changed"
    caches = {name: arguments[name].cpu() for name in arguments if name[1:] in ("_cache", "_scale")}
    assert_caches(inputs, caches)
    judged = without_key(inputs, caches) if "k_scale" in inputs else inputs
    exact, _ = attention_in_float64(judged)
    assert_accurate(out, exact, attention_in_same_dtype(judged))
