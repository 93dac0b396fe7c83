"""The accuracy rule: at most twice the error of PyTorch in the same dtype, plus a floor."""

from __future__ import annotations

import torch
from torch import Tensor

# The floor, relative to the largest exact element, for where PyTorch happens to be exact.
# 16 bits: the one rounding of the result, half an ulp. float32: sums of products in another order.
FLOOR = {
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
}


def max_error(out: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; NaN if there is one."""
    return float((out.double().cpu() - exact).abs().max())


def assert_accurate(out: Tensor, exact: Tensor, same_dtype: Tensor) -> None:
    """max |out - exact| <= 2 * max |same_dtype - exact| + FLOOR * max |exact|.

    exact: float64. same_dtype: what PyTorch computes in the dtype of the op's inputs; its dtype
    chooses the floor.
    """
    assert exact.dtype == torch.float64 and out.shape == exact.shape == same_dtype.shape
    error, torch_error = max_error(out, exact), max_error(same_dtype, exact)
    floor = FLOOR[same_dtype.dtype] * float(exact.abs().max())
    assert error <= 2 * torch_error + floor, (
        f"max error {error:.3e}, PyTorch's in {same_dtype.dtype} {torch_error:.3e}, "
        f"floor {floor:.3e}"
    )
