"""A peer's worker process: obeys lines of JSON until they end, answers each with one line.

Standard library only: this runs in the environment of every peer. Answers go to the descriptor
that was standard output; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from typing import IO, Any

from peers.peer import Job, Peer


def set_threads(threads: int) -> None:
    """What every runtime reads when it is imported."""
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[key] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def answer(peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
    """Do what one message asks."""
    match message["do"]:
        case "prepare":
            peer.prepare(Job.of(message["job"]))
            return {}
        case "load":
            job = Job.of(message["job"])
            kv = job.kv_elements() * peer.kv_element_bytes
            return {"kv_bytes_per_token": kv} | peer.load(job)
        case "prefill":
            peer.ready(len(message["ids"]))
            begin = time.perf_counter()
            token = peer.prefill(message["ids"])
            return {"seconds": time.perf_counter() - begin, "token": int(token)}
        case "go_to":
            return {"length": peer.go_to(message["ids"])}
        case "decode":
            seconds, tokens = peer.timed_decode(message["count"])
            return {"seconds": seconds, "tokens": [int(token) for token in tokens]}
    raise ValueError(f"do wanted prepare, load, prefill, go_to or decode, got {message['do']!r}")


def serve(peer: Peer, orders: IO[str], answers: IO[str]) -> None:
    """Answer every line of `orders` with one line, until they end."""
    for line in orders:
        try:
            reply = answer(peer, json.loads(line))
        except BaseException as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def main(where: str, threads: int) -> None:
    """Be the worker of the peer at "module:class"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    set_threads(threads)
    module, _, name = where.partition(":")
    serve(getattr(importlib.import_module(module), name)(), sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
