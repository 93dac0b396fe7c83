"""What a model's plan rests on: seen when it is replaced, in any of the ways that Python has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttps import _C


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def watch(model):
    dicts = [of for m in model.modules() for of in (m._modules, m._parameters)]
    entries = [(of, name, value) for of in dicts for name, value in of.items()]
    return _C.ModuleWatch(entries, [m._forward_hooks for m in model.modules()])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda model: model.__setitem__(0, nn.Linear(2, 2)),
        lambda model: model[1]._modules.update({"1": nn.GELU()}),
        lambda model: model[1].__delitem__(1),
        lambda model: setattr(model[1][0], "bias", None),
    ],
    ids=["parameter", "module", "past setattr", "deleted", "None"],
)
def test_a_replaced_part_is_seen(model, change):
    seen = watch(model)
    assert seen.is_unchanged()
    change(model)
    assert not seen.is_unchanged()


def test_changed_values_are_not_a_replacement(model):
    seen = watch(model)
    model[0].weight.data = torch.ones(2, 2)
    model[0].bias.data.zero_()
    assert seen.is_unchanged() and not seen.has_hooks()


def test_hooks_come_and_go(model):
    seen = watch(model)
    hook = model[1][0].register_forward_hook(lambda *_: None)
    assert seen.has_hooks() and seen.is_unchanged()
    hook.remove()
    assert not seen.has_hooks()


def test_what_is_to_be_absent_is_seen_when_it_comes(model):
    seen = _C.ModuleWatch([], [], [(vars(m), "forward") for m in model.modules()])
    assert seen.is_unchanged()
    model[1][0].forward = lambda x: x
    assert not seen.is_unchanged()
    del model[1][0].forward
    model[1][0].another = 1
    assert seen.is_unchanged()
    model[1][0].forward = lambda x: x
    assert not seen.is_unchanged()


def test_what_is_no_dict_is_refused():
    with pytest.raises((TypeError, RuntimeError)):
        _C.ModuleWatch([([], "name", 1)])
    with pytest.raises((TypeError, RuntimeError)):
        _C.ModuleWatch([], [1])
