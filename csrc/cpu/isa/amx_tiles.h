#pragma once
#include <cstdint>

#include "../kernels/tiles.h"

// The instructions of AMX. The intrinsics of gcc 12 do not tell it that they read memory, so that
// it may sink a store below the load of a tile.
namespace {

struct AmxTiles {
  static void configure(const fasttps::cpu::TileConfig& config) {
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  static void release() { asm volatile("tilerelease" : : : "memory"); }
  template <int t>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(t));
  }
  template <int t>
  static void load(const void* rows, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(rows), "r"(stride_bytes), "i"(t)
                 : "memory");
  }
  template <int t>
  static void store(void* rows, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(rows), "r"(stride_bytes), "i"(t)
                 : "memory");
  }
  template <int c, int a, int b>
  static void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
  template <int c, int a, int b>
  static void dot_s8u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace
