"""Model families that `fasttps.patch` knows, one file each, imported when a model needs them.

A family file offers `FUSED`, the classes that its modules become (see `patch.FusedModule`), and
`change_model(model, plan, changes)`, which changes what else of the model has to, and puts on
`changes` what undoes it.
A new family is a new file and a row here.
"""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    # where the classes that are replaced live: the file that replaces them
    "transformers.models.llama.modeling_llama": "fasttps.models.llama",
}
