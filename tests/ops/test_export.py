"""torch.export of each op: saved, loaded and run, it says and writes what the op does."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.ops.test_graphs import CALLS, all_bits, overload_of, split

# One call of each overload.
NAMES = list({(op, overload): name for name, (op, overload, _) in reversed(CALLS.items())}.values())


class Calls(torch.nn.Module):
    """A module that calls an op with the numbers that it was made with."""

    def __init__(self, op, numbers):
        super().__init__()
        self.op, self.numbers = op, numbers

    def forward(self, positional, keywords):
        return self.op(*positional, **keywords, **self.numbers)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return tensors_of(list(value.values())) if isinstance(value, dict) else []


@pytest.mark.parametrize("name", NAMES)
def test_export(name):
    op, arguments = overload_of(name)
    positional, keywords = split(op, arguments)
    numbers = {key: value for key, value in keywords.items() if not tensors_of(value)}
    keywords = {key: value for key, value in keywords.items() if key not in numbers}
    module = Calls(op, numbers)
    program = torch.export.export(module, copy.deepcopy((positional, keywords)), strict=False)
    assert f"fasttps.{op._schema.name.partition('::')[2]}" in str(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    ours, theirs = (copy.deepcopy((positional, keywords)) for _ in range(2))
    ours, theirs = (loaded(*ours), ours), (module(*theirs), theirs)
    for one, other in zip(ours, theirs):
        got, wanted = all_bits(tensors_of(one)), all_bits(tensors_of(other))
        assert len(got) == len(wanted)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted))
