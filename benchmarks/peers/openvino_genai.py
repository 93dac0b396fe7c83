"""OpenVINO GenAI: its continuous batching pipeline with one sequence, stepped token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.peer import Job, Peer

if TYPE_CHECKING:
    from peers.venv import Venv

GROUP = 64  # int4 weights that share an f16 scale; its own default is 128, less exact
DRIFT = 16  # a sequence is kept while it is at most 1/16 longer than asked for


class OpenVino(Peer):
    """The KV cache is bf16 (u8 by default) and the prefix cache off: repeated prompts would cost
    nothing. Greedy sampling is timed with the rest.
    """

    bits = ("bf16", "int8", "int4")

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH

        venv.pip(TORCH)
        venv.pip(TORCH, "openvino-genai==2026.4.1.0", "nncf==3.4.0", "optimum-intel==2.2.0")
        # One that comes along is built for another torch, and transformers imports it.
        venv.run(venv.python, "-m", "pip", "uninstall", "-y", "torchvision")

    def folder(self, job: Job) -> Path:
        return job.folder / f"openvino-{job.bits}"

    def prepare(self, job: Job) -> None:
        folder = self.folder(job)
        if (folder / "made").exists():
            return
        import openvino
        import torch
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
        from transformers import AutoTokenizer

        options: dict[str, Any] = {"load_in_8bit": False}
        if job.bits == "int8":
            options = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=False)}
        elif job.bits == "int4":
            kind = OVWeightQuantizationConfig(
                bits=4, sym=True, group_size=GROUP, ratio=1.0, all_layers=True
            )
            options = {"quantization_config": kind}
        model = OVModelForCausalLM.from_pretrained(
            job.folder, export=True, compile=False, dtype=torch.bfloat16, **options
        )
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(job.folder)
        parts = convert_tokenizer(tokenizer, with_detokenizer=True)
        for part, name in zip(parts, ("tokenizer", "detokenizer")):
            openvino.save_model(part, folder / f"openvino_{name}.xml")
        (folder / "made").touch()

    def load(self, job: Job) -> dict[str, Any]:
        import numpy
        import openvino
        import openvino_genai

        self.lib, self.openvino, self.numpy = openvino_genai, openvino, numpy
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 1 << 16
        scheduler.max_num_seqs = 1
        scheduler.num_kv_blocks = -(-(job.max_seq_len + 64) // 32) + 8
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": job.threads,
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(self.folder(job)), scheduler, "CPU", properties
        )
        self.room = job.max_seq_len
        self.request: Any = None
        self.length = self.requests = 0
        count = job.weights()
        bits = {"bf16": 16, "int8": 8, "int4": 4}[job.bits]
        group = f", group {GROUP}" if job.bits == "int4" else ""
        return {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "weight_bytes": count * bits // 8 + (2 * count // GROUP if bits == 4 else 0),
            "note": f"continuous batching{group}, KV bf16, no prefix cache, sampling included",
        }

    def ready(self, tokens: int) -> None:
        """End the sequence that is there."""
        if self.request is not None:
            self.request.cancel()
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()
        self.request, self.length = None, 0

    def prefill(self, ids: Sequence[int]) -> int:
        config = self.lib.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = self.room
        config.ignore_eos, config.do_sample = True, False
        tokens = self.openvino.Tensor(self.numpy.array([ids], self.numpy.int64))
        self.requests += 1
        self.request = self.pipeline.add_request(self.requests, tokens, config)
        self.length = len(ids)
        return self.next_token()

    def next_token(self) -> int:
        """Run steps until there is a token."""
        while not self.request.can_read():
            self.pipeline.step()
        (output,) = self.request.read().values()
        (token,) = output.generated_ids
        return int(token)

    def go_to(self, ids: Sequence[int]) -> int:
        if not len(ids) <= self.length <= len(ids) + len(ids) // DRIFT:
            self.ready(len(ids))
            self.prefill(ids)
        return self.length

    def decode(self, count: int) -> list[int]:
        tokens = [self.next_token() for _ in range(count)]
        self.length += count
        return tokens
