"""amd-pace: the models that its server runs, stepped without its sampler and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peers.peer import Job, SteppingPeer

if TYPE_CHECKING:
    from peers.venv import Venv


class AmdPace(SteppingPeer):
    """A way is "cache-matmul". It computes logits for a whole prompt; here for its last token."""

    bits = ("bf16",)
    ways = ("slab-tpp", "slab-aocldlp", "bmc-tpp")

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH

        venv.pip(TORCH)
        venv.pip(TORCH, "amd-pace==1.3.0")

    def load(self, job: Job) -> dict[str, Any]:
        import pace
        import torch
        from pace.llm.attention import KVCacheType, create_cache
        from pace.llm.configs import OperatorConfig
        from pace.llm.models.model_utils import init_model
        from pace.llm.ops import BackendType, LLMOperatorType

        torch.set_num_threads(job.threads)
        torch.set_grad_enabled(False)
        self.torch, self.job = torch, job
        cache, matmul = job.way.split("-")
        kind = {"slab": KVCacheType.SLAB_POOL, "bmc": KVCacheType.BMC}[cache]
        operators = OperatorConfig()
        for part in ("QKVProjection", "OutProjection", "MLP", "LMHead"):
            operators[LLMOperatorType[part]] = BackendType(matmul)
        operators = operators.finalize(cache_type=kind)
        self.model = init_model(
            str(job.folder), dtype=torch.bfloat16, opconfig=operators, disable_tqdm=True
        ).eval()
        head = self.model.lm_head.forward
        self.model.lm_head.forward = lambda hidden: head(hidden[:, -1:].contiguous())
        self.cache = create_cache(kind, model_config=self.model.config)
        self.context: Any = None
        self.length = 0
        version = f"amd-pace {pace.__version__}, torch {torch.__version__}"
        return {"version": version, "weight_bytes": 2 * job.weights(), "note": "no sampler"}

    def keep(self, length: int) -> None:
        if length > 0 and self.context is not None:
            if self.length > length:
                self.context.remove_cache(self.length - length)
        else:
            if self.context is not None:
                self.cache.remove_context(self.context)
            room = self.job.max_seq_len + 8
            self.context = self.cache.create_context(self.model.config, room, batch_size=1)
        self.length = length

    def extend(self, ids: Sequence[int]) -> int:
        positions = self.torch.arange(self.length, self.length + len(ids))[None]
        out = self.model(self.torch.tensor([list(ids)]), positions, kv_cache=self.context)
        self.length += len(ids)
        return int(out.logits[0, -1].argmax())
