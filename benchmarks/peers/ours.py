"""FastTPS: a patched transformers model, from Python, in the driver's own environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.hf import Transformers
from peers.peer import Job, SteppingPeer


class FastTps(Transformers):
    own_venv = False
    bits = ("bf16",)
    ways = ("patched-static",)

    def adapt(self, model: Any, job: Job) -> dict[str, Any]:
        import fasttps

        fasttps.patch(model)
        self.fasttps = fasttps
        return {
            "weight_bytes": 2 * job.weights(),
            "version": f"fasttps {fasttps.__version__}",
            "note": f"isa {fasttps.isa.active()}",
        }

    def new_cache(self, capacity: int) -> Any:
        return self.fasttps.StaticKVCache(self.model.config, self.job.max_seq_len)

    def ready(self, tokens: int) -> None:
        """One cache serves all sequences: only what is filled is read."""
        if self.cache is None:
            self.cache = self.new_cache(tokens)
        SteppingPeer.ready(self, tokens)

    def go_to(self, ids: Sequence[int]) -> int:
        if self.cache is None:
            self.cache = self.new_cache(len(ids))
        return SteppingPeer.go_to(self, ids)
