"""The gated MLP of any family: down(act(gate(x)) * up(x)) in one op over packed weights.

Knows nn.Linear and the ops; knows no family. A family makes its class from it:
`class FusedLlamaMLP(FusedGatedMLP, LlamaMLP)`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttps import ops
from fasttps.models.patch import FusedModule

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


@dataclass(frozen=True)
class Packed:
    """What the packed buffers of one MLP hold.

    `inference`: the weights were made in inference mode, and only such data can replace theirs.
    """

    format: ops.PackedFormat
    intermediate_size: int
    hidden_size: int
    activation: str
    inference: bool


class FusedGatedMLP(FusedModule):
    """Holds the packed weights in two buffers; the Parameters of its projections are empty.

    While the weights are such that they cannot be packed (float64, meta, of several dtypes), they
    are in their Parameters and the replaced class's own forward runs; `extra_repr` says why.

    Attributes:
        projections: the names of the gate, up and down projections.
        activation: the name of the activation module.
    """

    part = "mlp"
    op = "gate_up_silu_mlp"
    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    activation: ClassVar[str] = "act_fn"

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        for name in (*cls.projections, cls.activation):
            child = module._modules.get(name)
            if child is None:
                return f"has no {name}"
            if _runs_more(child) or child._backward_pre_hooks or child._backward_hooks:
                return f"{name} has hooks or a forward of its own, which would not run"
            if name == cls.activation:
                if activation_name(child) is None:
                    return f"{name} is a {type(child).__name__}, which the op does not compute"
            elif (reason := _linear_obstacle(child, shared)) is not None:
                return f"{name} {reason}"
        gate, up, down = (getattr(module, name).weight for name in cls.projections)
        if not gate.dtype == up.dtype == down.dtype:
            return f"its weights differ in dtype: {gate.dtype}, {up.dtype}, {down.dtype}"
        if not gate.shape == up.shape == down.shape[::-1]:
            return f"its weights do not fit: {[tuple(w.shape) for w in (gate, up, down)]}"
        return None

    def fuse(self) -> None:
        self._pack()
        self.register_load_state_dict_post_hook(_pack_after_load)

    def unfuse(self) -> None:
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _pack_after_load]:
            del hooks[key]
        self._unpack()

    def forward(self, x: Tensor) -> Tensor:
        self.refuse_gradient(x, self._linear(2)._parameters.get("weight"))
        packed: Packed | None = self.__dict__.get("packed")
        if packed is None:
            return super().forward(x)
        self._refuse_what_would_not_run()
        if x.stride(-1) != 1:
            x = x.contiguous()
        if torch.is_autocast_enabled(x.device.type):
            out = self._run(x.to(packed.format.dtype), packed)
            return out.to(torch.get_autocast_dtype(x.device.type))
        return self._run(x, packed)

    def _run(self, x: Tensor, packed: Packed) -> Tensor:
        # The dicts themselves: Module.__getattr__ costs about a microsecond a name, and so does
        # every argument that `fasttps.ops` would pass on.
        return _gate_up_silu_mlp(
            x,
            self._buffers["gate_up_packed"],
            self._buffers["down_packed"],
            gate_up_format=packed.format,
            down_format=packed.format,
            intermediate_size=packed.intermediate_size,
            activation=packed.activation,
            gate_bias=self._linear(0)._parameters["bias"],
            up_bias=self._linear(1)._parameters["bias"],
            down_bias=self._linear(2)._parameters["bias"],
        )

    def _refuse_what_would_not_run(self) -> None:
        for name in (*self.projections, self.activation):
            child: Any = self._modules[name]
            weight = child._parameters.get("weight")
            if _runs_more(child) or (weight is not None and weight.numel() != 0):
                raise RuntimeError(
                    f"{type(self).__name__}: {name} has a weight or hooks that came after the "
                    "patch and would not run; undo the patch first (load_state_dict and .to() "
                    "work as they are)"
                )

    def _linear(self, at: int) -> nn.Linear:
        return self._modules[self.projections[at]]  # type: ignore[return-value]

    def _pack(self) -> None:
        """Pack the weights and give the Parameters' memory back, gate and up before down.

        So at most gate and up exist twice. On an error, or where they cannot be packed, nothing
        has changed.
        """
        if self.obstacle(self, frozenset()) is not None:
            return
        gate, up, down = (self._linear(at).weight for at in range(3))
        packed = Packed(
            ops.PackedFormat.of(gate.dtype),
            intermediate_size=gate.size(0),
            hidden_size=gate.size(1),
            activation=activation_name(self._modules[self.activation]) or "",
            inference=gate.is_inference(),
        )
        rows, cols = packed.intermediate_size, packed.hidden_size
        with torch.inference_mode(packed.inference):
            gate_up_packed = ops.pack_gate_up(gate.data, up.data, format=packed.format)
            gate.data, up.data = gate.data.new_empty(0), up.data.new_empty(0)
            try:
                down_packed = ops.pack_weight(down.data, format=packed.format)
            except BaseException:
                gate.data, up.data = ops.unpack_gate_up(
                    gate_up_packed, format=packed.format, rows=rows, cols=cols
                )
                raise
            down.data = down.data.new_empty(0)
            self.register_buffer("gate_up_packed", gate_up_packed, persistent=False)
            self.register_buffer("down_packed", down_packed, persistent=False)
        self.__dict__["packed"] = packed
        return_freed_memory()

    def _unpack(self) -> None:
        """Give the Parameters their values back, then drop the packed ones, if they are packed."""
        if "packed" not in self.__dict__:
            return
        weights = self._weights()
        with torch.inference_mode(self.__dict__["packed"].inference):
            for at in range(3):
                if self._linear(at).weight.numel() == 0:  # else the user has given it another
                    self._linear(at).weight.data = weights[at]
        del self.gate_up_packed, self.down_packed
        del self.__dict__["packed"]
        return_freed_memory()

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and down as they were before packing."""
        packed: Packed = self.__dict__["packed"]
        rows, cols = packed.intermediate_size, packed.hidden_size
        gate_up, down = self._buffers["gate_up_packed"], self._buffers["down_packed"]
        assert gate_up is not None and down is not None
        with torch.inference_mode(packed.inference):
            return (
                *ops.unpack_gate_up(gate_up, format=packed.format, rows=rows, cols=cols),
                ops.unpack_weight(down, format=packed.format, rows=cols, cols=rows),
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()`, `.half()` and their like act on the weights themselves."""
        self._unpack()
        try:
            return super()._apply(fn, recurse)
        finally:
            self._pack()

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """As unpatched: the original keys with the unpacked weights."""
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if "packed" in self.__dict__:
            for name, weight in zip(self.projections, self._weights()):
                if state[f"{prefix}{name}.weight"].numel() == 0:
                    state[f"{prefix}{name}.weight"] = weight
        return state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Runs before the projections load theirs; `_pack_after_load` runs after."""
        self._unpack()
        super()._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*self.projections, self.activation):
            raise RuntimeError(
                f"{type(self).__name__}: {name} is fused and would not run; undo the patch first"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        packed: Packed | None = self.__dict__.get("packed")
        if packed is None:
            return f"not packed: {self.obstacle(self, frozenset())}"
        return f"packed {packed.format.name}, {packed.activation}"


def _pack_after_load(module: FusedGatedMLP, incompatible_keys: object) -> None:
    module._pack()


def activation_name(act: nn.Module | None) -> str | None:
    """What the ops call the function that `act` computes; None if they do not compute it."""
    kind = type(act)
    if kind in _TORCH_ACTIVATIONS:
        return _TORCH_ACTIVATIONS[kind](act)
    if kind.__module__ == "transformers.activations":
        return _TRANSFORMERS_ACTIVATIONS.get(kind.__name__)
    return None


def _runs_more(child: Any) -> bool:
    """Whether calling `child`, in inference, runs more than the forward of its class."""
    return bool(child._forward_pre_hooks or child._forward_hooks or "forward" in child.__dict__)


def _linear_obstacle(linear: nn.Module, shared: frozenset[int]) -> str | None:
    """Why the weight of a projection cannot be packed and given back."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, not a plain Linear"
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
    weight = linear.weight
    if weight.dim() != 2 or not weight.is_contiguous():
        return "weight: is not contiguous"
    return None


def _tensor_obstacle(tensor: Tensor) -> str | None:
    """Why the ops do not take a weight of this device and dtype."""
    if tensor.is_meta:
        return "are on the meta device (offloaded)"
    if not has_kernels(tensor.device):
        return f"are on {tensor.device}, for which there are no kernels"
    if tensor.dtype not in {packed_format.dtype for packed_format in ops.PackedFormat}:
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
