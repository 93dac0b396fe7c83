"""FastTPS: a patched transformers model and `fasttps.generate`, in the driver's environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.gguf_files import gguf_file
from peers.peer import Job, SteppingPeer


class FastTps(SteppingPeer):
    own_venv = False
    bits = ("bf16", "int8", "int4", "file")
    ways = ("patched",)

    def load(self, job: Job) -> dict[str, Any]:
        import models
        import torch
        import transformers

        import fasttps

        torch.set_num_threads(job.threads)
        self.torch, self.fasttps = torch, fasttps
        if job.bits == "file":
            loaded = fasttps.load_gguf(gguf_file(job))
            self.model, self.patch = loaded.model, loaded.patch
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                job.folder, dtype=torch.bfloat16
            ).eval()
            self.patch = fasttps.patch(self.model, job.bits)
        self.cache = fasttps.StaticKVCache(self.model.config, job.max_seq_len)
        return {
            "version": f"fasttps {fasttps.__version__}",
            "weight_bytes": models.weight_bytes(self.model),
            "note": f"isa {fasttps.isa.active()}",
        }

    def keep(self, length: int) -> None:
        surplus = self.cache.get_seq_length() - length
        if surplus > 0:
            self.cache.crop(-surplus)

    def extend(self, ids: Sequence[int]) -> int:
        return self.generate([*self.ids, *ids], 1).token_ids[0][0]

    def timed_decode(self, count: int) -> tuple[float, list[int]]:
        """The time from one token to the last after it: what comes before them is a prompt's."""
        self.keep(len(self.ids) - 1)
        done = self.generate(self.ids, count + 1)
        first, *tokens = done.token_ids[0]
        self.ids += [first, *tokens[:-1]]
        return done.decode_s, tokens

    def generate(self, ids: Sequence[int], count: int) -> Any:
        """Greedy tokens after `ids`, the first of which are in the cache."""
        return self.fasttps.generate(
            self.model,
            self.torch.tensor([ids]),
            max_new_tokens=count,
            stop_token_ids=(),
            cache=self.cache,
        )
