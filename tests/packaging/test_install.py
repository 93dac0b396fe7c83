"""A wheel and `pip install --no-build-isolation .`, each in a clean environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fasttps
from tests.support.environments import Environment, run

USE = """
import json, pathlib, sys
import torch, fasttps

key = torch.ones(1, 1, 2, 16)
k_cache, v_cache = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
fasttps.ops.kv_cache_update_(k_cache, v_cache, key, 2 * key, torch.tensor(3))
means = [c.mean().item() for c in (k_cache[:, :, 3], v_cache[:, :, 3], k_cache)]
cmake = pathlib.Path(fasttps.cmake_prefix_path)
print(json.dumps({
    "file": fasttps.__file__,
    "written": means,
    "transformers": "transformers" in sys.modules,
    "config": (cmake / "fasttps" / "fasttpsConfig.cmake").exists(),
    "version": fasttps.__version__,
    "facts": fasttps._C.build_facts(),
}))
"""


@pytest.fixture(params=["wheel", "source"])
def environment(request) -> Environment:
    return request.getfixturevalue(f"{request.param}_environment")


def test_works_in_a_clean_environment(environment):
    seen = json.loads(environment.run_python(USE))
    assert Path(seen["file"]).is_relative_to(environment.site_packages)
    assert seen["written"] == [1.0, 2.0, 0.125]
    assert seen["config"]
    assert not seen["transformers"], "importing fasttps must not import transformers"


def test_build_facts_are_those_of_this_build(environment):
    seen = json.loads(environment.run_python(USE))
    facts = seen["facts"]
    file = environment.site_packages / "fasttps/lib/build_facts.json"
    written = json.loads(file.read_text())
    assert {key: facts[key] for key in written} == written
    assert facts["fasttps"] == seen["version"]
    assert facts["torch"] == torch.__version__
    assert facts["torch_headers"] == torch.__version__.split("+")[0]
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["layout_version"] == fasttps.ops.LAYOUT_VERSION
    assert facts["cxx_standard"] == 20
    assert facts["compiler"].split()[0] in {"GNU", "Clang"}
    assert "scalar" in facts["isas"]


def test_build_facts_list_the_isas_that_can_be_asked_for(environment):
    code = (
        "import fasttps, json; print(json.dumps([fasttps.isa.known(), fasttps._C.build_facts()]))"
    )
    known, facts = json.loads(environment.run_python(code))
    assert sorted(known) == sorted(facts["isas"])


def test_command_is_installed(environment):
    assert "generate" in run(environment.folder / "bin/fasttps", "--help", cwd=environment.folder)


def test_stubs_of_the_compiled_module_match_it(wheel_environment, tmp_path):
    # As a module of its own: as fasttps._C, mypy would read all of torch for two minutes.
    package = wheel_environment.site_packages / "fasttps"
    shutil.copy(package / "_C.pyi", tmp_path)
    code = "import sys, torch, mypy.stubtest as s; sys.argv = ['s', '_C']; sys.exit(s.main())"
    run(
        wheel_environment.python,
        "-c",
        code,
        cwd=tmp_path,
        MYPYPATH=str(tmp_path),
        PYTHONPATH=str(package),
    )


def test_installing_again_leaves_it_whole(wheel_environment, wheel):
    wheel_environment.pip_install("--no-index", "--force-reinstall", wheel)
    assert json.loads(wheel_environment.run_python(USE))["written"] == [1.0, 2.0, 0.125]


def test_build_isolation_without_torch_says_what_to_do(source_tree, tmp_path):
    # An environment that has setuptools alone, as the one that pip makes for a build.
    environment = Environment.make(tmp_path / "bare")
    for link in environment.site_packages.iterdir():
        if link.name.startswith("torch"):
            link.unlink()
    command = [environment.python, "setup.py", "build_ext"]
    with pytest.raises(AssertionError, match="--no-build-isolation") as failure:
        run(*command, cwd=source_tree, PATH=os.environ["PATH"])
    assert "Traceback" not in str(failure.value)
