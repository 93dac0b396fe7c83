"""A module whose weights lie packed in buffers, for the ops; what linears and MLPs share.

Knows nn.Module and the ops; knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttps import ops
from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.obstacles import return_freed_memory
from fasttps.models.packed_weight import Packed, PackedTensor, Slot
from fasttps.models.patch_options import Options

_epoch = 0


def packing_epoch() -> int:
    """A number that grows whenever a packed buffer of any model comes or goes."""
    return _epoch


def _next_epoch() -> None:
    global _epoch
    _epoch += 1


class PackedModule(FusedModule):
    """Holds the weights of `slots` in buffers; the Parameters meanwhile are empty.

    While the weights are such that they cannot be packed (float64, meta, of several dtypes), they
    are in their Parameters and the replaced class's own forward runs; `extra_repr` says why.

    Its `__dict__` holds `packing` (how `patch` was asked to pack), `packed` (buffer to `Packed`),
    `originals` (name to weight, those kept for `undo`) and `loaded` (names of the weights that
    came after the patch and of which no original is kept).
    """

    slots: ClassVar[tuple[Slot, ...]]

    @classmethod
    def weight_names(cls) -> tuple[str, ...]:
        return tuple(name for slot in cls.slots for name in slot.names)

    def fuse(self, options: Options, **arguments: Any) -> None:
        self.prepare(options)
        try:
            self.pack()
        except BaseException:
            self._forget()
            raise

    def prepare(self, options: Options) -> None:
        """All of `fuse` but the packing itself."""
        self.__dict__.update(packing=options.packing, packed={}, originals={}, loaded=frozenset())
        self.register_load_state_dict_post_hook(_pack_after_load)

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        for slot in self.slots:
            if slot.buffer in self.__dict__["packed"]:
                self._unpack_slot(slot, self._restored(slot, read))
        self._forget()
        return_freed_memory()

    def _forget(self) -> None:
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _pack_after_load]:
            del hooks[key]
        for name in ("packing", "packed", "originals", "loaded"):
            del self.__dict__[name]

    def adopt(self, buffer: str, packed: Tensor, kind: Packed) -> None:
        """Hold `packed`, which was packed before, in the place of the weights of one buffer."""
        (slot,) = (slot for slot in self.slots if slot.buffer == buffer)
        for name in slot.names:
            weight = self._weight(name)
            empty = torch.empty(0, dtype=weight.dtype, device=packed.device)
            if weight.is_meta:  # whose data cannot become those of another device
                self._owner(name)._parameters["weight"] = nn.Parameter(empty, weight.requires_grad)
            else:
                weight.data = empty
        self._hold(slot, packed, kind)

    def packed_tensor(self, buffer: str) -> PackedTensor | None:
        """What a buffer holds, as the ops take it.

        None while it is not packed, or a weight came after the patch.
        """
        kind: Packed | None = self.__dict__["packed"].get(buffer)
        (slot,) = (slot for slot in self.slots if slot.buffer == buffer)
        if kind is None or any(self._weight(name).numel() != 0 for name in slot.names):
            return None
        biases = self.biases(slot)
        bias = biases[0] if len(biases) == 1 else biases
        packed: Any = self._buffers[buffer]
        return PackedTensor(
            packed,
            kind.format,
            kind.group_size,
            kind.rows,
            kind.cols,
            kind.int8_activation,
            bias,
            kind.columns,
        )

    def biases(self, slot: Slot) -> tuple[Tensor | None, ...]:
        """Those of the linears of a slot, one for each part."""
        biases = [self._owner(name)._parameters["bias"] for name in slot.names]
        if slot.halves:
            return (None, None) if biases[0] is None else tuple(biases[0].chunk(2))
        return tuple(biases)

    @property
    def formats(self) -> str | None:
        return ", ".join(dict.fromkeys(kind.name for kind in self.__dict__["packed"].values()))

    @property
    def inexact(self) -> bool:
        return next(self._inexact(), None) is not None

    def shape_of(self, name: str) -> tuple[int, int]:
        (slot,) = (slot for slot in self.slots if name in slot.names)
        kind: Packed = self.__dict__["packed"][slot.buffer]
        return kind.rows * (2 if slot.halves else 1), kind.cols

    @property
    def lossy(self) -> tuple[str, ...]:
        originals = self.__dict__["originals"]
        return tuple(name for name in self._inexact() if name not in originals)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(name for name in self.lossy if name in self.__dict__["loaded"])

    def _inexact(self) -> Iterator[str]:
        packed = self.__dict__["packed"]
        for slot in self.slots:
            if slot.buffer in packed and not packed[slot.buffer].exact:
                yield from slot.names

    def pack(self) -> None:
        """Pack the weights that are not, and give the Parameters' memory back, slot by slot.

        So at most the weights of one slot exist twice. On an error, or where they cannot be
        packed, they are in their Parameters.
        """
        if self.obstacle(self, frozenset()) is not None:
            self.unpack()
            return
        try:
            for slot in self.slots:
                if slot.buffer not in self.__dict__["packed"]:
                    self._pack_slot(slot)
        except BaseException:
            self.unpack()
            raise
        return_freed_memory()

    def unpack(self) -> None:
        """Give the Parameters their values back, dequantised ones where those are lossy."""
        for slot in self.slots:
            if slot.buffer in self.__dict__["packed"]:
                self._unpack_slot(slot, self.unpacked(slot))

    def _pack_slot(self, slot: Slot) -> None:
        state = self.__dict__
        packing = state["packing"]
        weights = [self._weight(name) for name in slot.names]
        first = weights[0]
        kind = packing.format_of(first.dtype)
        group_size = packing.group_size
        exact = not kind.is_quantized
        with torch.inference_mode(first.is_inference()):
            values = [weight.data for weight in weights]
            if exact and kind.dtype != first.dtype:
                values = [value.to(kind.dtype) for value in values]
                exact = all(
                    same_bits(value.to(weight.dtype), weight.data)
                    for value, weight in zip(values, weights)
                )
            parts = slot.parts(values)
            packed = _pack(parts, kind, group_size)
            for name in slot.names:
                state["originals"].pop(name, None)
            if not exact and packing.keep_original:
                state["originals"].update(
                    (name, weight.data) for name, weight in zip(slot.names, weights)
                )
            rows, cols = parts[0].shape
            for weight in weights:
                weight.data = weight.data.new_empty(0)
            self._hold(
                slot,
                packed,
                Packed(
                    kind,
                    group_size,
                    rows,
                    cols,
                    exact,
                    int8_activation=packing.int8_activation and kind.is_quantized,
                    inference=first.is_inference(),
                ),
            )

    def _hold(self, slot: Slot, packed: Tensor, kind: Packed) -> None:
        _next_epoch()
        self.register_buffer(slot.buffer, packed, persistent=False)
        self.__dict__["packed"][slot.buffer] = kind

    def _unpack_slot(self, slot: Slot, values: list[Tensor]) -> None:
        kind: Packed = self.__dict__["packed"][slot.buffer]
        with torch.inference_mode(kind.inference):
            for name, value in zip(slot.names, values):
                if self._weight(name).numel() == 0:  # else the user has given it another
                    self._weight(name).data = value
        _next_epoch()
        delattr(self, slot.buffer)
        del self.__dict__["packed"][slot.buffer]

    def unpacked(self, slot: Slot) -> list[Tensor]:
        """What the weights of a slot are, computed from the packed ones, in their own dtype."""
        kind: Packed = self.__dict__["packed"][slot.buffer]
        packed: Any = self._buffers[slot.buffer]
        is_one = len(slot.names) == 1 and not slot.halves
        unpack = ops.unpack_weight if is_one else ops.unpack_gate_up
        with torch.inference_mode(kind.inference):
            values: Any = unpack(
                packed,
                format=kind.format,
                rows=kind.rows,
                cols=kind.cols,
                group_size=kind.group_size,
            )
            values = [self._in_order(slot, value) for value in ([values] if is_one else values)]
            values = slot.join(values)
            return [value.to(self._weight(name).dtype) for name, value in zip(slot.names, values)]

    def row_order(self, slot: Slot) -> Tensor | None:
        """The order in which the rows of each part of a slot lie; None: their own."""
        return None

    def _in_order(self, slot: Slot, value: Tensor) -> Tensor:
        """A part of a slot as it was unpacked, with its columns and rows in their own order."""
        columns, rows = self.__dict__["packed"][slot.buffer].columns, self.row_order(slot)
        if columns is not None:
            value = value.index_select(1, columns.argsort())
        return value if rows is None else value.index_select(0, rows.argsort())

    def _restored(self, slot: Slot, read: ReadOriginal | None) -> list[Tensor]:
        """The weights of a slot as they were before the patch, where they can be had."""
        kind: Packed = self.__dict__["packed"][slot.buffer]
        originals = self.__dict__["originals"]
        if kind.exact or (read is None and not originals):
            return self.unpacked(slot)
        values = []
        for name in slot.names:
            weight = self._weight(name)
            value = originals.get(name)
            if value is None:
                assert read is not None
                value = read(name)
            values.append(value.to(weight.device, weight.dtype))
        return values

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """That of a weight which is not packed."""
        return tuple(self._weight(name).shape)

    def _owner(self, name: str) -> Any:
        return self if name == "" else self._modules[name]

    def _weight(self, name: str) -> Any:
        # Of the dict itself: Module.__getattr__ costs about a microsecond.
        return self._owner(name)._parameters["weight"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()`, `.half()` and their like act on the weights themselves, if none is lost."""
        packed = self.__dict__["packed"]
        for slot in self.slots:
            if slot.buffer in packed and packed[slot.buffer].exact and self.changes(fn):
                self._unpack_slot(slot, self.unpacked(slot))
        try:
            return super()._apply(fn, recurse)
        finally:
            self.pack()

    def changes(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether `fn` makes other weights; `.to()` gives back what has the dtype and device."""
        weights = [self._weight(name).data for name in self.weight_names()]
        return any(fn(weight) is not weight for weight in weights)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """As unpatched: the original keys with the unpacked weights, in their dtype."""
        state = super().state_dict(
            *args, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        for slot in self.slots:
            if slot.buffer in self.__dict__["packed"]:
                for name, value in zip(slot.names, self._state_of(slot, state)):
                    if state[_key(prefix, name)].numel() == 0:
                        state[_key(prefix, name)] = value
        return state

    def _state_of(self, slot: Slot, state: Any) -> list[Tensor]:
        return self.unpacked(slot)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Runs before the submodules load theirs; `_pack_after_load` runs after.

        Weights that are not in `state_dict` stay packed: quantising once more could change them.
        """
        self.open_for(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def open_for(self, state_dict: Any, prefix: str) -> None:
        """Unpack those weights that `state_dict` has under `prefix`."""
        for slot in self.slots:
            if slot.buffer in self.__dict__["packed"] and any(
                _key(prefix, name) in state_dict for name in slot.names
            ):
                self._unpack_slot(slot, self.unpacked(slot))
                self.__dict__["loaded"] |= set(slot.names)

    def extra_repr(self) -> str:
        if not self.__dict__["packed"]:
            return f"not packed: {self.obstacle(self, frozenset())}"
        return f"packed {self.formats}"


def _key(prefix: str, name: str) -> str:
    return f"{prefix}{name}.weight" if name else f"{prefix}weight"


def _pack_after_load(module: PackedModule, incompatible_keys: object) -> None:
    module.pack()


def _pack(values: list[Tensor], kind: ops.PackedFormat, group_size: int) -> Tensor:
    if len(values) == 1:
        return ops.pack_weight(*values, format=kind, group_size=group_size)
    return ops.pack_gate_up(*values, format=kind, group_size=group_size)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, NaN and -0 too."""
    view = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.view(view), other.view(view))
