"""causal_prefill where it is made for: whole prompts, in tiles of queries and keys."""

from __future__ import annotations

import pytest
import torch

from fasttps import isa
from tests.support.attention import attention_inputs, probe_means, randn, uniform_probe
from tests.support.attention_checks import check_attention, run

OP = "causal_prefill"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def prompt(new_tokens, past=0, **options):
    shape = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "rotary_dim": 32}
    max_seq_len = options.pop("max_seq_len", new_tokens + (past if isinstance(past, int) else 300))
    return attention_inputs(
        **(shape | options), new_tokens=new_tokens, past=past, max_seq_len=max_seq_len
    )


@pytest.mark.parametrize("new_tokens", [31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_prompts_around_tile_edges(device, dtype, new_tokens):
    check_attention(device, OP, prompt(new_tokens, dtype=dtype))


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("head_dim", [20, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("product", ["dpbf16", "fma"])
def test_ways_to_multiply_bf16(device, product, head_dim, int8):
    if product not in isa.bf16_products():
        pytest.skip(f"this CPU does not run {product}")
    with isa.bf16_product_forced(product):
        inputs = prompt(
            130, 70, dtype=torch.bfloat16, head_dim=head_dim, rotary_dim=head_dim, int8=int8
        )
        check_attention(device, OP, inputs)


@pytest.mark.parametrize("past", [1, 31, 63, 64, 65, 200])
@pytest.mark.parametrize("new_tokens", [23, 64, 65])
def test_prompts_on_a_filled_cache(device, new_tokens, past):
    """The diagonal runs through the tiles at any offset."""
    check_attention(device, OP, prompt(new_tokens, past, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_heads", [1, 3, 5, 8])
def test_groups_that_do_not_divide_a_tile(device, dtype, num_heads):
    """Query heads of a KV head and tokens share the rows of a tile."""
    check_attention(device, OP, prompt(70, dtype=dtype, num_heads=num_heads))


@pytest.mark.parametrize("window", [1, 17, 64, 65, 150])
def test_windows_that_hide_whole_tiles(device, window):
    check_attention(device, OP, prompt(200, 30, dtype=torch.bfloat16, window=window))


@pytest.mark.parametrize("padding", [1, 63, 64, 130, 199, 200])
def test_left_padding_that_hides_whole_tiles(device, padding):
    """Rows of padding tokens see nothing and give zeros."""
    inputs = prompt(200, batch=2, kv_start=torch.tensor([padding, 0]))
    check_attention(device, OP, inputs)
    out = run(device, OP, inputs)
    assert torch.equal(out[0, :padding], torch.zeros_like(out[0, :padding]))


def test_packed_sequences(device):
    """Three prompts in one row: a mask of blocks, in which most tiles are hidden."""
    owner = torch.tensor([0] * 70 + [1] * 90 + [2] * 40)
    mask = (owner[:, None] == owner).view(1, 1, 200, 200)
    inputs = prompt(200, rotary_dim=0, attn_mask=mask)
    check_attention(device, OP, inputs)
    packed = run(device, OP, inputs)
    for first, last in ((0, 70), (70, 160), (160, 200)):
        alone = prompt(last - first, rotary_dim=0)
        for name in ("query", "key", "value"):
            alone[name] = inputs[name][:, first:last]
        torch.testing.assert_close(run(device, OP, alone), packed[:, first:last], rtol=0, atol=2e-6)


def test_random_masks(device, dtype):
    mask = randn(3, 2, 2, 90, 120) > 1.5  # few keys a row
    inputs = prompt(90, batch=2, past=[0, 30], max_seq_len=120, attn_mask=mask, dtype=dtype)
    check_attention(device, OP, inputs)


def test_lengths_per_sequence(device, dtype):
    inputs = prompt(50, batch=4, past=[0, 1, 64, 131], dtype=dtype)
    check_attention(device, OP, inputs)


def test_int8_cache(device, dtype):
    check_attention(device, OP, prompt(100, 20, dtype=dtype, int8=True))


def test_ring_shorter_than_what_went_through_it(device):
    inputs = prompt(40, batch=2, past=[500, 77], max_seq_len=100, ring=True, window=61)
    check_attention(device, OP, inputs)


def test_options_together_over_tiles(device, dtype):
    inputs = prompt(
        100,
        batch=2,
        past=[40, 3],
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        rotary_dim=20,
        interleaved=True,
        window=75,
        kv_start=torch.tensor([50, 1]),
        softcap=3.0,
        scale=0.4,
        sinks=torch.tensor([0.0, 1.0, -1.0, 2.0]),
        transposed=True,
    )
    check_attention(device, OP, inputs)


def test_every_row_sees_its_prefix(device):
    """Row i of a uniform probe is i / 2: one row off anywhere shows."""
    out = run(device, OP, uniform_probe(kv_len=300, new_tokens=300, num_heads=3, head_dim=16))
    assert probe_means(out) == pytest.approx([i / 2 for i in range(300)], rel=1e-5)
