#include "huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fasttps::cpu {

void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kHugePage = int64_t{2} << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes <= kHugePage) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace fasttps::cpu
