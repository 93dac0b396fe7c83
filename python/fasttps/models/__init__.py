"""Model families that `fasttps.patch` knows, one file each, imported when a model needs them.

A family file offers
    FUSED        the classes that its modules become (`fused_module.FusedModule`)
    LINEARS      the linears that are packed by themselves (`patch_plan.Linears`)
    EMBEDDINGS   embeddings that may be tied to the head, where those are no plain nn.Embedding
    LEFT_ALONE   classes that are not fused, and why, for the report
A new family is a new file and a name here.
"""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    # where the classes that are replaced live: the file that replaces them
    f"transformers.models.{name}.modeling_{name}": f"fasttps.models.{name}"
    for name in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3",
        "glm",
        "lfm2",
        "granite",
        "olmo2",
        "smollm3",
        "starcoder2",
        "mixtral",
        "qwen3_moe",
        "olmoe",
        "gpt_oss",
    )
}
