"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Where other programs keep the cores busy, threads that spin at barriers make the tests ten times
# slower. OpenMP reads this once, as torch is loaded; programs that a test starts choose anew.
_WAIT_POLICY = os.environ.get("OMP_WAIT_POLICY")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tests.support.devices import DEVICES, Device, one_of_each_family  # noqa: E402

if _WAIT_POLICY is None:
    del os.environ["OMP_WAIT_POLICY"]


def _active(device: Device) -> Iterator[Device]:
    reason = device.missing()
    if reason is not None:
        pytest.skip(f"{device.name}: {reason}")
    with device.active():
        yield device


@pytest.fixture(params=DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Every device, on the CPU every instruction set: for what a kernel computes."""
    yield from _active(request.param)


@pytest.fixture(params=one_of_each_family(), ids=lambda device: device.family)
def device_family(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One device of each family: for schemas, checks and graphs, which all its variants share."""
    yield from _active(request.param)


@pytest.fixture(params=["rope_attention_decode", "causal_prefill"])
def attention_op(request: pytest.FixtureRequest) -> str:
    """Both attention ops: two algorithms with one meaning."""
    return request.param
