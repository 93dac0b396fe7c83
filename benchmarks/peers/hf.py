"""transformers on torch: the ways that a person would choose between."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peers.peer import Job, SteppingPeer

if TYPE_CHECKING:
    from peers.venv import Venv


class Transformers(SteppingPeer):
    """A way is "attention-cache"; "compiled" is torch.compile with frozen weights over sdpa.

    A static cache is as long as its sequence needs and no longer, since all of it is attended to.
    """

    bits = ("bf16",)
    ways = ("sdpa-dynamic", "eager-dynamic", "sdpa-static", "compiled-static")
    backend = "inductor"

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH, TRANSFORMERS

        venv.pip(TORCH)
        venv.pip(TORCH, TRANSFORMERS, "setuptools")

    def load(self, job: Job) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(job.threads)
        torch.set_grad_enabled(False)
        self.job, self.torch = job, torch
        attention, self.cache_kind = job.way.split("-")
        self.compiled = attention == "compiled"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.folder,
            dtype=torch.bfloat16,
            attn_implementation="eager" if attention == "eager" else "sdpa",
        ).eval()
        model.requires_grad_(False)
        facts = self.adapt(model, job)
        self.model = model
        self.capacity = 0
        self.cache: Any = None
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.step = self.forward
        if self.compiled:
            import torch._inductor.config as inductor

            inductor.freezing = True
            self.step = torch.compile(
                self.forward, dynamic=False, fullgraph=True, backend=self.backend
            )
        version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"version": version, "note": self.note()} | facts

    def note(self) -> str:
        if not self.compiled:
            return ""
        return "prefill compiled too" if self.job.compile_prefill else "prefill not compiled"

    def adapt(self, model: Any, job: Job) -> dict[str, Any]:
        """Change the model in place; further facts, `weight_bytes` among them."""
        return {"weight_bytes": 2 * job.weights()}

    def forward(self, ids: Any, cache: Any) -> Any:
        kwargs = {self.cache_name: cache}
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kwargs).logits

    def new_cache(self, capacity: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.cache_kind == "dynamic":
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=capacity)

    def ready(self, tokens: int) -> None:
        self.cache, self.capacity, self.ids = self.new_cache(tokens + 1), tokens + 1, []
        if self.compiled and self.job.compile_prefill:
            self.forward(self.torch.zeros(1, 1, dtype=self.torch.int64), self.cache)  # allocates
            self.cache.crop(-1)

    def go_to(self, ids: Sequence[int]) -> int:
        capacity = len(ids) + self.job.room
        if self.cache_kind == "static" and self.capacity != capacity:
            if self.compiled:
                self.torch.compiler.reset()  # frozen copies of the weights go with it
            old, self.cache, self.capacity = self.cache, self.new_cache(capacity), capacity
            if old is not None and len(self.ids) <= capacity:
                for at, layer in enumerate(old.layers if self.ids else []):
                    filled = slice(0, len(self.ids))
                    self.cache.update(layer.keys[:, :, filled], layer.values[:, :, filled], at)
            else:
                self.ids = []
        elif self.cache is None:
            self.cache = self.new_cache(capacity)
        return super().go_to(ids)

    def keep(self, length: int) -> None:
        surplus = int(self.cache.get_seq_length()) - length
        if surplus > 0:
            self.cache.crop(-surplus)

    def extend(self, ids: Sequence[int]) -> int:
        run = self.forward
        if len(ids) == 1 or (self.compiled and self.job.compile_prefill):
            run = self.step
        return int(run(self.torch.tensor([ids]), self.cache)[0, -1].argmax())
