"""llama.cpp, built for this CPU, through the low-level calls of llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peers.gguf_files import gguf_file, matrix_bytes
from peers.peer import Job, SteppingPeer

if TYPE_CHECKING:
    from peers.venv import Venv

BATCH = 2048  # tokens of one call; computed in the library's own blocks of 512


class LlamaCpp(SteppingPeer):
    bits = ("bf16", "int8", "int4", "file")
    ways = ("native",)
    version_of = "llama-cpp-python"

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import build_jobs

        venv.pip("gguf==0.19.0", "numpy==2.4.6")
        venv.pip(
            "--no-binary",
            "llama-cpp-python",
            "llama-cpp-python==0.3.36",
            environment={
                "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_EXAMPLES=OFF",
                "CMAKE_BUILD_PARALLEL_LEVEL": build_jobs(),
            },
        )

    def library(self) -> Any:
        from llama_cpp import llama_cpp

        return llama_cpp

    def prepare(self, job: Job) -> None:
        gguf_file(job)

    def load(self, job: Job) -> dict[str, Any]:
        from importlib.metadata import version

        lib = self.lib = self.library()
        self._log: list[str] = []
        self._logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda level, text, data: self._log.append(text.decode(errors="replace"))
        )
        self.native("llama_log_set")(self._logger, None)
        lib.llama_backend_init()
        path = gguf_file(job)
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self.choose_model(options, job)
        model = lib.llama_model_load_from_file(str(path).encode(), options)
        options = lib.llama_context_default_params()
        options.n_ctx = -(-(job.max_seq_len + 8) // 256) * 256
        options.n_batch = BATCH
        options.n_threads = options.n_threads_batch = job.threads
        self.choose_context(options)
        self.context = model and lib.llama_init_from_model(model, options)
        if not self.context:
            raise RuntimeError("".join(self._log)[-400:])
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.vocab_size = job.config()["vocab_size"]
        info = self.native("llama_print_system_info", ctypes.c_char_p)().decode().strip()
        return {
            "version": f"{self.version_of} {version(self.version_of)}",
            "weight_bytes": matrix_bytes(path),
            "note": f"{path.name}, KV f16; {info}",
        }

    def native(self, name: str, result: Any = None) -> Any:
        """A function of the library by its C name, which the bindings may lack."""
        found = getattr(self.lib._lib, name)
        found.argtypes, found.restype = None, result
        return found

    def choose_model(self, options: Any, job: Job) -> None:
        """Further options of the model."""

    def choose_context(self, options: Any) -> None:
        """Further options of the context."""

    def keep(self, length: int) -> None:
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_seq_rm(memory, 0, length, -1)
        self.length = length

    def extend(self, ids: Sequence[int]) -> int:
        import numpy

        batch = self.batch
        for begin in range(0, len(ids), BATCH):
            part = ids[begin : begin + BATCH]
            batch.n_tokens = len(part)
            for at, token in enumerate(part):
                batch.token[at] = token
                batch.pos[at] = self.length + at
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = 0
                batch.logits[at] = begin + at == len(ids) - 1
            code = self.lib.llama_decode(self.context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode: {code}")
            self.length += len(part)
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())
