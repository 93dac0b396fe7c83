"""One word finds an op in every room, and no room includes what it must not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

ROOT = Path(__file__).resolve().parent.parent

OPS = [
    "causal_prefill",
    "decode_step",
    "gate_up_silu_mlp",
    "kv_cache_update",
    "merge_attention",
    "pack_gguf",
    "pack_quants",
    "pack_weight",
    "packed_embedding",
    "packed_linear",
    "rope_attention_decode",
]

# Schemas that are not an op's own word: the file they live in.
WORD_OF_SCHEMA = {
    "kv_cache_update_": "kv_cache_update",
    "pack_gate_up": "pack_weight",
    "unpack_gate_up": "pack_weight",
    "unpack_weight": "pack_weight",
}

# A room is a folder; it exists or not. One that exists has a file for every op.
ROOMS = [
    "csrc/ops/{op}.cpp",
    "csrc/ops/{op}.h",
    "csrc/cpu/kernels/{op}.h",
    "csrc/cpu/register/{op}.cpp",
    "csrc/hip/{op}.hip",
    "csrc/npu/ops/{op}.cpp",
    "python/fasttps/ops/{op}.py",
    "python/fasttps/reference/{op}.py",
    "tests/ops/test_{op}.py",
    "benchmarks/bench_{op}.py",
]

LOWERED = {
    "causal_prefill",
    "gate_up_silu_mlp",
    "kv_cache_update",
    "packed_linear",
    "rope_attention_decode",
}

# (room, op) of an op that is declared for some devices only; README's table shows it.
EXEMPT: set[tuple[str, str]] = {("csrc/npu/ops/{op}.cpp", op) for op in OPS if op not in LOWERED}

TORCH = r"^(ATen|c10|torch|pybind11)/"
INTRINSICS = r"^(immintrin|x86intrin|arm_neon|arm_sve)\.h$"
DEVICES = r"(^|/)(cpu|hip|npu)/"

# Files of a room, and what they must not include.
FORBIDDEN_INCLUDES = {
    "csrc/ops/*": DEVICES,
    "csrc/cpu/*": rf"(^|/)(hip|npu)/|{INTRINSICS}",
    "csrc/cpu/register/*": rf"(^|/)(hip|npu)/|{INTRINSICS}",
    "csrc/cpu/bf16_choice.*": TORCH,
    "csrc/cpu/isa_list.*": TORCH,
    "csrc/cpu/usable_cpus.*": TORCH,
    "csrc/cpu/kernel_table.h": TORCH,
    "csrc/cpu/limits/*": rf"{TORCH}|{INTRINSICS}|(^|/)(hip|npu|kernels|ops|register)/",
    "csrc/instructions/*": TORCH,
    "csrc/tests/*": TORCH,
    "csrc/hip/kernels/*": rf"{TORCH}|(^|/)(cpu|npu|ops)/",
    "csrc/hip/arch/*": rf"{TORCH}|(^|/)(cpu|npu|ops)/",
    "csrc/npu/device.h": rf"{TORCH}|^xrt|(^|/)(sim|xrt)/",
    "csrc/npu/program.h": rf"{TORCH}|^xrt|(^|/)(sim|xrt)/",
    "csrc/npu/sim/*": rf"{TORCH}|^xrt|(^|/)(ops|xrt)/",
    "csrc/npu/xrt/*": rf"{TORCH}|(^|/)sim/",
    "csrc/npu/ops/*": r"^xrt|(^|/)(sim|xrt)/",
    "csrc/npu/backend/*": r"^xrt|(^|/)(sim|xrt)/",
}

# Files of a room that may include nothing but this.
ALLOWED_INCLUDES = {
    "csrc/cpu/kernels/*": r"^(cstdint|immintrin\.h)$|^(\.\./)?[a-z0-9_]+\.h$",
    "csrc/cpu/isa/*": r"^(cstdint|immintrin\.h)$|^(\.\./(kernels/)?)?[a-z0-9_]+\.h$",
    "csrc/npu/kernels/*.cc": r"^kernel\.h$",
    "csrc/npu/kernels/kernel.h": r"^(cstdint|aie_api/aie\.hpp)$",
    "csrc/cpu/limits/isa/*": r"^(cstdint|immintrin\.h)$|^(\.\./(\.\./)?)?[a-z0-9_]+\.h$",
}

# What a Python room must not import, anywhere or at module level.
FORBIDDEN_IMPORTS = {
    "python/fasttps/ops/*.py": r"^(transformers|fasttps\.(models|cli|reference|kv_cache))",
    "python/fasttps/reference/*.py": r"^(transformers|fasttps(?!\.reference))",
    "python/fasttps/models/patch*.py": r"^transformers",
    "benchmarks/*.py": r"^tests|^fasttps\.(_|.*\._)",
}


def source(path: str) -> str:
    return (ROOT / path).read_text()


def files(pattern: str) -> list[Path]:
    suffixes = {".cpp", ".h", ".hip", ".cc", ".py"}
    return [f for f in sorted(ROOT.glob(pattern)) if f.suffix in suffixes]


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE)


def imports(file: Path, everywhere: bool = True) -> list[str]:
    """Absolute names of what `file` imports; with `everywhere` off, when it is imported only."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    package = file.parent.relative_to(ROOT / "python").parts if "python" in file.parts else ()
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("room", ROOMS)
def test_op_has_its_place(room, op):
    if not (ROOT / room).parent.is_dir():
        pytest.skip(f"no room {Path(room).parent} yet")
    there = (ROOT / room.format(op=op)).exists()
    if (room, op) in EXEMPT:
        assert not there, "exempt, yet there: remove it from EXEMPT"
    else:
        assert there


def test_every_schema_belongs_to_an_op():
    schemas = re.findall(r'm\.def\(\s*"([a-z_]+)', source("csrc/ops/library.cpp"))
    assert {WORD_OF_SCHEMA.get(name, name) for name in schemas} == set(OPS)


def test_every_test_belongs_to_a_part_of_make_test():
    runner = source("scripts/test.py")
    parts = [p for name in re.findall(r'"(tests/[^"]*)"', runner) for p in ROOT.glob(name)]
    tests = [f for f in ROOT.glob("tests/**/test_*.py") if "__pycache__" not in f.parts]
    lost = [f for f in tests if not any(part == f or part in f.parents for part in parts)]
    assert lost == []


@pytest.mark.parametrize("pattern", FORBIDDEN_INCLUDES)
def test_room_includes_nothing_forbidden(pattern):
    forbidden = re.compile(FORBIDDEN_INCLUDES[pattern])
    wrong = [f"{f}: {i}" for f in files(pattern) for i in includes(f) if forbidden.search(i)]
    assert wrong == []


@pytest.mark.parametrize("pattern", ALLOWED_INCLUDES)
def test_kernels_include_only_intrinsics_and_their_own(pattern):
    allowed = re.compile(ALLOWED_INCLUDES[pattern])
    assert files(pattern) != []
    wrong = [f"{f}: {i}" for f in files(pattern) for i in includes(f) if not allowed.search(i)]
    assert wrong == []


@pytest.mark.parametrize("pattern", FORBIDDEN_IMPORTS)
def test_room_imports_nothing_forbidden(pattern):
    forbidden = re.compile(FORBIDDEN_IMPORTS[pattern])
    assert files(pattern) != []
    wrong = [f"{f}: {i}" for f in files(pattern) for i in imports(f) if forbidden.search(i)]
    assert wrong == []


def families() -> set[str]:
    """Modules that `fasttps.patch` imports when a model is of their family."""
    table = source("python/fasttps/models/__init__.py").partition("for name in (")[2]
    return set(re.findall(r'^ +"(\w+)",$', table, re.MULTILINE))


def test_no_module_imports_another_that_is_a_model_family():
    assert families() != set()
    wrong = [
        f"{file.stem}: {name}"
        for file in files("python/fasttps/models/*.py")
        for name in imports(file)
        for family in families() - {file.stem}
        if name.startswith(f"fasttps.models.{family}")
    ]
    assert wrong == []


def test_only_a_family_imports_transformers_before_it_is_needed():
    """Importing the patch does not, which would take seconds."""
    script = "import sys, fasttps, fasttps.models.patch; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=process_environment()
    )
    assert done.stdout.strip() == "False", done.stderr


def test_flags_of_instruction_sets_stand_in_one_file_alone():
    builders = [ROOT / "CMakeLists.txt", ROOT / "setup.py", *ROOT.glob("cmake/*")]
    builders += ROOT.glob("csrc/**/CMakeLists.txt")
    flagged = [f.name for f in builders if re.search(r"-m(avx|fma|f16c|arch|cpu)", f.read_text())]
    assert flagged == ["isa.cmake"]


# Objects that are compiled for one instruction set, and what the table of each is called.
ISA_OBJECTS = {
    "CMakeFiles/fasttps_cpu_kernels.dir/csrc/cpu/isa": "Kernels",
    "CMakeFiles/fasttps_cpu_limits.dir/csrc/cpu/limits/isa": "Limits",
}


def isa_objects() -> list[tuple[Path, str]]:
    """Each object with the name of its table."""
    return [
        (item, f"k{item.name.removesuffix('.cpp.o').title().replace('_', '')}{suffix}")
        for preset in ("release", "kernels")
        for folder, suffix in ISA_OBJECTS.items()
        for item in sorted(ROOT.glob(f"build/{preset}/{folder}/*.o"))
    ]


def symbols(*options: str | Path) -> list[tuple[str, str]]:
    """(type, name) of the symbols that `nm` lists; types as in its manual."""
    command = ["nm", "--format=posix", "--demangle", *options]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = (re.match(r"(.+?) ([A-Za-z])( |$)", line) for line in lines)
    return [(match[2], match[1]) for match in found if match]


# A weak symbol in one of these objects, such as a std template compiled with -mavx2, can be the
# copy that the linker keeps for code that every CPU runs.
def test_isa_objects_export_their_table_alone():
    if not isa_objects():
        pytest.skip("nothing is built in build/; `make build` does")
    for item, table in isa_objects():
        exported = symbols("--extern-only", "--defined-only", item)
        assert [name for _, name in exported] == [f"fasttps::cpu::{table}"], item
        assert not {kind for kind, _ in exported} & set("WVuvw"), item
        undefined = [name for _, name in symbols("--undefined-only", item)]
        assert [name for name in undefined if "::" in name or "(" in name] == [], item


def tracked_files() -> list[Path]:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if git.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in git.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_is_over_one_megabyte():
    assert [f for f in tracked_files() if f.stat().st_size > 1_000_000] == []


def test_no_path_of_one_machine_is_in_a_file():
    machine = re.compile(r"(?<![\w.])/(home/\w+|root|work|tmp)/\w")
    wrong = []
    for file in tracked_files():
        if file.suffix in {".py", ".pyi", ".cpp", ".h", ".md", ".toml", ".txt", ".cmake", ".json"}:
            wrong += [f"{file}: {m[0]}" for m in machine.finditer(file.read_text())]
    assert wrong == []
