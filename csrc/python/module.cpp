// fasttps._C: what is not a tensor op. The stubs are python/fasttps/_C.pyi.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <cstdint>
#include <exception>
#include <string>

#include "build_facts.h"
#include "cpu/bf16_product.h"
#include "cpu/dispatch.h"
#include "cpu/huge_pages.h"
#include "limits.h"
#include "module_watch.h"
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
  m.def(
      "bf16_product",
      [] {
        const auto choice = fasttps::cpu::bf16_product_choice();
        return py::make_tuple(fasttps::cpu::name_of(choice.product), choice.origin, choice.known);
      },
      "How bf16 is multiplied, who chose it, and whether that is more than a guess.");
  m.def("bf16_products", &fasttps::cpu::bf16_products, "How this CPU can multiply bf16.");
  m.def("use_bf16_product", &fasttps::cpu::use_bf16_product, py::arg("name"),
        "Multiply bf16 by `name` from now on.");
  m.def("tuned_path", &fasttps::cpu::tuned_path, "The file of `fasttps tune`.");
  m.def(
      "cpu_model",
      [] {
        const auto cpu = fasttps::cpu::cpu_model();
        return py::make_tuple(cpu.vendor, cpu.family, cpu.model);
      },
      "Vendor, family and model.");
  m.def(
      "prefer_huge_pages",
      [](uintptr_t address, int64_t bytes) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): Tensor.data_ptr()
        fasttps::cpu::prefer_huge_pages(reinterpret_cast<void*>(address), bytes);
      },
      py::arg("address"), py::arg("bytes"),
      "Ask for 2 MiB pages for memory that is not yet touched; nothing happens where refused.");
  bind_limits(m);
  bind_module_watch(m);
  m.def("build_facts", &build_facts, "What this build was made of and for.");
}
