"""The gated MLP of any family: down(act(gate(x)) * up(x)) in one op over packed weights.

Knows nn.Linear and the ops; knows no family. A family makes its class from it:
`class FusedLlamaMLP(FusedGatedMLP, LlamaMLP)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttps.models.obstacles import linear_obstacle, runs_more
from fasttps.models.packed_module import PackedModule
from fasttps.models.packed_weight import PackedTensor, Slot

_gate_up_silu_mlp = torch.ops.fasttps.gate_up_silu_mlp.default

# Judged by the class of the object that computes, never by a field of a config.
_TORCH_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], str | None]] = {
    nn.SiLU: lambda act: "silu",
    nn.GELU: lambda act: {"none": "gelu", "tanh": "gelu_tanh"}.get(act.approximate),
}
_TRANSFORMERS_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_GATE_UP, _DOWN = "gate_up_packed", "down_packed"


class FusedGatedMLP(PackedModule):
    """A gated MLP whose projections are empty, their weights packed: gate and up in one.

    Attributes:
        slots: the buffers, and the names of the gate and up, and of the down projection.
        activation: the name of the activation module; None: it is SiLU, and no module.
    """

    part = "mlp"
    op = "gate_up_silu_mlp"
    slots = (Slot(_GATE_UP, ("gate_proj", "up_proj")), Slot(_DOWN, ("down_proj",)))
    activation: ClassVar[str | None] = "act_fn"

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        packed = module.__dict__.get("packed", {})
        for name in cls._children():
            child = module._modules.get(name)
            if child is None:
                return f"has no {name}"
            if runs_more(child) or child._backward_pre_hooks or child._backward_hooks:
                return f"{name} has hooks or a forward of its own, which would not run"
            if name == cls.activation:
                if activation_name(child) is None:
                    return f"{name} is a {type(child).__name__}, which the op does not compute"
            elif any(name in slot.names and slot.buffer in packed for slot in cls.slots):
                continue
            elif (reason := linear_obstacle(child, shared)) is not None:
                return f"{name} {reason}"
        weights = [getattr(module, name).weight for name in cls.weight_names()]
        if len(dtypes := dict.fromkeys(weight.dtype for weight in weights)) > 1:
            return f"its weights differ in dtype: {', '.join(map(str, dtypes))}"
        if not packed:
            shapes = [tuple(weight.shape) for weight in weights]
            *inner, (hidden, intermediate) = shapes
            if cls.slots[0].halves:
                inner = [(inner[0][0] / 2, inner[0][1])]
            if any(shape != (intermediate, hidden) for shape in inner):
                return f"its weights do not fit: {shapes}"
        return None

    @classmethod
    def _children(cls) -> tuple[str, ...]:
        """The modules that are fused."""
        return cls.weight_names() + (() if cls.activation is None else (cls.activation,))

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight(self.slots[1].names[0])
        self.refuse_gradient(x, weight)
        packed = self.__dict__["packed"]
        if not packed:
            return super().forward(x)
        self._refuse_what_would_not_run()
        if x.stride(-1) != 1:
            x = x.contiguous()
        kind, dtype = packed[_GATE_UP], x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype if kind.format.is_quantized else kind.format.dtype)
        elif not kind.format.is_quantized and kind.format.dtype != weight.dtype:
            x = x.to(kind.format.dtype)
        out = self._run(x, packed)
        return out if out.dtype == dtype else out.to(dtype)

    def _run(self, x: Tensor, packed: Any) -> Tensor:
        # The dicts themselves: Module.__getattr__ costs about a microsecond a name, and so does
        # every argument that `fasttps.ops` would pass on.
        gate_up, down = packed[_GATE_UP], packed[_DOWN]
        (gate_bias, up_bias), (down_bias,) = map(self.biases, self.slots)
        if gate_up.columns is not None:
            x = x.index_select(-1, gate_up.columns)
        return _gate_up_silu_mlp(
            x,
            self._buffers[_GATE_UP],
            self._buffers[_DOWN],
            gate_up_format=gate_up.format,
            down_format=down.format,
            intermediate_size=gate_up.rows,
            gate_up_group_size=gate_up.group_size,
            down_group_size=down.group_size,
            activation=self.function,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            int8_activation=gate_up.int8_activation,
        )

    @property
    def packed_gate_up(self) -> PackedTensor | None:
        """Gate and up as the op takes them; None while they are not packed."""
        return self.packed_tensor(_GATE_UP)

    @property
    def packed_down(self) -> PackedTensor | None:
        """Down as the op takes it; None while it is not packed."""
        down = self.packed_tensor(_DOWN)
        return None if down is None else down._replace(columns=None)  # it has gate's and up's rows

    def row_order(self, slot: Slot) -> Tensor | None:
        """The rows of gate and up make what down takes, and lie in the order of its columns."""
        down = self.__dict__["packed"].get(_DOWN)
        return None if down is None or slot.buffer == _DOWN else down.columns

    def biases(self, slot: Slot) -> tuple[Tensor | None, ...]:
        biases, order = super().biases(slot), self.row_order(slot)
        if order is None:
            return biases
        return tuple(None if bias is None else bias[order] for bias in biases)

    def open_for(self, state_dict: Any, prefix: str) -> None:
        if self.row_order(self.slots[0]) is not None:  # one half cannot go without the other
            loaded = [n for n in self.weight_names() if f"{prefix}{n}.weight" in state_dict]
            if loaded:
                self.unpack()
                self.__dict__["loaded"] |= set(loaded)
        super().open_for(state_dict, prefix)

    @property
    def function(self) -> str:
        """The activation, as the op calls it."""
        if self.activation is None:
            return "silu"
        return activation_name(self._modules[self.activation]) or ""

    def _refuse_what_would_not_run(self) -> None:
        for name in self._children():
            child: Any = self._modules[name]
            weight = child._parameters.get("weight")
            if runs_more(child) or (weight is not None and weight.numel() != 0):
                raise RuntimeError(
                    f"{type(self).__name__}: {name} has a weight or hooks that came after the "
                    "patch and would not run; undo the patch first (load_state_dict and .to() "
                    "work as they are)"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._children():
            raise RuntimeError(
                f"{type(self).__name__}: {name} is fused and would not run; undo the patch first"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, {self.function}" if self.__dict__["packed"] else text


def activation_name(act: nn.Module | None) -> str | None:
    """What the ops call the function that `act` computes; None if they do not compute it."""
    kind = type(act)
    if kind in _TORCH_ACTIVATIONS:
        return _TORCH_ACTIVATIONS[kind](act)
    if kind.__module__ == "transformers.activations":
        return _TRANSFORMERS_ACTIVATIONS.get(kind.__name__)
    return None
