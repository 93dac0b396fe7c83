#include "isa_list.h"

#ifdef FASTTPS_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace fasttps::cpu {

std::span<const KernelTable* const> kernel_tables() {
  static const KernelTable* const tables[] = {
#ifdef FASTTPS_X86
      &kAvx512AmxKernels, &kAvx512Bf16Kernels, &kAvx512Kernels, &kAvx2Kernels,
#endif
      &kScalarKernels,
  };
  return tables;
}

#ifdef FASTTPS_X86
namespace {

// g++ 12 knows no name for it in __builtin_cpu_supports. CPUID leaf 7, EDX bit 23; the wide
// registers are saved where AVX-512 may be used at all.
bool has_avx512fp16(uint32_t bits) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return (bits & kAvx512fBit) != 0 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx >> 23 & 1) != 0;
}

// XCR0, the state that the operating system saves; 0 if it does not say.
uint64_t saved_state() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kOsxsave = 1u << 27;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) return 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return static_cast<uint64_t>(edx) << 32 | eax;
}

// Linux gives tile data to a process that asks for it; the threads of the process have it then.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

uint32_t usable_amx_features() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return 0;
  const uint32_t bits = amx_features(edx, saved_state());
  return bits != 0 && may_use_tiles() ? bits : 0;
}

}  // namespace
#endif

uint32_t amx_features(uint32_t leaf7_edx, uint64_t xcr0) {
  constexpr uint64_t kTileConfigAndData = uint64_t{3} << 17;
  if ((xcr0 & kTileConfigAndData) != kTileConfigAndData || (leaf7_edx >> 24 & 1) == 0) return 0;
  return kAmxTileBit | ((leaf7_edx >> 22 & 1) != 0 ? kAmxBf16Bit : 0u) |
         ((leaf7_edx >> 25 & 1) != 0 ? kAmxInt8Bit : 0u);
}

uint32_t cpu_features() {
  uint32_t bits = 0;
#ifdef FASTTPS_X86
  // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
  if (__builtin_cpu_supports("avx2")) bits |= kAvx2Bit;
  if (__builtin_cpu_supports("fma")) bits |= kFmaBit;
  if (__builtin_cpu_supports("f16c")) bits |= kF16cBit;
  if (__builtin_cpu_supports("avx512f")) bits |= kAvx512fBit;
  if (__builtin_cpu_supports("avx512bw")) bits |= kAvx512bwBit;
  if (__builtin_cpu_supports("avx512dq")) bits |= kAvx512dqBit;
  if (__builtin_cpu_supports("avx512vl")) bits |= kAvx512vlBit;
  if (__builtin_cpu_supports("avx512bf16")) bits |= kAvx512Bf16Bit;
  if (__builtin_cpu_supports("avx512vnni")) bits |= kAvx512VnniBit;
  if (has_avx512fp16(bits)) bits |= kAvx512Fp16Bit;
  static const uint32_t amx = usable_amx_features();
  bits |= amx;
#endif
  return bits;
}

uint32_t missing_feature_bits(const KernelTable& table) {
  return table.required_features & ~cpu_features();
}

const char* feature_name(CpuFeature bit) {
  switch (bit) {
    case kAvx2Bit:
      return "avx2";
    case kFmaBit:
      return "fma";
    case kF16cBit:
      return "f16c";
    case kAvx512fBit:
      return "avx512f";
    case kAvx512bwBit:
      return "avx512bw";
    case kAvx512dqBit:
      return "avx512dq";
    case kAvx512vlBit:
      return "avx512vl";
    case kAvx512Bf16Bit:
      return "avx512_bf16";
    case kAvx512VnniBit:
      return "avx512_vnni";
    case kAvx512Fp16Bit:
      return "avx512_fp16";
    case kAmxTileBit:
      return "amx_tile";
    case kAmxBf16Bit:
      return "amx_bf16";
    case kAmxInt8Bit:
      return "amx_int8";
  }
  return "unknown";
}

bool is_proven(const KernelTable& table) { return (table.required_features & kAmxTileBit) == 0; }

}  // namespace fasttps::cpu
