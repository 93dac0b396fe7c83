#pragma once
#include <pybind11/pybind11.h>

void bind_module_watch(pybind11::module_& m);
