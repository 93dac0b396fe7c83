"""Why a weight cannot be packed, and what the C library does with the memory of those that were."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_more(child: Any) -> bool:
    """Whether calling `child`, in inference, runs more than the forward of its class."""
    return bool(child._forward_pre_hooks or child._forward_hooks or "forward" in child.__dict__)


def linear_obstacle(linear: nn.Module, shared: frozenset[int]) -> str | None:
    """Why the weight of a Linear cannot be packed and given back."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, not a plain Linear"
    return weight_obstacle(linear, shared)


def weight_obstacle(linear: nn.Module, shared: frozenset[int]) -> str | None:
    """Why the Parameters of a Linear cannot be packed and given back."""
    for name, parameter in linear._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"holds its {name} as a {type(parameter.data).__name__}"
        if (reason := _tensor_obstacle(parameter.data)) is not None:
            return f"{name}: {reason}"
        if parameter.grad is not None:
            return f"{name}: has a gradient"
        if parameter.data_ptr() in shared and parameter.data_ptr() != 0:
            return f"{name}: is shared with another module"
    weight: Any = linear.weight
    if weight.dim() != 2 or not weight.is_contiguous():
        return "weight: is not contiguous"
    return None


def _tensor_obstacle(tensor: Tensor) -> str | None:
    """Why the ops do not take a weight of this device and dtype."""
    if tensor.is_meta:
        return "are on the meta device (offloaded)"
    if not has_kernels(tensor.device):
        return f"are on {tensor.device}, for which there are no kernels"
    if tensor.dtype not in _DTYPES:
        return f"are {tensor.dtype}, which is not packed"
    return None


def return_freed_memory() -> None:
    """Have the C library give freed weights back to the system.

    glibc keeps what is freed in the middle of its heap, and a packed weight seldom fits into the
    holes of the weights before it: without this a model may take 1.4 times its memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def has_kernels(device: torch.device) -> bool:
    """Whether this build runs the ops on `device`."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("fasttps::gate_up_silu_mlp", key)
