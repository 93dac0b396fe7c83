"""merge_attention: any split of a cache equals one pass."""

from __future__ import annotations

import math

import pytest
import torch

from fasttps import reference
from tests.support.attention import attention_in_float64, attention_inputs, copies, randn
from tests.support.attention_checks import run
from tests.support.errors import assert_refused


def parts_of(seed, count, shape=(2, 3, 4, 20)):
    batch, new_tokens, num_heads, _ = shape
    outs = [randn(seed + i, *shape) for i in range(count)]
    lses = [randn(seed + 50 + i, batch, num_heads, new_tokens) * 3 for i in range(count)]
    return outs, lses


def merge(device, outs, lses):
    arguments = device.arguments({"outs": outs, "lses": lses})
    out, lse = device.call("merge_attention", **arguments)
    assert out.dtype == lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    return out.cpu(), lse.cpu()


def test_base_e_of_a_worked_example(device):
    """Taken for base 2, these would merge to 4.542836."""
    outs = [torch.full((1, 1, 1, 1), x) for x in (1.731059, 4.575210)]
    lses = [torch.full((1, 1, 1), x) for x in (2.313262, 5.407606)]
    out, lse = merge(device, outs, lses)
    assert out.item() == pytest.approx(4.451942, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(math.exp(2.313262) + math.exp(5.407606)), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("head_dim", [1, 20, 64, 96])
def test_matches_float64(device, count, head_dim):
    """A merged element is a convex sum: a few roundings of the largest part."""
    outs, lses = parts_of(3, count, (2, 3, 4, head_dim))
    exact_out, exact_lse = reference.merge_attention(
        [out.double() for out in outs], [lse.double() for lse in lses]
    )
    out, lse = merge(device, outs, lses)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_one_part_is_itself(device):
    outs, lses = parts_of(4, 1)
    out, lse = merge(device, outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


@pytest.mark.parametrize("cuts", [[12], [1, 2], [5, 10, 15], [23], list(range(1, 24))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_equals_one_pass(device, attention_op, dtype, cuts):
    """24 positions cut anywhere; a part after the last visible position saw nothing."""
    inputs = attention_inputs(dtype=dtype, attend_only=True, past=24, new_tokens=3, unused=0.0)
    inputs |= {"query_start": torch.tensor([21, 4]), "softcap": 4.0}
    whole_out, whole_lse = run(device, attention_op, inputs, return_lse=True)
    outs, lses = [], []
    for begin, end in zip([0, *cuts], [*cuts, 24]):
        part = copies(inputs)
        for name in ("k_cache", "v_cache"):
            part[name] = inputs[name][:, :, begin:end]
        part |= {
            "seq_lens": torch.tensor(end - begin),
            "query_start": inputs["query_start"] - begin,
        }
        out, lse = run(device, attention_op, part, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = merge(device, outs, lses)
    torch.testing.assert_close(out, whole_out, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=4e-6)
    exact_out, exact_lse = attention_in_float64(inputs)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=4e-6)


def test_order_of_the_parts_does_not_matter(device):
    outs, lses = parts_of(5, 4)
    forward = merge(device, outs, lses)
    backward = merge(device, outs[::-1], lses[::-1])
    for one, other in zip(forward, backward):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_merge_of_merges(device):
    outs, lses = parts_of(6, 4)
    left, right = merge(device, outs[:2], lses[:2]), merge(device, outs[2:], lses[2:])
    tree = merge(device, *zip(left, right))
    for one, other in zip(tree, merge(device, outs, lses)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_part_that_saw_nothing_adds_nothing(device):
    outs, lses = parts_of(7, 3)
    lses[1].fill_(-math.inf)
    outs[1].zero_()
    out, lse = merge(device, outs, lses)
    expected_out, expected_lse = merge(device, [outs[0], outs[2]], [lses[0], lses[2]])
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_all_parts_saw_nothing(device):
    outs = [torch.zeros(2, 3, 4, 20)] * 2
    lses = [torch.full((2, 4, 3), -math.inf)] * 2
    out, lse = merge(device, outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_nan_propagates_to_its_row_alone(device):
    outs, lses = parts_of(8, 3)
    expected, _ = merge(device, outs, lses)
    outs[1][1, 2, 3, 4] = float("nan")
    lses[2][0, 1, 2] = float("nan")  # head 1, token 2
    out, lse = merge(device, outs, lses)
    assert out[1, 2, 3, 4].isnan() and out[0, 2, 1].isnan().all() and lse[0, 1, 2].isnan()
    out[1, 2, 3, 4], out[0, 2, 1] = expected[1, 2, 3, 4], expected[0, 2, 1]
    assert torch.equal(out, expected)


def test_far_apart_and_large_parts(device):
    """exp(lse) overflows from 89 on; only differences may be raised."""
    outs = [torch.full((1, 1, 1, 4), x) for x in (1.0, 2.0, 3.0)]
    for shift in (0.0, 500.0, -500.0):
        lses = [torch.full((1, 1, 1), x + shift) for x in (0.0, 0.0, -200.0)]
        out, lse = merge(device, outs, lses)
        torch.testing.assert_close(out, torch.full((1, 1, 1, 4), 1.5), rtol=1e-6, atol=0)
        assert lse.item() == pytest.approx(math.log(2) + shift, rel=1e-6)


def test_strided_parts(device):
    outs, lses = parts_of(9, 2)
    expected = merge(device, outs, lses)
    strided = merge(
        device,
        [out.transpose(1, 2).contiguous().transpose(1, 2) for out in outs],
        [lse.permute(2, 0, 1).contiguous().permute(1, 2, 0) for lse in lses],
    )
    for one, other in zip(expected, strided):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 1, 4, 8), (2, 0, 4, 8)])
def test_empty_batch_and_no_tokens(device, shape):
    batch, new_tokens, num_heads, _ = shape
    lse_shape = (batch, num_heads, new_tokens)
    out, lse = merge(device, [torch.zeros(shape)] * 2, [torch.zeros(lse_shape)] * 2)
    assert out.shape == shape and lse.shape == lse_shape


WRONG = {
    "no_part": (ValueError, "outs", lambda outs: []),
    "fewer_lses": (ValueError, "lses", lambda lses: lses[:1]),
    "rank_of_an_out": (ValueError, "outs", lambda outs: [outs[0], outs[1][0]]),
    "rank_of_the_first_out": (ValueError, "outs", lambda outs: [outs[0][0]] * 2),
    "shape_of_an_out": (ValueError, "outs", lambda outs: [outs[0], outs[1][..., :4]]),
    "shape_of_an_lse": (ValueError, "lses", lambda lses: [lses[0], lses[1].transpose(1, 2)]),
    "dtype_of_an_out": (TypeError, "outs", lambda outs: [outs[0], outs[1].bfloat16()]),
    "dtype_of_an_lse": (TypeError, "lses", lambda lses: [lses[0], lses[1].double()]),
    "device_of_an_out": (TypeError, "outs", lambda outs: [outs[0], outs[1].to("meta")]),
    "device_of_an_lse": (TypeError, "lses", lambda lses: [lses[0], lses[1].to("meta")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, change = WRONG[name]
    arguments = device_family.arguments(dict(zip(("outs", "lses"), parts_of(1, 2))))
    arguments[argument] = change(arguments[argument])
    assert_refused(
        lambda: device_family.call("merge_attention", **arguments),
        exception,
        "merge_attention",
        argument,
    )


@pytest.mark.parametrize("argument", ["outs", "lses"])
def test_refuses_gradients(device_family, argument):
    parts = dict(zip(("outs", "lses"), parts_of(1, 2)))
    parts[argument][1].requires_grad_()
    message = assert_refused(
        lambda: device_family.call("merge_attention", **parts),
        RuntimeError,
        "merge_attention",
        argument,
    )
    assert "inference only" in message
