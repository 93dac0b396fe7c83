"""One quantised weight of a checkpoint: w = d (q - z) of each row and group of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fasttps import ops

# What the formats without zero points subtract.
CENTRES = {4: 8, 8: 128}


class Form(NamedTuple):
    """A packed format, and the columns of a group in it."""

    format: ops.PackedFormat
    group_size: int


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as its checkpoint has it, with its columns in the order of their groups.

    Attributes:
        bits: of a quant: 4 or 8.
        quants: uint8 [rows, cols], of any strides.
        scales: [rows, groups], in the checkpoint's dtype.
        zeros: uint8 [rows, groups]; None: all are the centre of the quants' range.
        group: columns in a group; the last one may have fewer.
        columns: int64 [cols], which column of the weight each of `quants` is; None: the same.
    """

    bits: int
    quants: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.quants.shape
        return rows, cols

    def values(self) -> Tensor:
        """The weight [rows, cols] in float32, its columns in their own order."""
        d = self._spread(self.scales.float())
        z: Tensor | int = CENTRES[self.bits] if self.zeros is None else self._spread(self.zeros)
        values = ((self.quants.short() - z).float() * d).contiguous()
        return values if self.columns is None else values[:, self.columns.argsort()]

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.group, 1)[:, : self.shape[1]].contiguous()

    def rows(self, rows: Tensor | slice) -> QuantizedWeight:
        """Some rows, or all in another order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, quants=self.quants[rows], scales=self.scales[rows], zeros=zeros)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """What holds it bit for bit, the smallest first; none: its scales or groups fit nowhere."""
        is_centred = self.zeros is None or bool((self.zeros == CENTRES[self.bits]).all())
        if self.bits == 8:
            if not is_centred:
                return ()
            if self.scales.shape[1] == 1:
                return (Form(ops.PackedFormat.INT8, 0),)
            fits = self.group % 32 == 0 and self._scales_are_float16
            return (Form(ops.PackedFormat.INT8_GROUP, 32),) if fits else ()
        group = next((size for size in (128, 64, 32) if self.group % size == 0), None)
        if self.scales.shape[1] == 1:
            group = 128
        if group is None or not self._scales_are_float16:
            return ()
        with_zeros = Form(ops.PackedFormat.INT4_ZERO, group)
        return (Form(ops.PackedFormat.INT4, group), with_zeros) if is_centred else (with_zeros,)

    @cached_property
    def _scales_are_float16(self) -> bool:
        """Whether they can be: bfloat16 and float32 have scales that float16 has not."""
        return torch.equal(self.scales.half().float(), self.scales.float())

    def pack(self, form: Form) -> Tensor:
        """Packed as one of its `forms`."""
        if form.format == ops.PackedFormat.INT8:
            return ops.pack_quants(self.quants, self.scales.float(), format=form.format)
        zeros = None
        if form.format == ops.PackedFormat.INT4_ZERO:
            zeros = self.zeros
            if zeros is None:
                zeros = torch.full(self.scales.shape, CENTRES[4], dtype=torch.uint8)
            zeros = self._regrouped(zeros, form)
        return ops.pack_quants(
            self.quants,
            self._regrouped(self.scales.half(), form),
            zeros,
            format=form.format,
            group_size=form.group_size,
        )

    def _regrouped(self, of_groups: Tensor, form: Form) -> Tensor:
        """[rows, groups of the form], each with what its group in the checkpoint has."""
        groups = -(-self.shape[1] // form.group_size)
        if of_groups.shape[1] == 1:
            return of_groups.expand(-1, groups)
        return of_groups.repeat_interleave(self.group // form.group_size, 1)[:, :groups]


def common_form(weights: Iterable[QuantizedWeight]) -> Form | None:
    """The smallest form that holds all of them."""
    first, *others = weights
    return next((form for form in first.forms if all(form in o.forms for o in others)), None)


def same_columns(weights: Iterable[QuantizedWeight]) -> bool:
    """Whether the columns of all of them lie in one order."""
    first, *others = (weight.columns for weight in weights)
    return all(_is_same(first, other) for other in others)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def parts(weights: list[QuantizedWeight], halves: bool) -> Iterator[QuantizedWeight]:
    """What is packed in turn; `halves`: of the rows of the one."""
    if not halves:
        yield from weights
        return
    (whole,) = weights
    rows = whole.shape[0] // 2
    yield whole.rows(slice(None, rows))
    yield whole.rows(slice(rows, None))
