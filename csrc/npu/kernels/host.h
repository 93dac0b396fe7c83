#pragma once
#define FASTTPS_HOST_KERNELS
#include <cstdint>

#include "aie_api/aie.hpp"

// The kernels as functions of the host.
namespace fasttps::npu::host {
#include "attention.cc"
#include "matvec.cc"
#include "prefill.cc"
}  // namespace fasttps::npu::host
