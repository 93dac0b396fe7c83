"""SmolLM2-135M from its GGUF file at Q4_1: what it says, what int8 costs, what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import fasttps
from fasttps import ops
from fasttps.gguf import tensors
from fasttps.gguf.header import read_header
from tests.support.llama import cache_name
from tests.support.memory import measured
from tests.support.smollm2 import (
    CONTINUATIONS,
    QUESTIONS,
    mean_kl,
    smollm2,
    smollm2_prompts,
    smollm2_tokenizer,
)

NEW_TOKENS = 64
KL_TOKENS, TOKENS_PER_CALL = 1100, 275
MAX_KL, MAX_KL_RATIO = 6e-3, 1.1  # from the float32 model; over that of the same rounding
GROUP = 32  # activations that share a scale
TEXT = Path(__file__).resolve().parents[2] / "benchmarks" / "quality_text.txt"
SMALL = Path(__file__).parent / "fixtures" / "llama.gguf"


@pytest.fixture(scope="module")
def path() -> Path:
    from fasttps.cli.demo import smollm2_path

    smollm2_tokenizer()  # skips where the package is not installed
    return smollm2_path()


@pytest.fixture(scope="module")
def plain(path: Path) -> Any:
    """The dequantised float32 model."""
    return smollm2(torch.float32)


@pytest.fixture(scope="module")
def floats(path: Path) -> Any:
    """The file's own weights, activations in float32."""
    return fasttps.load_gguf(path, dtype=torch.float32, int8_activation=False)


@pytest.mark.parametrize("at", range(len(QUESTIONS) + len(CONTINUATIONS)))
def test_the_same_64_greedy_tokens(plain: Any, floats: Any, at: int) -> None:
    prompt = smollm2_prompts(floats.tokenizer)[at]
    made = fasttps.generate(
        floats.model, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=()
    ).token_ids[0]
    assert len(made) == NEW_TOKENS
    ids = torch.cat([prompt, torch.tensor([made[:-1]])], dim=1)
    with torch.inference_mode():  # what it takes after each of them: equal only if all are
        logits = plain(ids).logits[0, prompt.shape[1] - 1 :]
    assert made == logits.argmax(-1).tolist()


def log_probabilities(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a text that is read piece by piece."""
    logits = []
    with torch.inference_mode():
        for piece in ids.split(TOKENS_PER_CALL, dim=1):
            logits.append(model(piece, **{cache_name(model): cache}, use_cache=True).logits[0])
    return torch.cat(logits).float().log_softmax(-1)


def int8(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 127 steps on either side of the largest of each group."""
    groups = x.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (groups / scale.clamp_min(1e-30)).round().mul(scale).flatten(-2)


@pytest.fixture
def rounded(plain: Any) -> Iterator[Any]:
    """The float32 model, the input of each linear rounded as ours are, in plain PyTorch."""
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: (int8(inputs[0]),))
        for module in plain.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    yield plain
    for hook in hooks:
        hook.remove()


def test_int8_activations_cost_no_more_than_their_rounding(
    path: Path, plain: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import DynamicCache

    loaded = fasttps.load_gguf(path, dtype=torch.float32)
    ids = loaded.tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :KL_TOKENS]
    assert ids.shape[1] >= 1000
    exact = log_probabilities(plain, ids, DynamicCache(config=plain.config))
    ours = log_probabilities(loaded.model, ids, loaded.patch.cache(ids.shape[1]))
    simulated = request.getfixturevalue("rounded")
    theirs = log_probabilities(simulated, ids, DynamicCache(config=plain.config))
    our_kl, their_kl = mean_kl(exact, ours), mean_kl(exact, theirs)
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M at Q4_1, {ids.shape[1]} tokens teacher-forced, mean KL from float32 "
            f"activations in nats: int8 ours {our_kl:.3e}, simulated {their_kl:.3e}"
        )
    assert 0 < our_kl <= MAX_KL
    assert our_kl <= MAX_KL_RATIO * their_kl


def test_embedding_and_head_are_one_copy_of_the_blocks(floats: Any, path: Path) -> None:
    info = read_header(path).tensors["token_embd.weight"]
    assert info.type_name == "Q8_0"
    head, table = (
        module.packed_weight for module in (floats.model.lm_head, floats.model.model.embed_tokens)
    )
    assert head.format == table.format == ops.PackedFormat.INT8_GROUP
    assert head.packed.data_ptr() == table.packed.data_ptr()
    assert head.packed.nbytes == info.end - info.begin
    parameters = floats.model.parameters()
    assert all(parameter.dim() < 2 or parameter.numel() == 0 for parameter in parameters)


def test_every_byte_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes loading fast, and does not hang on the machine."""
    read: list[int] = []
    read_into = tensors.read_into

    def counted(data: torch.Tensor, *where: Any) -> torch.Tensor:
        read.append(data.numel())
        return read_into(data, *where)

    monkeypatch.setattr(tensors, "read_into", counted)
    fasttps.load_gguf(path)
    infos = read_header(path).tensors.values()
    assert sum(read) == sum(info.end - info.begin for info in infos)


MEASURE = """
import torch, fasttps

def run(path, prompt):
    loaded = fasttps.load_gguf(path)
    ids = torch.tensor([prompt])
    cache = loaded.patch.cache(len(prompt) + 16)
    made = fasttps.generate(loaded.model, ids, max_new_tokens=16, stop_token_ids=(), cache=cache)
    return loaded, cache, made

run(sys.argv[1], [3, 4, 5])  # code, which is read from disk as it is first run
begin()
loaded, cache, made = run(sys.argv[2], [504, 2988, 282, 4649, 314])
kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
counted = kv
"""


def test_it_takes_little_more_memory_than_its_file(path: Path) -> None:
    peak, after, kv = measured(MEASURE, SMALL, path)
    needed = path.stat().st_size + kv
    assert after <= 1.3 * needed
    assert peak <= 1.5 * needed
