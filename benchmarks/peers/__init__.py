"""The peers of bench_peers.py: one file each, run in a virtual environment of its own."""

from __future__ import annotations

import importlib

from peers.peer import Peer

# The word after --peers: module and class. Imports nothing of what is measured.
PEERS = {
    "fasttps": "peers.ours:FastTps",
    "transformers": "peers.hf:Transformers",
    "amd-pace": "peers.pace:AmdPace",
    "zentorch": "peers.zen:Zentorch",
    "llama.cpp": "peers.llama_cpp_python:LlamaCpp",
    "ik_llama.cpp": "peers.ik_llama:IkLlamaCpp",
    "openvino": "peers.openvino_genai:OpenVino",
    "torchao": "peers.ao:TorchAo",
    "onnxruntime": "peers.ort_genai:OnnxRuntime",
}


def peer_class(where: str) -> type[Peer]:
    """The class at "module:class"."""
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, Peer)
    return found
