"""The machine as Linux describes it: CPU, caches, memory, huge pages."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def cpu_facts() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts


def machine() -> str:
    """The CPU's name, family, model and count, as the kernel states them."""
    facts = cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:
        name += f" family {facts['cpu family']} model {facts.get('model', '?')}"
    return f"{name}, {os.cpu_count()} cpus"


def last_level_cache_bytes() -> int:
    """The largest cache of the first core as Linux states it; 32 MiB where it states none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes, default=32 << 20)


def available_memory_bytes() -> int:
    """What the kernel thinks a new process can have; 4 GiB where it does not say."""
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text() if info.exists() else "", re.M)
    return 1024 * int(found[1]) if found else 4 << 30


def has_huge_pages() -> bool:
    """Whether a program gets transparent huge pages by asking for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()
