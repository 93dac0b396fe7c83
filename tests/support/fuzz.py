"""Random calls: which there are, and what a wrong one must do.

FASTTPS_FUZZ_EXAMPLES: how many calls per test (1000 if not set); the same ones in every run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttps import ops, reference
from tests.support.devices import DEVICES
from tests.support.errors import bits

EXAMPLES = int(os.environ.get("FASTTPS_FUZZ_EXAMPLES", "1000"))
many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# Beside `many` valid calls of the same op.
some = settings(many, max_examples=max(1, EXAMPLES // 3))

RUNNING = [device for device in DEVICES if device.missing() is None]
devices = st.sampled_from(RUNNING)
kernels = st.sampled_from([device for device in RUNNING if device.functions is ops])

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 1000)
WRONG_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]

MAX = (1 << 63) - 1
INTEGERS = [-MAX - 1, -(1 << 31) - 1, -1, 0, 1 << 31, (1 << 32) + 1, 1 << 40, 1 << 62, MAX]
SHORT_INTEGERS = [-1, 1 << 20, (1 << 31) - 1, -(1 << 31)]
PAST_64_BITS = [1 << 63, 1 << 70, -(1 << 63) - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e308, 5e-324]

Call = dict[str, Any]


def several_strides(draw: Callable[..., Any], tensor: Tensor, axes: Collection[int]) -> Tensor:
    """The same elements, rows apart or `axes` in another order in memory; last dimension dense."""
    how = draw(st.sampled_from(["dense", "apart", "permuted"]))
    if how == "apart":
        wide = torch.cat((tensor, torch.full_like(tensor, 1)), -1)
        return wide[..., : tensor.size(-1)]
    if how == "permuted" and len(axes) > 1:
        order = list(range(tensor.dim()))
        for axis, moved in zip(sorted(axes), draw(st.permutations(sorted(axes)))):
            order[axis] = moved
        back = [order.index(axis) for axis in range(tensor.dim())]
        return tensor.permute(order).contiguous().permute(back)
    return tensor


def _wider(tensor: Tensor, axis: int) -> Tensor:
    return torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)


def spoiled_tensor(draw: Callable[..., Any], tensor: Tensor) -> tuple[str, Any]:
    """(what was done, the tensor with it): of another rank, size, dtype, device or stride."""
    ways = ["more ranks", "dtype", "meta", "none", "text"]
    axes = [axis for axis in range(tensor.dim()) if tensor.size(axis) > 0]
    if tensor.dim() > 1:
        ways.append("flat")
    if axes:
        ways += ["wider", "shorter", "empty"]
    if tensor.dim() and tensor.size(-1) > 1:
        ways.append("stride 2")
    repeatable = [axis for axis in axes if tensor.size(axis) > 1]
    if repeatable:
        ways.append("stride 0")
    way = draw(st.sampled_from(ways))
    if way == "more ranks":
        return way, tensor[None]
    if way == "flat":
        return way, tensor.flatten()
    if way == "dtype":
        other = [dtype for dtype in WRONG_DTYPES if dtype != tensor.dtype]
        return way, tensor.to(draw(st.sampled_from(other)))
    if way == "meta":
        return way, tensor.to("meta")
    if way == "none":
        return way, None
    if way == "text":
        return way, "text"
    if way == "stride 2":
        return way, torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
    if way == "stride 0":
        axis = draw(st.sampled_from(repeatable))
        return way, tensor.narrow(axis, 0, 1).expand(tensor.shape)
    axis = draw(st.sampled_from(axes))
    if way == "wider":
        return way, _wider(tensor, axis)
    return way, tensor.narrow(axis, 0, 0 if way == "empty" else tensor.size(axis) - 1)


def spoiled(draw: Callable[..., Any], call: Call, kept: Collection[str] = ()) -> tuple[str, Call]:
    """(what was spoiled, the call with one argument that is probably wrong).

    kept: arguments that are left alone.
    """
    name = draw(st.sampled_from([key for key in call if key not in kept and call[key] is not None]))
    value = call[name]
    if isinstance(value, list) and value:
        at = draw(st.integers(0, len(value) - 1))
        if draw(st.booleans()):
            how = draw(st.sampled_from(["fewer", "more", "none"]))
            items = {"fewer": value[:at] + value[at + 1 :], "more": [*value, value[at]], "none": []}
            return f"{name}: {how}", call | {name: items[how]}
        how, item = spoiled_value(draw, value[at])
        return f"{name}[{at}]: {how}", call | {name: [*value[:at], item, *value[at + 1 :]]}
    how, value = spoiled_value(draw, value)
    return f"{name}: {how}", call | {name: value}


def spoiled_value(draw: Callable[..., Any], value: Any) -> tuple[str, Any]:
    if isinstance(value, Tensor):
        integers = {torch.int64: INTEGERS, torch.int32: SHORT_INTEGERS}.get(value.dtype)
        if integers and value.numel() and draw(st.booleans()):
            number = draw(st.sampled_from(integers))
            changed = value.contiguous().clone()
            changed.view(-1)[draw(st.integers(0, value.numel() - 1))] = number
            return f"holds {number}", changed
        return spoiled_tensor(draw, value)
    if isinstance(value, bool):
        return "not", not value
    if isinstance(value, int):
        near = [value + 1, value - 1, 2 * value, -value]
        number = draw(st.sampled_from([*near, *INTEGERS, *PAST_64_BITS]))
        return f"{number}", number
    if isinstance(value, float):
        number = draw(st.sampled_from(FLOATS))
        return f"{number}", number
    if isinstance(value, str):
        return "unknown", draw(st.sampled_from(["", "relu", "SILU", "silu\0", "é"]))
    return "text", "text"


def assert_refused_or_right(
    op: str, what: str, arguments: Call, watched: Collection[Tensor], compare: Callable[[Any], None]
) -> None:
    """A spoiled call is refused, naming op and argument and writing nothing, or was valid.

    compare: judges the result of a call that was. What PyTorch's own parser of arguments refuses
    before our code sees it is a RuntimeError that names both.
    """
    before = [bits(tensor) for tensor in watched]
    try:
        result = getattr(ops, op)(**arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        message = str(error)
        names = "|".join(sorted({re.sub(r"s?$", "s?", name) for name in arguments}, key=len))
        if type(error) in (ValueError, TypeError):
            assert message.startswith(f"{op}: "), f"{what}: {message}"
            assert re.search(rf"\b({names}|group size)\b", message), f"{what}: {message}"
        else:
            assert _is_the_parsers(type(error), message), f"{what}: {type(error)} {message}"
        for tensor, old in zip(watched, before):
            assert torch.equal(bits(tensor), old), f"{what}: written before the error: {message}"
        return
    if result is None or not is_meta(result):
        compare(result)


def check_spoiled_calls(
    calls: st.SearchStrategy[tuple[str, Call]],
    same: Callable[[Any, Any], None],
    kept: Collection[str] = (),
) -> None:
    """Some calls (op, keyword arguments) with one argument spoiled: refused, or what the twin says.

    same: asserts that a result is the twin's.  kept: arguments that are left alone.
    """

    @some
    @given(kernels, calls, st.data())
    def check(device, call, data):
        op, arguments = call
        what, arguments = spoiled(data.draw, arguments, kept)

        def compare(result):
            same(result, twin(op, arguments))

        with device.active():
            assert_refused_or_right(op, what, device.arguments(arguments), [], compare)

    check()


def _is_the_parsers(kind: type, message: str) -> bool:
    if kind is NotImplementedError:
        return "no tensor arguments" in message or "Could not run" in message
    return kind is RuntimeError and "for argument" in message and "fasttps::" in message


def is_meta(result: Any) -> bool:
    """Whether a call was made of meta tensors alone: it has shapes and no numbers."""
    return any(t.is_meta for t in (result if isinstance(result, tuple) else (result,)))


def twin(op: str, arguments: Call) -> Any:
    """What the twin in plain PyTorch makes of the same call."""
    return getattr(reference, op)(**arguments)


def assert_close_to_twin(out: Any, expected: Any) -> None:
    """Of a call with a spoiled argument: the same meaning, not the last bit."""
    if isinstance(expected, tuple):
        assert len(out) == len(expected)
        for ours, theirs in zip(out, expected):
            assert_close_to_twin(ours, theirs)
        return
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if not out.numel():
        return
    wide = expected.double()
    wide = wide.masked_fill(~wide.isfinite(), 0)
    scale = max(float(wide.abs().max()), 1e-30)
    rtol = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(out.dtype, 0.01)
    torch.testing.assert_close(
        out.double(), expected.double(), rtol=rtol, atol=rtol * scale, equal_nan=True
    )
