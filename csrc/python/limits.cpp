#include "limits.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cpu/limits/ruler.h"

namespace py = pybind11;

void bind_limits(py::module_& m) {
  using fasttps::cpu::ReadBuffer;
  const auto release = py::call_guard<py::gil_scoped_release>();

  // The metaclass of a class that Python knows, as the stubs describe it.
  py::class_<ReadBuffer>(m, "ReadBuffer", py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type)))
      .def(py::init<int64_t, int, bool>(), py::arg("bytes"), py::arg("threads"),
           py::arg("huge_pages"), release)
      .def_property_readonly("bytes", &ReadBuffer::bytes)
      .def("read", &ReadBuffer::read, py::arg("isa"), py::arg("streams"), py::arg("hint"),
           py::arg("prefetch_bytes"), py::arg("sweeps"), release);
  m.def("read_isas", &fasttps::cpu::read_isas);
  m.def("peak_instructions", [] {
    std::vector<std::pair<std::string, std::string>> pairs;
    for (const auto& peak : fasttps::cpu::peak_instructions()) {
      pairs.emplace_back(peak.isa, peak.instruction);
    }
    return pairs;
  });
  m.def("peak_operations_per_s", &fasttps::cpu::peak_operations_per_s, py::arg("instruction"),
        py::arg("threads"), py::arg("seconds"), release);
  m.def("region_seconds", &fasttps::cpu::region_seconds, py::arg("threads"), py::arg("regions"),
        release);
  m.def("barrier_seconds", &fasttps::cpu::barrier_seconds, py::arg("threads"), py::arg("barriers"),
        release);
}
