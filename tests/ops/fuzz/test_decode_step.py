"""Random calls of decode_step and of its bound form, valid and wrong, against the twin."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttps import ops, reference
from tests.support.attention import randn
from tests.support.decoder import Decoder
from tests.support.errors import bits
from tests.support.fuzz import (
    assert_refused_or_right,
    devices,
    dtypes,
    kernels,
    many,
    seeds,
    several_strides,
    some,
    spoiled,
)

OP = "decode_step"
CACHES = ("k_caches", "v_caches", "k_scales", "v_scales")
# What the bound form takes with each token.
TOKEN = ("input", "seq_lens", "cos", "sin", "kv_start", "argmax")
Format = ops.PackedFormat
LINEAR = torch.nn.functional.linear


def norms_of(draw, decoder, sizes, some):
    """Weights near 1 for every layer; `some`: a few are None."""
    return [
        None
        if some and draw(st.booleans())
        else 1
        + 0.2 * randn(70 + at, size, dtype=draw(st.sampled_from([decoder.dtype, torch.float])))
        for at, size in enumerate(sizes * decoder.layers)
    ]


@st.composite
def decoder_calls(draw):
    """Any decoder of one or two layers, with what every family may ask for."""
    num_kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    batch, new_tokens = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(dtypes)
    formats, group_size = None, 0
    if draw(st.booleans()):
        group_size = draw(st.sampled_from([32, 64]))
        kinds = st.sampled_from([int(Format.of(dtype)), 3, 4, 5, 6])
        formats = [draw(kinds) for _ in range(7)]
    max_seq_len = draw(st.integers(new_tokens, 24))
    decoder = Decoder(
        hidden_size=draw(st.integers(4, 70)),  # the norm of one or two is their signs
        intermediate_size=draw(st.integers(1, 70)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(1, 70)),
        dtype=dtype,
        formats=formats,
        group_size=group_size,
        max_seq_len=max_seq_len,
        biased=draw(st.booleans()),
        int8_cache=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
    )
    lengths = st.integers(0, max_seq_len - new_tokens)
    options = {}
    if draw(st.booleans()):
        options["windows"] = [
            draw(st.integers(0, max_seq_len - new_tokens + 1))
            for _ in range(draw(st.sampled_from([1, decoder.layers])))
        ]
        options["ring"] = draw(st.booleans())
        if options["ring"] and all(options["windows"]):
            lengths = st.integers(0, 3 * max_seq_len)
    past = draw(st.one_of(lengths, st.lists(lengths, min_size=batch, max_size=batch)))

    ends = draw(st.booleans())
    if ends:
        generator = torch.Generator().manual_seed(draw(seeds))
        x = torch.randint(decoder.vocab_size, (batch, new_tokens), generator=generator)
    else:
        x = randn(draw(seeds), batch, new_tokens, decoder.hidden_size, dtype=dtype)
        x = several_strides(draw, x, (0, 1))
    call = decoder.arguments(x, past, ends=ends, seed=draw(seeds)) | options
    if draw(st.booleans()):
        of_heads = draw(st.sampled_from([(1, 1), (decoder.num_heads, num_kv_heads)]))
        sizes = [heads * head_dim for heads in of_heads]
        call["head_norms"] = norms_of(draw, decoder, sizes, draw(st.booleans()))
    if draw(st.booleans()):
        call["out_norms"] = norms_of(draw, decoder, [decoder.hidden_size] * 2, draw(st.booleans()))
    if draw(st.booleans()):
        tables = draw(st.integers(1, 2))
        for name in ("cos", "sin"):
            call[name] = torch.stack([call[name] * (at + 1) / 2 for at in range(tables)])
        ropes = st.integers(-1, tables - 1)
        call["ropes"] = [draw(ropes) for _ in range(decoder.layers)]
    if draw(st.booleans()):
        starts = st.lists(st.integers(-2, max_seq_len + 3), min_size=batch, max_size=batch)
        call["kv_start"] = torch.tensor(draw(starts))
    for name, values in {
        "norm_offset": [1.0],
        "softcap": [1.5, 30.0],
        "residual_scale": [0.3],
        "scale": [0.1, 0.5],
        "logits_scale": [0.2, 2.0],
        "logits_softcap": [7.0],
        "embedding_scale": [4.0],
    }.items():
        if draw(st.integers(0, 3)) == 0:
            call[name] = draw(st.sampled_from(values))
    return call


def linear_of_bf16(rows, weight, bias=None):
    """A product whose activations are rounded to bf16, where the weight is one of bf16."""
    if torch.equal(weight.bfloat16().to(weight.dtype), weight):
        rows = rows.bfloat16().to(rows.dtype)
    return LINEAR(rows, weight, bias)


def check_result(call, out, caches):
    """As the twin says, with bf16 weights as it says with activations as they are, or rounded."""
    try:
        check_against_twin(call, out, caches)
    except AssertionError:
        if int(Format.BF16) not in (*call["formats"], call.get("lm_head_format")):
            raise
        # The dot product of bf16, which some CPUs take for such weights.
        with mock.patch.object(torch.nn.functional, "linear", linear_of_bf16):
            check_against_twin(call, out, caches)


def check_against_twin(call, out, caches):
    """Within float32's roundings of what goes through two layers, or those of a 16-bit cache."""
    expected = copy.deepcopy(call)
    exact = reference.decode_step(**expected).double()
    assert out.dtype == torch.float32 and out.is_contiguous() and out.shape == exact.shape
    if call["k_caches"][0].dtype == torch.int8:
        bound = 5e-2
    else:
        bound = {torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[
            call["k_caches"][0].dtype
        ]
    # Sums that cancel leave the roundings of their terms.
    size = max(float(exact.norm()), 0.05 * exact.numel() ** 0.5)
    assert float((out.double() - exact).norm()) <= bound * size
    for name in CACHES:
        for ours, theirs in zip(caches.get(name) or [], expected.get(name) or []):
            if ours.dtype == torch.int8:
                assert (ours.int() - theirs.int()).abs().max() <= 2
            else:
                atol = bound * max(float(theirs.abs().max()), 1.0)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_valid_steps():
    @many
    @given(devices, decoder_calls(), st.booleans())
    def check(device, call, bound):
        with device.active(), torch.no_grad():
            arguments = device.arguments(call)
            if bound and device.functions is ops:
                step = ops.DecodeStep(**{n: v for n, v in arguments.items() if n not in TOKEN})
                out = step(**{n: v for n, v in arguments.items() if n in TOKEN})
            else:
                out = device.call(OP, **arguments)
            check_result(call, out, arguments)
            if "lm_head" in call:
                first = device.call(OP, **device.arguments(call), argmax=True)
                if "logits_softcap" in call:  # which makes large ones alike
                    chosen = out.gather(-1, first.unsqueeze(-1)).squeeze(-1)
                    torch.testing.assert_close(chosen, out.amax(-1), rtol=1e-5, atol=0)
                else:
                    assert torch.equal(first, out.argmax(-1))

    check()


def watched(arguments):
    tensors = [t for name in CACHES for t in arguments.get(name) or []]
    return [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]


def test_spoiled_steps():
    @some
    @given(kernels, decoder_calls(), st.data())
    def check(device, call, data):
        what, wrong = spoiled(data.draw, call)
        arguments = device.arguments(wrong)

        def compare(result):
            assert "stride 0" not in what or not what.startswith(CACHES), what
            check_result(wrong, result, arguments)

        with device.active():
            assert_refused_or_right(OP, what, arguments, watched(arguments), compare)

    check()


def test_spoiled_tokens_of_a_bound_step():
    """After a valid token, a wrong one is refused, and the next valid one is right."""

    @some
    @given(kernels, decoder_calls(), st.data())
    def check(device, call, data):
        arguments = device.arguments(call)
        step_arguments = {n: v for n, v in arguments.items() if n not in TOKEN}
        token = {n: v for n, v in arguments.items() if n in TOKEN}
        with device.active(), torch.no_grad():
            step = ops.DecodeStep(**step_arguments)
            expected = step(**token)
            before = [bits(t) for t in watched(arguments)]
            what, wrong = spoiled(data.draw, token)
            try:
                step(**wrong)
            except (ValueError, TypeError) as error:
                assert str(error).startswith("decode_step: "), f"{what}: {error}"
            except RuntimeError as error:
                assert "run()" in str(error), f"{what}: {error}"
            else:
                return
            for tensor, old in zip(watched(arguments), before):
                assert torch.equal(bits(tensor), old), what
            assert torch.equal(step(**token), expected), what

    check()


def test_no_tokens_and_no_sequences():
    @some
    @given(kernels, decoder_calls(), st.booleans())
    def check(device, call, tokens):
        if tokens:
            call |= {n: call[n].narrow(-2, 0, 0) for n in ("cos", "sin")}
            call["input"] = call["input"][:, :0]
        else:
            axis = call["cos"].dim() - 3
            call |= {n: call[n].narrow(axis, 0, 0) for n in ("cos", "sin")}
            call |= {n: [t[:0] for t in call[n]] for n in CACHES if call.get(n)}
            call |= {n: call[n][:0] for n in ("input", "kv_start") if n in call}
            if call["seq_lens"].dim():
                call["seq_lens"] = call["seq_lens"][:0]
        arguments = device.arguments(call)
        with device.active():
            out = device.call(OP, **arguments)
        assert out.numel() == 0 and out.shape[:2] == call["input"].shape[:2]
        for name in CACHES:
            for ours, theirs in zip(arguments.get(name) or [], call.get(name) or []):
                assert torch.equal(bits(ours), bits(theirs))

    check()
