"""zentorch: transformers compiled by its torch.compile backend, static cache, frozen weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peers.hf import Transformers
from peers.peer import Job

if TYPE_CHECKING:
    from peers.venv import Venv


class Zentorch(Transformers):
    ways = ("compiled-static",)
    backend = "zentorch"

    @staticmethod
    def install(venv: Venv) -> None:
        from peers.venv import TORCH, TRANSFORMERS

        venv.pip(TORCH)
        venv.pip(TORCH, TRANSFORMERS, "setuptools", "zentorch==2.13.0.2")

    def adapt(self, model: Any, job: Job) -> dict[str, Any]:
        import zentorch

        return super().adapt(model, job) | {"version": f"zentorch {zentorch.__version__}"}
