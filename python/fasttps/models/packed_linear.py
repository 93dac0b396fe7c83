"""A Linear over its packed weight, and an Embedding that shares the packed weight of the head.

Knows nn.Linear, nn.Embedding and the ops; knows no family.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.obstacles import linear_obstacle, weight_obstacle
from fasttps.models.packed_module import PackedModule
from fasttps.models.packed_weight import PackedTensor, Slot
from fasttps.models.patch_options import Options

_packed_linear = torch.ops.fasttps.packed_linear.default
_packed_embedding = torch.ops.fasttps.packed_embedding.default

BUFFER = "weight_packed"


class PackedLinear(PackedModule, nn.Linear):
    """A plain Linear whose weight lies packed in a buffer; hooks on it fire as before."""

    replaces = nn.Linear
    op = "packed_linear"
    slots = (Slot(BUFFER, ("",)),)

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        if is_packed(module):
            return None
        if isinstance(module, cls):  # patched, and its weight in the Parameter
            return weight_obstacle(module, shared)
        return linear_obstacle(module, shared)

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self._parameters["weight"]
        self.refuse_gradient(input, weight)
        kind = self.__dict__["packed"].get(BUFFER)
        if kind is None:
            return super().forward(input)
        if weight.numel() != 0:
            raise RuntimeError(
                f"{type(self).__name__}: has a weight that came after the patch and would not "
                "run; undo the patch first (load_state_dict and .to() work as they are)"
            )
        if input.stride(-1) != 1:
            input = input.contiguous()
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input = input.to(dtype if kind.format.is_quantized else kind.format.dtype)
        elif not kind.format.is_quantized and kind.format.dtype != weight.dtype:
            input = input.to(kind.format.dtype)
        if kind.columns is not None:
            input = input.index_select(-1, kind.columns)
        out = _packed_linear(
            input,
            self._buffers[BUFFER],
            format=kind.format,
            rows=kind.rows,
            group_size=kind.group_size,
            int8_activation=kind.int8_activation,
            bias=self._parameters["bias"],
        )
        return out if out.dtype == dtype else out.to(dtype)

    @property
    def packed_weight(self) -> PackedTensor | None:
        """The weight as the ops take it; None while it is not packed."""
        return self.packed_tensor(BUFFER)

    def _state_of(self, slot: Slot, state: Any) -> list[Tensor]:
        """That of a tied embedding, if `state` has it already: the two are one tensor."""
        shared: Any = self.__dict__.pop("in_state", lambda: None)()
        if shared is not None and any(value is shared for value in state.values()):
            return [shared]
        return self.unpacked(slot)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {super().extra_repr()}"


class PackedEmbedding(FusedModule, nn.Embedding):
    """An Embedding whose weight is that of a PackedLinear, the same Parameter: its rows are read.

    Nothing is packed twice. `__dict__["head"]` is the Linear; where the two weights have become
    different ones (`load_state_dict(assign=True)`), this one is as it was.
    """

    replaces = nn.Embedding
    op = "packed_embedding"

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        if module.max_norm is not None:
            return "has a max_norm"
        return None

    def fuse(self, options: Options, **arguments: Any) -> None:
        self.__dict__["head"] = arguments["head"]
        self._parameters["weight"] = self.head._parameters["weight"]  # adopt may have made another
        self.register_load_state_dict_post_hook(_pack_head_after_load)

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _pack_head_after_load]:
            del hooks[key]
        del self.__dict__["head"]

    @property
    def packed_weight(self) -> PackedTensor | None:
        """That of the head; None where this one has a weight of its own, or the head none."""
        weight: Any = self._parameters["weight"]
        return None if weight.numel() != 0 else self.head.packed_weight

    @property
    def head(self) -> PackedLinear:
        return self.__dict__["head"]

    @property
    def formats(self) -> str | None:
        return self.head.formats

    @property
    def inexact(self) -> bool:
        return self.head.inexact

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(input)

    def rows(self, input: Tensor) -> Tensor:
        """What nn.Embedding computes."""
        weight: Any = self._parameters["weight"]
        self.refuse_gradient(weight)
        if weight.numel() != 0:
            return nn.Embedding.forward(self, input)
        packed = self.packed_weight
        if packed is None:
            raise RuntimeError(f"{type(self).__name__}: its weight was packed and is gone")
        return _packed_embedding(
            input,
            packed.packed,
            format=packed.format,
            rows=packed.rows,
            cols=packed.cols,
            group_size=packed.group_size,
            dtype=weight.dtype,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        packed = self.head.__dict__["packed"].values()
        if any(kind.exact for kind in packed) and self.head.changes(fn):
            self.head.unpack()
        try:
            return super()._apply(fn, recurse)
        finally:
            self.head.pack()

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if state[f"{prefix}weight"].numel() == 0 and is_packed(self.head):
            (weight,) = self.head.unpacked(self.head.slots[0])
            state[f"{prefix}weight"] = weight
            self.head.__dict__["in_state"] = weakref.ref(weight)
        return state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.head.open_for(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared with the head"


def _pack_head_after_load(module: PackedEmbedding, incompatible_keys: object) -> None:
    module.head.pack()


def is_packed(module: nn.Module) -> bool:
    """Whether `module` is a PackedLinear with its weight in the buffer."""
    return BUFFER in module.__dict__.get("packed", ())
