// fasttps._C: what is not a tensor op. The stubs are python/fasttps/_C.pyi.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <exception>
#include <string>

#include "build_facts.h"
#include "cpu/dispatch.h"
#include "limits.h"
#include "ops/packed_format.h"

namespace py = pybind11;

namespace {

py::dict build_facts() {
  py::dict facts = py::module_::import("json").attr("loads")(fasttps::kBuildFacts);
  facts["torch_headers"] = TORCH_VERSION;
  facts["layout_version"] = fasttps::kPackedLayoutVersion;
  facts["python"] = PY_VERSION;
  return facts;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  // A wrong name of an ISA is a ValueError, whether an argument or FASTTPS_ISA brought it.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's type
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const c10::ValueError& error) {
      py::set_error(PyExc_ValueError, error.what_without_backtrace());
    }
  });

  m.def("isas", &fasttps::cpu::isas, "The instruction sets that this CPU runs, fastest first.");
  m.def("known_isas", &fasttps::cpu::known_isas, "The instruction sets that were built.");
  m.def("missing_features", &fasttps::cpu::missing_features, py::arg("isa"),
        "What this CPU lacks for `isa`; empty if it can run.");
  m.def("active_isa", &fasttps::cpu::active_isa, "The instruction set that the ops use.");
  m.def("use_isa", &fasttps::cpu::use_isa, py::arg("name"), "Make the ops use `name`.");
  auto limits = m.def_submodule("limits", "What this machine can do at most.");
  bind_limits(limits);
  m.def("build_facts", &build_facts, "What this build was made of and for.");
}
