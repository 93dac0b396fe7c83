#pragma once
#include "device.h"

namespace fasttps::npu {

// One call of a design from the host's side: what the array reads is synced to it, what it has
// written is synced back. Arguments that are both (a cache) stay where they are: who fills or reads
// one on the host syncs it.
// Ids of the syncs: <program>.<argument>.to_device and .from_device.
void call(Design& design, const Program& program, std::span<Buffer* const> arguments,
          std::span<const int64_t> scalars);

}  // namespace fasttps::npu
