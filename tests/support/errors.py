"""The form of an error: exact type, op and argument named, nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")


def changed(base: Callable[..., dict[str, Any]], **arguments: Any) -> Callable[[], dict[str, Any]]:
    """The valid call `base()` with these arguments in place of its own."""
    return lambda: base() | arguments


def each(
    base: Callable[..., dict[str, Any]],
    change: Callable[[Tensor], Tensor],
    *names: str,
    **options: Any,
) -> Callable[[], dict[str, Any]]:
    """The valid call `base(**options)` with `change` applied to the arguments named."""

    def arguments() -> dict[str, Any]:
        inputs = base(**options)
        return inputs | {name: change(inputs[name]) for name in names}

    return arguments


def every_other(tensor: Tensor) -> Tensor:
    """The same values with stride 2 in the last dimension."""
    return torch.stack((tensor, tensor), dim=-1).flatten(-2)[..., ::2]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the elements: equal only where NaN payloads and signed zeros are."""
    return tensor.detach().cpu().flatten().clone().view(torch.uint8)


def written(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an op may write."""
    found = [arguments.get(name) for name in WRITTEN]
    return [tensor for tensor in found if isinstance(tensor, Tensor) and not tensor.is_meta]


def assert_refused(
    call: Callable[[], Any],
    exception: type[Exception],
    op: str,
    argument: str,
    watched: Iterable[Tensor] = (),
) -> str:
    """`call` raises exactly `exception`, naming op and argument, and `watched` keeps its bits.

    argument: a regular expression, found as whole words. Returns the message.
    """
    watched = list(watched)
    before = [bits(tensor) for tensor in watched]
    with pytest.raises(exception) as caught:
        call()
    assert caught.type is exception, f"{caught.type.__name__}: {caught.value}"
    message = str(caught.value)
    assert message.startswith(f"{op}: "), message
    assert re.search(rf"\b({argument})\b", message), message
    for tensor, old in zip(watched, before):
        assert torch.equal(bits(tensor), old), f"written before the error: {message}"
    return message
