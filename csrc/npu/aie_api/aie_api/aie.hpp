#pragma once
// The part of the AIE API that the tile kernels use, on the host: their results, not their time.
// The core's generation is __AIE_ARCH__: 20 AIE2, 21 AIE2P.
#include "elementary.hpp"
#include "mmul.hpp"
#include "types.hpp"
#include "vector.hpp"
