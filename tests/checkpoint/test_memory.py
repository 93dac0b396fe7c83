"""What loading a quantised checkpoint takes in memory."""

from __future__ import annotations

import torch

from tests.support.checkpoints import copy_of, edit_config, edit_tensors, fixture
from tests.support.memory import measured

MEASURE = """
import torch, fasttps
fasttps.load_checkpoint(sys.argv[1])  # what is imported and made once

begin()
loaded = fasttps.load_checkpoint(sys.argv[2])
held = {t.data_ptr(): t.nbytes for t in (*loaded.model.buffers(), *loaded.model.parameters())}
counted = sum(held.values())
"""


def test_loading_takes_the_packed_weights_and_those_of_an_mlp(tmp_path):
    folder = copy_of("awq", tmp_path)
    hidden, inner, layers, vocab = 1024, 4096, 3, 20_000
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    edit_config(
        folder, lambda config: config.update(**sizes, vocab_size=vocab, head_dim=hidden // 4)
    )

    def enlarge(tensors):
        shapes = {key.split(".", 3)[3]: t.dim() for key, t in tensors.items() if "layers.0" in key}
        tensors.clear()
        tensors["model.embed_tokens.weight"] = torch.randn(vocab, hidden).half()
        tensors["model.norm.weight"] = torch.ones(hidden).half()
        rows_of = {
            "gate_proj": inner,
            "up_proj": inner,
            "k_proj": hidden // 2,
            "v_proj": hidden // 2,
        }
        for layer in range(layers):
            for name, dim in shapes.items():
                key = f"model.layers.{layer}.{name}"
                if dim == 1:
                    tensors[key] = torch.ones(hidden).half()
                    continue
                linear, part = name.split(".")[-2:]
                rows, cols = rows_of.get(linear, hidden), inner if "down" in linear else hidden
                groups = cols // 128
                tensors[key] = {
                    "qweight": torch.randint(2**31, (cols, rows // 8)).int(),
                    "qzeros": torch.randint(2**31, (groups, rows // 8)).int(),
                    "scales": torch.full((groups, rows), 0.01).half(),
                }[part]

    edit_tensors(folder, enlarge)
    peak, after, held = measured(MEASURE, fixture("awq"), folder)
    assert held > 60 << 20
    # Quants of gate, up and down are a byte each, and are unpacked from words.
    assert peak < held + 6 * hidden * inner + (32 << 20)
    assert after < 1.15 * held
