"""The device registry itself: a case runs where it says, and a gap is a visible skip."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fasttps import isa, ops
from tests.support.attention import attention_inputs
from tests.support.devices import DEVICES, one_of_each_family


def test_cpu_devices_run_their_own_instruction_set(device):
    if device.family == "cpu":
        assert device.name == f"cpu/{isa.active()}"


def test_every_known_instruction_set_is_a_device():
    names = [device.name for device in DEVICES]
    assert len(set(names)) == len(names)
    assert {f"cpu/{name}" for name in isa.known()} <= set(names)


def test_what_this_cpu_lacks_is_named():
    for device in DEVICES:
        if device.family == "cpu":
            runs = device.name.removeprefix("cpu/") in isa.available()
            assert (device.missing() is None) == runs
            assert runs or device.missing().startswith("this CPU lacks ")


def test_families_leave_out_the_twins():
    assert [device.family for device in one_of_each_family()].count("cpu") == 1
    assert all(device.functions is ops for device in one_of_each_family())


def test_declared_gaps_are_skips_with_a_reason(device_family):
    inputs = device_family.arguments(attention_inputs())
    gaps = replace(device_family, unsupported=lambda op, arguments: f"{op} has no window")
    with pytest.raises(pytest.skip.Exception, match=rf"^{gaps.name}: causal_prefill has no window"):
        gaps.call("causal_prefill", **inputs)
    small = replace(device_family, max_bytes=1000)
    with pytest.raises(pytest.skip.Exception, match=rf"^{small.name}: \d+ bytes, at most 1000"):
        small.call("causal_prefill", **inputs)


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(2, 12)[:, 1:9:2],
        torch.arange(4.0).expand(3, 4),
        torch.arange(6.0)[::2].view(3, 1).expand(3, 5),
        torch.tensor(7),
        torch.zeros(2, 0, 3),
    ],
    ids=lambda source: f"{tuple(source.shape)}-{source.stride()}",
)
def test_tensors_keep_values_and_strides(device_family, source):
    copy = device_family.tensor(source)
    assert copy.shape == source.shape and copy.dtype == source.dtype
    assert source.numel() == 0 or copy.stride() == source.stride()
    assert copy.device.type == device_family.torch_device.type
    assert torch.equal(copy.cpu(), source)
    assert source.numel() == 0 or copy.data_ptr() != source.data_ptr()
