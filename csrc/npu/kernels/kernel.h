#pragma once
#include <cstdint>

#include "aie_api/aie.hpp"

// How kernels are declared: with C's names on a core, and on the host as functions of the namespace
// that they are included in.
#ifdef FASTTPS_HOST_KERNELS
#define FASTTPS_KERNEL inline
#else
#define FASTTPS_KERNEL extern "C"
#endif
