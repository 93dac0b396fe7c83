"""What a peer is to the driver: an installation, and what its worker process can be asked.

Standard library only: this runs in the environment of every peer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from peers.venv import Venv

WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Job:
    """One model at one precision, as a worker is told to load it.

    Attributes:
        folder: HuggingFace folder (bf16 safetensors, config, tokenizer); the peer's own files of
            the same weights lie in it too, under the peer's name.
        bits: "bf16", "int8", "int4", or "file": the weights of the GGUF file `gguf` as they are.
        way: one of the peer's ways.
        threads: how many compute.
        max_seq_len: tokens of the longest sequence.
        room: tokens that are decoded at most after a sequence that was gone to.
        compile_prefill: compiled ways compile the prompt too, once for each length.
        gguf: of a real model, the file that it came in.
    """

    folder: Path
    bits: str
    way: str
    threads: int
    max_seq_len: int
    room: int
    compile_prefill: bool = False
    gguf: Path | None = None

    @classmethod
    def of(cls, message: dict[str, Any]) -> Job:
        fields = dict(message)
        for key in ("folder", "gguf"):
            fields[key] = fields[key] and Path(fields[key])
        return cls(**fields)

    def message(self) -> dict[str, Any]:
        return {key: str(v) if isinstance(v, Path) else v for key, v in vars(self).items()}

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def weights(self) -> int:
        """Matrix elements that one token reads; a looked-up embedding table is not read."""
        c = self.config()
        hidden, head_dim = c["hidden_size"], c["head_dim"]
        heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
        layer = hidden * head_dim * heads + 3 * hidden * c["intermediate_size"]
        return c["num_hidden_layers"] * layer + c["vocab_size"] * hidden

    def kv_elements(self) -> int:
        """Elements of keys and values that one token leaves in the cache."""
        c = self.config()
        return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]


class Peer:
    """Base of all peers. An instance lives in a worker process and holds one model.

    Attributes:
        bits: the precisions of weights that it runs.
        ways: names of the ways that a person may run it in; the first is its usual one.
        own_venv: it has a virtual environment; else it runs in the driver's.
        kv_element_bytes: of its KV cache.
    """

    bits: ClassVar[tuple[str, ...]]
    ways: ClassVar[tuple[str, ...]] = ("",)
    own_venv: ClassVar[bool] = True
    kv_element_bytes: ClassVar[int] = 2

    @staticmethod
    def install(venv: Venv) -> None:
        """Fill the virtual environment, with pinned versions."""

    @classmethod
    def can_run(cls, bits: str, way: str) -> bool:
        """Whether this way runs weights of these bits."""
        return bits in cls.bits

    def prepare(self, job: Job) -> None:
        """Make the peer's own model files beside the folder's, unless they are there."""

    def load(self, job: Job) -> dict[str, Any]:
        """Load the model.

        Returns:
            `version`, `weight_bytes` that a token reads, and `note`: what a reader should know.
        """
        raise NotImplementedError

    def ready(self, tokens: int) -> None:
        """Empty the cache for a prompt of so many tokens. Not timed."""

    def prefill(self, ids: Sequence[int]) -> int:
        """Run a prompt from an empty cache; the greedy next token. Timed."""
        raise NotImplementedError

    def go_to(self, ids: Sequence[int]) -> int:
        """Let the sequence be `ids`, or hardly more; its length then. Not timed."""
        raise NotImplementedError

    def decode(self, count: int) -> list[int]:
        """So many greedy tokens more, one at a time. Timed."""
        raise NotImplementedError

    def timed_decode(self, count: int) -> tuple[float, list[int]]:
        """Seconds of `decode`, and its tokens."""
        begin = time.perf_counter()
        tokens = self.decode(count)
        return time.perf_counter() - begin, tokens


class SteppingPeer(Peer):
    """A peer whose sequence can be cut and extended: everything rests on `keep` and `extend`.

    Attributes:
        ids: the tokens in the cache.
        token: the greedy one after them.
    """

    PIECE = 512  # tokens at once where nothing is timed, so that memory stays small

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.token = -1

    def keep(self, length: int) -> None:
        """Drop the tokens from `length` on from the cache."""
        raise NotImplementedError

    def extend(self, ids: Sequence[int]) -> int:
        """Run these tokens after those that are there; the greedy next one."""
        raise NotImplementedError

    def ready(self, tokens: int) -> None:
        self.keep(0)
        self.ids = []

    def prefill(self, ids: Sequence[int]) -> int:
        self.token = self.extend(ids)
        self.ids = list(ids)
        return self.token

    def go_to(self, ids: Sequence[int]) -> int:
        pairs = enumerate(zip(self.ids, ids))
        same = next((at for at, (a, b) in pairs if a != b), min(len(self.ids), len(ids)))
        kept = min(same, len(ids) - 1)  # the last one runs again, for the token after it
        self.keep(kept)
        self.ids = list(ids[:kept])
        for begin in range(kept, len(ids), self.PIECE):
            piece = ids[begin : begin + self.PIECE]
            self.token = self.extend(piece)
            self.ids += piece
        if len(ids) - kept > 1:  # new here: what single tokens need is made, or compiled, now
            self.timed_decode(WARM_UP_TOKENS)
            return self.go_to(ids)
        return len(ids)

    def decode(self, count: int) -> list[int]:
        tokens = []
        for _ in range(count):
            tokens.append(self.extend([self.token]))
            self.ids.append(self.token)
            self.token = tokens[-1]
        return tokens
