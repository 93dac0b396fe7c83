#pragma once
#include <cstdint>

namespace fasttps::cpu {

// Asks for 2 MiB pages for memory that is larger than one and not yet touched: a stream of weights
// then misses the TLB once in 2 MiB. Linux only; elsewhere, and where refused, nothing happens.
void prefer_huge_pages(void* memory, int64_t bytes);

}  // namespace fasttps::cpu
