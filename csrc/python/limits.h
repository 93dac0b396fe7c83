#pragma once
#include <pybind11/pybind11.h>

// The ruler of csrc/cpu/limits in fasttps._C; python/fasttps/bench/limits.py is for people.
void bind_limits(pybind11::module_& m);
