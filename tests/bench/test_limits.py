"""The ruler reads what it says, keeps the best loop, and refuses shares above the limit."""

from __future__ import annotations

import time

import pytest
import torch

from fasttps import _C
from fasttps.bench import BrokenRulerError, Ruler, limits, measure, share_of_limit, timing

HINTS = ["none", "all_levels", "non_temporal"]


def xor_of_words(count: int) -> int:
    """XOR of 0, 1, ..., count - 1, which is what a buffer holds."""
    last = count - 1
    return [last, 1, last + 1, 0][last % 4]


@pytest.mark.parametrize("isa", _C.read_isas())
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("hint", HINTS)
def test_every_loop_reads_every_word_once(isa: str, streams: int, hint: str) -> None:
    for lines in (1, 3, 4, 63, 65, 4097):
        for threads in (1, 2, 3):
            buffer = _C.ReadBuffer(64 * lines, threads, False)
            assert buffer.read(isa, streams, hint, 1024, 3) == xor_of_words(8 * lines)


def test_wrong_arguments_say_what_was_wanted() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 65"):
        _C.ReadBuffer(65, 1, False)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        _C.ReadBuffer(64, 0, False)
    buffer = _C.ReadBuffer(64, 1, True)
    with pytest.raises(ValueError, match="1, 2, 4 or 8, got 3"):
        buffer.read("scalar", 3, "none", 0, 1)
    with pytest.raises(ValueError, match="none, all_levels or non_temporal, got 'most'"):
        buffer.read("scalar", 1, "most", 0, 1)
    with pytest.raises(ValueError, match="isa 'nonsense'"):
        buffer.read("nonsense", 1, "none", 0, 1)
    with pytest.raises(ValueError, match="sweeps must be at least 1, got 0"):
        buffer.read("scalar", 1, "none", 0, 0)
    with pytest.raises(ValueError, match="instruction 'nop'"):
        _C.peak_operations_per_s("nop", 1, 0.001)


def test_read_bandwidth_falls_from_cache_to_memory() -> None:
    ruler = Ruler(quick=True)
    assert ruler.read_gb_per_s(16 << 10, 1) > ruler.read_gb_per_s(256 << 20, 1) > 0


def test_a_gauge_has_the_footprint_and_the_threads_of_the_work() -> None:
    gauge = Ruler(quick=True).read(1_000_000, 2)
    assert (gauge.bytes, gauge.threads) == (1_000_000, 2)
    gauge.sample()
    assert gauge.rate == max(gauge.medians().values()) == gauge.medians()[gauge.best]
    assert Ruler(quick=True).read(1, 2).bytes == 2 * limits.SMALLEST_FOOTPRINT


def test_quick_loops_are_among_all_loops() -> None:
    assert set(limits.loops(quick=True)) < set(limits.loops(quick=False))
    assert {loop.streams for loop in limits.loops(quick=False)} == {1, 2, 4, 8}


def test_a_limit_is_sampled_in_turn_with_the_work() -> None:
    order = []

    class Limit:
        def sample(self) -> None:
            order.append("limit")

    measure({"work": lambda: order.append("work")}, rounds=3, warm_up_s=0, limits=[Limit()])
    assert order.count("limit") == 3
    assert order[order.index("limit") :].index("work") == 1


def test_a_slow_call_sits_out_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.rounds_of(0.0, 3) == [0, 1, 2]
    assert timing.rounds_of(1.0, 15) == [1, 3, 6, 8, 11, 13]
    assert timing.rounds_of(5.0, 15) == [2, 7, 12]
    assert timing.rounds_of(5.0, 2) == [0, 1]
    monkeypatch.setattr(timing, "MOST_S", 6e-3)
    calls = {"quick": lambda: None, "slow": lambda: time.sleep(3e-3)}
    taken = measure(calls, rounds=9, warm_up_s=0)
    assert (taken["quick"].rounds, taken["slow"].rounds) == (9, 3)
    assert taken["slow"].fastest_us >= 3e3


def test_a_share_above_the_limit_is_a_broken_ruler() -> None:
    assert share_of_limit("decode", 9.0, 10.0) == 0.9
    assert share_of_limit("decode", 10.2, 10.0) == pytest.approx(1.02)
    with pytest.raises(BrokenRulerError, match=r"decode runs at 10\.3 GB/s, 1\.030 of the 10 GB/s"):
        share_of_limit("decode", 10.3, 10.0)


def test_every_instruction_has_a_peak() -> None:
    found = limits.peaks(threads=1, rounds=1)
    assert set(found) == {instruction for _, instruction in _C.peak_instructions()}
    assert all(rate > 1 for rate in found.values())
    product = Ruler().product(torch.bfloat16)
    assert (product is None) == (not found)


def test_what_an_op_and_a_barrier_cost() -> None:
    assert all(0 < us < 1e4 for us in limits.dispatch_us(rounds=1).values())
    assert 0 < limits.barrier_us(1, rounds=1) < 1e4
    assert 0 < limits.region_us(1, rounds=1) < 1e4
