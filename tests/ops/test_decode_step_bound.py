"""DecodeStep, the op with its weights and caches bound: the op's own results, whatever changes."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from fasttps import isa, ops
from fasttps.ops.decode_step import DecodeStep
from tests.ops.test_decode_step import hidden, token_ids
from tests.support.decoder import Decoder

OF_A_TOKEN = ("input", "seq_lens", "cos", "sin", "kv_start")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def halves(arguments):
    """What is bound, and what each call brings."""
    bound = {name: value for name, value in arguments.items() if name not in OF_A_TOKEN}
    return bound, {name: arguments[name] for name in OF_A_TOKEN if name in arguments}


def assert_same(step, arguments, **options):
    """Bound and unbound give the same bits and write the same bits."""
    caches = ("k_caches", "v_caches", "k_scales", "v_scales")
    twin = {**arguments, **{c: copy.deepcopy(arguments[c]) for c in caches if c in arguments}}
    out = step(**halves(arguments)[1], **options)
    assert torch.equal(out, ops.decode_step(**twin, **options))
    for name in caches:
        for ours, theirs in zip(arguments.get(name) or [], twin.get(name) or [], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "shape",
    [{}, {"biased": True}, {"int8_cache": True}, {"dtype": torch.bfloat16, "layers": 3}],
    ids=str,
)
def test_step_after_step(shape):
    decoder = Decoder(**shape)
    arguments = decoder.arguments(token_ids(2, 1, decoder), [3, 6], ends=True)
    step = DecodeStep(**halves(arguments)[0])
    for length in ([3, 6], [4, 7], [1, 2]):
        arguments["seq_lens"] = torch.tensor(length)
        assert_same(step, arguments)
        assert_same(step, arguments, argmax=True)


def test_another_batch_and_another_number_of_tokens():
    decoder = Decoder()
    arguments = decoder.arguments(hidden(2, 3, decoder), [3, 6])
    step = DecodeStep(**halves(arguments)[0])
    assert_same(step, arguments)
    arguments |= {name: arguments[name][:, :1] for name in ("input", "cos", "sin")}
    assert_same(step, arguments)


@pytest.mark.parametrize("changed", ["biases", "norms", "weights"])
def test_values_that_change_in_place(changed):
    decoder = Decoder(biased=True)
    arguments = decoder.arguments(hidden(1, 1, decoder), 4)
    step = DecodeStep(**halves(arguments)[0])
    assert_same(step, arguments)
    arguments[changed][0].data.mul_(2)
    assert_same(step, arguments)


def test_memory_that_is_swapped_under_a_tensor():
    """`parameter.data = other` keeps the tensor, as `model.to()` does."""
    decoder = Decoder(biased=True)
    arguments = decoder.arguments(hidden(1, 1, decoder), 4)
    step = DecodeStep(**halves(arguments)[0])
    assert_same(step, arguments)
    for name in ("norms", "biases", "k_caches"):
        for tensor in arguments[name]:
            if tensor is not None:
                tensor.data = torch.randn_like(tensor)
        assert_same(step, arguments)
    arguments["norms"][0].data = arguments["norms"][0].to(torch.bfloat16)
    assert_same(step, arguments)


def test_another_instruction_set():
    decoder = Decoder(dtype=torch.bfloat16)
    arguments = decoder.arguments(hidden(1, 1, decoder), 4)
    step = DecodeStep(**halves(arguments)[0])
    before = isa.active()
    try:
        for name in isa.available():
            isa.use(name)
            assert_same(step, arguments)
    finally:
        isa.use(before)


def test_wrong_calls_name_the_argument_and_write_nothing():
    decoder = Decoder()
    arguments = decoder.arguments(token_ids(1, 1, decoder), 4, ends=True)
    bound, call = halves(arguments)
    step = DecodeStep(**bound)
    assert_same(step, arguments)
    before = copy.deepcopy(arguments["k_caches"])
    full = torch.tensor(arguments["k_caches"][0].size(2))
    for wrong, error, text in (
        ({"seq_lens": full}, ValueError, "seq_lens"),
        ({"seq_lens": torch.tensor(1.0)}, TypeError, "seq_lens"),
        ({"cos": call["cos"][..., :-1]}, ValueError, "cos"),
        ({"input": torch.tensor([[-1]])}, ValueError, "input"),
        ({"input": torch.zeros(1, 1, 3)}, ValueError, "embedding"),
    ):
        with pytest.raises(error, match=f"decode_step: {text}"):
            step(**call | wrong)
    assert all(map(torch.equal, arguments["k_caches"], before))
    assert_same(step, arguments)
    batch, heads, _, head_dim = arguments["k_caches"][1].shape
    arguments["k_caches"][1].resize_(batch, heads, 5, head_dim)
    with pytest.raises(ValueError, match=r"decode_step: .*cache"):
        step(**call)


def test_wrong_weights_are_refused_at_the_first_call():
    decoder = Decoder()
    bound, call = halves(decoder.arguments(hidden(1, 1, decoder), 4))
    bound["weights"] = [w[:-1] for w in bound["weights"]]
    with pytest.raises(ValueError, match=r"decode_step: weights\[0\] \(layer 0, q\)"):
        DecodeStep(**bound)(**call)


def test_gradients_are_refused():
    decoder = Decoder()
    bound, call = halves(decoder.arguments(hidden(1, 1, decoder), 4))
    with torch.inference_mode(False), pytest.raises(RuntimeError, match="no_grad"):
        DecodeStep(**bound)(**call)


def test_threads_that_share_a_step_take_turns():
    decoder = Decoder(dtype=torch.bfloat16)
    arguments = decoder.arguments(hidden(1, 1, decoder), 4)
    step = DecodeStep(**halves(arguments)[0])
    wanted, wrong = step(**halves(arguments)[1]), []

    def call():
        with torch.inference_mode():
            for _ in range(20):
                if not torch.equal(step(**halves(arguments)[1]), wanted):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
