"""ONNX Runtime GenAI on its CPU provider: 8 and 4 bit weights, float32 elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.peer import Job, SteppingPeer

if TYPE_CHECKING:
    from peers.venv import Venv

BLOCK = 32  # weights that share a float32 scale
INT8_ACTIVATIONS = 4  # the builder's accuracy level


class OnnxRuntime(SteppingPeer):
    """Its greedy sampling is timed with the rest; there is no way around it."""

    bits = ("int8", "int4")
    kv_element_bytes = 4

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH, TRANSFORMERS

        venv.pip(TORCH)
        venv.pip(TORCH, TRANSFORMERS, "onnxruntime-genai==0.18.0", "onnx", "onnx_ir")

    def folder(self, job: Job) -> Path:
        return job.folder / f"onnxruntime-{job.bits}"

    def prepare(self, job: Job) -> None:
        folder = self.folder(job)
        if (folder / "made").exists():
            return
        kind = [f"{job.bits}_accuracy_level={INT8_ACTIVATIONS}", f"{job.bits}_block_size={BLOCK}"]
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        where = ["-i", job.folder, "-o", folder, "-c", folder / "cache"]
        how = ["-p", job.bits, "-e", "cpu", "--extra_options", *kind]
        subprocess.run([*builder, *where, *how], check=True, stdin=subprocess.DEVNULL)
        (folder / "made").touch()

    def load(self, job: Job) -> dict[str, Any]:
        from importlib.metadata import version

        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(self.folder(job)))
        session = {"session_options": {"intra_op_num_threads": job.threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self.lib, self.job = onnxruntime_genai, job
        self.model = onnxruntime_genai.Model(config)
        self.generator: Any = None
        bits = {"int8": 8, "int4": 4}[job.bits]
        names = ("onnxruntime-genai", "onnxruntime")
        return {
            "version": ", ".join(f"{name} {version(name)}" for name in names),
            "weight_bytes": job.weights() * bits // 8 + job.weights() // BLOCK * 4,
            "note": f"block {BLOCK}, int8 activations, KV float32, sampling included",
        }

    def keep(self, length: int) -> None:
        if length > 0 and self.generator is not None:
            self.generator.rewind_to(length)
            return
        options = self.lib.GeneratorParams(self.model)
        options.set_search_options(max_length=self.job.max_seq_len + 8, do_sample=False)
        self.generator = self.lib.Generator(self.model, options)

    def extend(self, ids: Sequence[int]) -> int:
        self.generator.append_tokens([list(ids)])
        self.generator.generate_next_token()
        return int(self.generator.get_next_tokens()[0])

    def decode(self, count: int) -> list[int]:
        tokens = []
        for _ in range(count):
            self.generator.generate_next_token()
            tokens.append(int(self.generator.get_next_tokens()[0]))
        return tokens
