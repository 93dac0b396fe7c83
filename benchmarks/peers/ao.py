"""torchao: transformers with its quantised weights, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peers.hf import Transformers
from peers.peer import Job

if TYPE_CHECKING:
    from peers.venv import Venv

GROUP = 32


class TorchAo(Transformers):
    bits = ("int8", "int4")
    ways = ("compiled-static", "sdpa-static")

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH, TRANSFORMERS

        venv.pip(TORCH)
        venv.pip(TORCH, TRANSFORMERS, "setuptools", "torchao==0.18.0")

    def adapt(self, model: Any, job: Job) -> dict[str, Any]:
        import torch
        import torchao
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        # Untied: the table that is looked up stays bf16, the head is quantised.
        head = model.lm_head.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
        count = job.weights()
        if job.bits == "int8":
            quantize_(model, Int8WeightOnlyConfig())
            weight_bytes = count
        else:
            quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=GROUP))
            weight_bytes = count // 2 + count // GROUP * 4  # bf16 scale and zero
        return {"weight_bytes": weight_bytes, "version": f"torchao {torchao.__version__}"}
