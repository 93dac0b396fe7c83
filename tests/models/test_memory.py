"""Memory of caches lies in huge pages where Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fasttps
from fasttps.memory import empty_in_huge_pages
from tests.support.llama import tiny_llama

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that holds the address (proc_pid_smaps(5))."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no transparent huge pages",
)
def test_a_large_cache_asks_for_huge_pages():
    cache = fasttps.StaticKVCache(tiny_llama().config, max_seq_len=1 << 16)
    key = torch.zeros(1, 2, 1, 16)
    cache.layers[0].lazy_initialization(key)
    for rows in (cache.layers[0].keys, cache.layers[0].values):
        assert rows.nbytes >= 8 << 20
        assert "hg" in flags_at(rows.data_ptr() + rows.nbytes // 2)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 10, 1 << 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_memory_has_the_shape_that_was_asked_for(shape, dtype):
    memory = empty_in_huge_pages(shape, dtype)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (shape, dtype, True)
    memory.fill_(3)
    assert bool((memory == 3).all())
    assert empty_in_huge_pages(shape, dtype, "meta").is_meta


@pytest.mark.filterwarnings("error")
def test_a_fake_tensor_is_not_asked_for_its_address():
    with FakeTensorMode():
        assert empty_in_huge_pages((4, 8), torch.bfloat16).shape == (4, 8)
