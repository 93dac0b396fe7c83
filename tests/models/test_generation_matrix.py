"""What `generate` says of every family, with every cache, in every way to decode.

Each test prints its part of the table (`pytest -s`). A cell says

    same                  the tokens of the unpatched model with transformers' DynamicCache
    as unpatched: ERROR   transformers itself refuses this, or says something else, in the same way
    only here             transformers refuses this with its own caches, and with ours it works
    broken: REASON        transformers' own cache gives tokens that depend on what was there before
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fasttps
from tests.support.decoding import MODES
from tests.support.families import FAMILIES
from tests.support.llama import cache_name

CACHES = ("dynamic", "static", "ring", "transformers' static")

BROKEN = {
    ("lfm2", "prompt_lookup", "transformers' static"): "one token gets no mask and sees every slot",
}


def options(cache: str, model: Any, room: int) -> dict[str, Any]:
    """`generate`'s for a cache of `room` tokens."""
    if cache == "dynamic":
        return {}
    if cache == "transformers' static":
        return {"cache_implementation": "static"}
    spare = {"spare_slots": 5} if cache == "ring" else {}
    return {cache_name(model): fasttps.StaticKVCache(model.config, room, **spare)}


def said(mode: str, model: Any, cache: str) -> torch.Tensor | str:
    """Tokens, or the error."""
    try:
        return MODES[mode](model, lambda room: options(cache, model, room))
    except Exception as error:  # whatever transformers raises, of both models alike
        return f"{type(error).__name__}: {error}".splitlines()[0]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def cell(mode: str, patched: Any, plain: Any, cache: str, wanted: Any) -> str:
    ours = said(mode, patched, cache)
    if isinstance(ours, torch.Tensor) and equal(ours, wanted):
        return "same"
    if isinstance(ours, torch.Tensor) and isinstance(wanted, str):
        return "only here"
    theirs = [wanted]
    if cache not in ("static", "ring"):
        # Both ways to make masks: sdpa's drops some that it should keep, and so does ours.
        theirs = [said_with(attention, mode, plain, cache) for attention in ("eager", "sdpa")]
    if any(equal(ours, one) for one in theirs):
        return f"as unpatched: {ours if isinstance(ours, str) else 'other tokens'}"
    return f"WRONG: {ours}"


def said_with(attention: str, mode: str, model: Any, cache: str) -> Any:
    before = model.config._attn_implementation
    model.config._attn_implementation = attention
    try:
        return said(mode, model, cache)
    finally:
        model.config._attn_implementation = before


@pytest.mark.parametrize("name", FAMILIES)
def test_cells(name):
    family = FAMILIES[name]
    plain, patched = family.model(), family.model()
    draft = family.model(1)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    fasttps.patch(patched)
    for model in (plain, patched):
        model.__dict__["draft"] = draft
    table = {}
    for mode in MODES:
        wanted = said(mode, plain, "dynamic")
        table[mode] = [
            f"broken: {BROKEN[name, mode, cache]}"
            if (name, mode, cache) in BROKEN
            else cell(mode, patched, plain, cache, wanted)
            for cache in CACHES
        ]
    print(f"\n{name:17} {' | '.join(CACHES)}")
    for mode, cells in table.items():
        print(f"{mode:17} {' | '.join(cells)}")
    assert not [mode for mode, cells in table.items() if any("WRONG" in c for c in cells)]
    # Our own caches refuse nothing that transformers does not.
    for cells in table.values():
        assert all(cells[at] in ("same", "only here") or cells[0] != "same" for at in (1, 2))
