"""A HuggingFace folder as a model whose Parameters are mapped, so that patching it streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fasttps.models import FAMILIES
from fasttps.packed_model.skeleton import empty_model, replace_parameter
from fasttps.packed_model.tensor_file import BrokenTensorFile, TensorFile


class MappedModel:
    """The model, in the dtypes of its files, and the files.

    Attributes:
        model: None if the folder is not of a known family with all weights in safetensors; then
            transformers may still be able to load it.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            BrokenTensorFile: a file is cut short or no safetensors file.
        """
        self.model: Any = None
        self._files: list[TensorFile] = []
        for path in sorted(folder.glob("*.safetensors")):
            try:
                self._files.append(TensorFile(path))
            except BrokenTensorFile as error:
                raise BrokenTensorFile(f"{path.name} {error}") from error
        self._file_of = {name: file for file in self._files for name in file.names}
        self._make(folder)

    def forget(self) -> None:
        """Let go of the memory that holds pages of the files."""
        for file in self._files:
            file.forget()

    def _make(self, folder: Path) -> None:
        from transformers import AutoConfig, GenerationConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), nn.Module)
        if kind.__module__ not in FAMILIES or hasattr(config, "quantization_config"):
            return
        if config.num_hidden_layers > len(self._file_of):
            return
        model = empty_model(kind, config)
        for name, parameter in list(model.named_parameters()):
            file = self._file_of.get(name)
            if file is None or file.shape(name) != tuple(parameter.shape):
                return
            value = file.tensor(name, alignment_bytes=1)
            replace_parameter(model, parameter, nn.Parameter(value, requires_grad=False))
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                str(folder), local_files_only=True
            )
        self.model = model.eval()
