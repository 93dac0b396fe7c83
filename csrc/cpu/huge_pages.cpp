#include "huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fasttps::cpu {

void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kHugePage = int64_t{2} << 20;
  constexpr int64_t kPage = 4096;
  if (bytes <= kHugePage) return;
  const auto into_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory) % kPage);
  const int64_t skip = (kPage - into_page) % kPage;  // to the first whole page
  const int64_t whole = (bytes - skip) / kPage * kPage;
  madvise(static_cast<char*>(memory) + skip, static_cast<size_t>(whole), MADV_HUGEPAGE);
#endif
}

}  // namespace fasttps::cpu
