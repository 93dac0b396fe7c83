#include "module_watch.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Looks at hundreds of dicts between two tokens: at the modules and parameters of a model, at its
// hooks. None of them is then in a cache of the CPU, so all are fetched ahead, which takes less
// time than one lookup after another.
class ModuleWatch {
 public:
  // entries: (dict, key, value). absent: (dict, key).
  ModuleWatch(const py::iterable& entries, const py::iterable& hooks, const py::iterable& absent) {
    for (const py::handle dict : hooks) hooks_.push_back(dict.cast<py::dict>());
    for (const py::handle entry : entries) {
      auto [dict, key, value] = entry.cast<std::tuple<py::dict, py::str, py::object>>();
      entries_.push_back({std::move(dict), std::move(key), std::move(value)});
    }
    for (const py::handle entry : absent) {
      auto [dict, key] = entry.cast<std::tuple<py::dict, py::str>>();
      const auto size = static_cast<Py_ssize_t>(dict.size());
      absent_.push_back({std::move(dict), std::move(key), size});
    }
  }

  bool is_unchanged() const {
    for (const Entry& entry : entries_) __builtin_prefetch(entry.dict.ptr());
    for (const Absent& entry : absent_) __builtin_prefetch(&as_dict(entry.dict)->ma_used);
    for (const Entry& entry : entries_) {
      const char* keys = reinterpret_cast<const char*>(as_dict(entry.dict)->ma_keys);
      __builtin_prefetch(keys);
      __builtin_prefetch(keys + 64);
      __builtin_prefetch(entry.key.ptr());
    }
    for (const Entry& entry : entries_) {
      PyObject* found = PyDict_GetItemWithError(entry.dict.ptr(), entry.key.ptr());
      if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (found != entry.value.ptr()) return false;
    }
    for (const Absent& entry : absent_) {
      // A key that came made the dict larger, unless others went at the same time.
      const Py_ssize_t size = as_dict(entry.dict)->ma_used;
      if (size == entry.size) continue;
      if (entry.dict.contains(entry.key)) return false;
      entry.size = size;
    }
    return true;
  }

  bool has_hooks() const {
    for (const py::dict& dict : hooks_) __builtin_prefetch(&as_dict(dict)->ma_used);
    return std::any_of(hooks_.begin(), hooks_.end(),
                       [](const py::dict& dict) { return as_dict(dict)->ma_used != 0; });
  }

 private:
  struct Entry {
    py::dict dict;
    py::str key;
    py::object value;
  };
  struct Absent {
    py::dict dict;
    py::str key;
    mutable Py_ssize_t size;  // of the dict, when it was last seen without the key
  };
  static const PyDictObject* as_dict(const py::dict& dict) {
    return reinterpret_cast<const PyDictObject*>(dict.ptr());
  }
  std::vector<Entry> entries_;
  std::vector<Absent> absent_;
  std::vector<py::dict> hooks_;
};

}  // namespace

void bind_module_watch(py::module_& m) {
  py::class_<ModuleWatch>(m, "ModuleWatch",
                          py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type)))
      .def(py::init<py::iterable, py::iterable, py::iterable>(), py::arg("entries"),
           py::arg("hooks") = py::tuple(), py::arg("absent") = py::tuple())
      .def("is_unchanged", &ModuleWatch::is_unchanged,
           "Whether each dict still holds, under each key, the very value that was given for it, "
           "and nothing under the keys that are to be absent.")
      .def("has_hooks", &ModuleWatch::has_hooks,
           "Whether one of the dicts `hooks` holds something.");
}
