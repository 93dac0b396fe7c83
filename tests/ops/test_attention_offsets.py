"""Offsets past 2^31 elements, over memory that is mapped but for the most part never touched."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.support.attention import randn
from tests.support.devices import Device

SLOTS = (1 << 25) + 8  # of 64 elements: 2^31 + 512
FAR = (1 << 25) + 5
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def untouched_zeros(device: Device, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in an anonymous mapping; a page takes memory when it is first written."""
    if device.torch_device.type != "cpu":
        pytest.skip(f"{device.name}: memory cannot be mapped without being taken")
    count = torch.Size(shape).numel()
    memory = mmap.mmap(
        -1,
        count * dtype.itemsize,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
    )
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def caches(device, num_kv_heads=1, dtype=torch.bfloat16):
    return {
        name: untouched_zeros(device, 1, num_kv_heads, SLOTS, 64, dtype=dtype)
        for name in ("k_cache", "v_cache")
    }


def twos(num_heads):
    return torch.full((1, 1, num_heads, 64), 2.0, dtype=torch.bfloat16)


def test_update_writes_a_far_slot(device):
    for heads in (1, 2):
        far = caches(device, heads)
        device.call(
            "kv_cache_update_",
            **far,
            key=twos(heads),
            value=twos(heads),
            seq_lens=torch.tensor(FAR),
        )
        for cache in far.values():
            assert (cache[:, :, FAR] == 2).all()
            assert (cache[:, :, FAR - 1] == 0).all()
            assert (cache[:, :, 5] == 0).all()  # where a 32-bit offset would land


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_attention_writes_and_reads_a_far_slot(device, attention_op, num_kv_heads):
    far = caches(device, num_kv_heads)
    arguments = {
        "query": randn(0, 1, 1, 4, 64, dtype=torch.bfloat16),
        "key": torch.zeros(1, 1, num_kv_heads, 64, dtype=torch.bfloat16),
        "value": twos(num_kv_heads),
        "seq_lens": torch.tensor(FAR),
        **far,
    }
    out = device.call(attention_op, **arguments, window=1)
    assert torch.equal(out, twos(4))
    assert (far["v_cache"][:, :, 5] == 0).all()
    out = device.call(attention_op, **arguments, window=4)  # three zeros and a two
    assert torch.equal(out, twos(4) / 4)
    out = device.call(attention_op, **arguments, kv_start=torch.tensor([FAR - 7]))
    assert torch.equal(out, twos(4) / 8)


def test_attention_over_a_far_int8_slot(device, attention_op):
    far = caches(device, dtype=torch.int8)
    scales = {
        name: untouched_zeros(device, 1, 1, SLOTS, dtype=torch.float32)
        for name in ("k_scale", "v_scale")
    }
    out = device.call(
        attention_op,
        query=randn(0, 1, 1, 4, 64, dtype=torch.bfloat16),
        key=torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16),
        value=twos(1),
        seq_lens=torch.tensor(FAR),
        **far,
        **scales,
        window=4,
    )
    assert torch.equal(out, twos(4) / 4)
    assert (far["v_cache"][0, 0, FAR] == 127).all() and (far["v_cache"][0, 0, 5] == 0).all()
    assert scales["v_scale"][0, 0, FAR].item() == pytest.approx(2 / 127)


def test_mask_rows_2_31_apart(device, attention_op):
    """A view of which a 32-bit offset reads the first row twice: keys 3 and 5 are visible."""
    memory = untouched_zeros(device, (1 << 31) + 64, dtype=torch.bool)
    mask = memory.as_strided((1, 1, 2, 64), (0, 0, 1 << 31, 1))
    mask[0, 0, 0, 3] = mask[0, 0, 1, 5] = True
    out = device.call(
        attention_op,
        query=torch.zeros(1, 2, 1, 8),
        key=None,
        value=None,
        k_cache=randn(0, 1, 1, 64, 8),
        v_cache=torch.arange(64.0).view(1, 1, 64, 1).expand(1, 1, 64, 8).clone(),
        seq_lens=torch.tensor(64),
        query_start=torch.tensor(64),
        attn_mask=mask,
    )
    assert out[0, 0].eq(3).all() and out[0, 1].eq(5).all()


def test_sequences_of_a_batch_2_31_apart(device, attention_op):
    """Two sequences whose caches lie 2^31 elements apart in one buffer."""
    wide = untouched_zeros(device, 2, 1, SLOTS, 64, dtype=torch.bfloat16)[:, :, :16]
    assert wide.stride(0) > 1 << 31
    both = {"k_cache": wide[:, :, :8], "v_cache": wide[:, :, 8:]}
    value = twos(1).repeat(2, 1, 1, 1)
    value[1] = 3.0
    out = device.call(
        attention_op,
        query=randn(0, 2, 1, 1, 64, dtype=torch.bfloat16),
        key=torch.zeros_like(value),
        value=value,
        seq_lens=torch.tensor([3, 0]),
        **both,
        window=1,
    )
    assert torch.equal(out, value)
    assert (both["v_cache"][1, 0, 0] == 3).all() and (both["v_cache"][0, 0, 0] == 0).all()
