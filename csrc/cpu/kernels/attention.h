// Included after Vec, math.h and element.h. What the two attention kernels share.
namespace fasttps::cpu {
namespace {

inline constexpr float kMinusInf = -__builtin_inff();

// body(0), ..., body(kCount - 1), without a loop, so that arrays indexed by it stay in registers.
template <int kCount, class Body>
[[gnu::always_inline]] inline void unrolled(const Body& body) {
  if constexpr (kCount > 1) unrolled<kCount - 1>(body);
  body(kCount - 1);
}

// The first float from p on at a multiple of 64 bytes; the scratch has room for it.
inline float* aligned(float* p) {
  constexpr uintptr_t kFloatBytes = sizeof(float);
  return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64 / kFloatBytes;
}

// Bit j: mask[j] is not 0, j < count <= 64. Reads nothing beyond.
inline uint64_t nonzero_bytes(const uint8_t* mask, int64_t stride, int64_t count) {
  uint64_t bits = 0;
  int64_t j = 0;
  for (; stride == 1 && j + 8 <= count; j += 8) {
    uint64_t bytes;
    __builtin_memcpy(&bytes, mask + j, 8);
    constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7f;
    bytes = ((((bytes & kLow7) + kLow7) | bytes) & ~kLow7) >> 7;  // 1 a byte that is not 0
    bits |= bytes * 0x0102040810204080 >> 56 << j;                // byte i to bit i
  }
  for (; j < count; ++j) bits |= uint64_t{mask[j * stride] != 0} << j;
  return bits;
}

// Bit j: row may see position `position` + j, j < count <= kKeyBlock.
inline uint64_t allowed_positions(const AttentionTask& task, int64_t row, int64_t position,
                                  int64_t count) {
  const int64_t from = task.first[row] > position ? task.first[row] - position : 0;
  const int64_t to = task.last[row] < position + count ? task.last[row] - position + 1 : count;
  if (from >= to) return 0;
  uint64_t bits = (~uint64_t{0} >> (64 - (to - from))) << from;
  if (task.mask != nullptr) {
    const uint8_t* mask = task.mask[row] + (position - task.slot_shift) * task.mask_stride;
    bits &= nonzero_bytes(mask + from * task.mask_stride, task.mask_stride, to - from) << from;
  }
  return bits;
}

// The positions of one block, and who may see them.
struct KeyBlock {
  int64_t position;
  int64_t count;
  uint64_t all;                     // `count` ones
  uint64_t seen;                    // by some row
  uint64_t allowed[kMaxQueryRows];  // by row
  bool any;                         // some row sees some position
  bool partial;                     // some row misses some position
  bool alike;                       // all rows see the same positions
};

inline KeyBlock key_block(const AttentionTask& task, int64_t position) {
  KeyBlock block;
  block.position = position;
  block.count = task.end - position < kKeyBlock ? task.end - position : kKeyBlock;
  block.all = ~uint64_t{0} >> (64 - block.count);
  block.seen = 0;
  block.partial = false;
  block.alike = true;
  for (int64_t r = 0; r < task.rows; ++r) {
    block.allowed[r] = allowed_positions(task, r, position, block.count);
    block.seen |= block.allowed[r];
    block.alike &= block.allowed[r] == block.allowed[0];
    block.partial |= block.allowed[r] != block.all;
    task.attended[r] |= block.allowed[r] != 0;
  }
  block.any = block.seen != 0;
  return block;
}

template <class Element>
inline const typename Element::Storage* key_row(const AttentionTask& task, int64_t position) {
  return static_cast<const typename Element::Storage*>(task.k) +
         (position - task.slot_shift) * task.k_stride;
}

template <class Element>
inline const typename Element::Storage* value_row(const AttentionTask& task, int64_t position) {
  return static_cast<const typename Element::Storage*>(task.v) +
         (position - task.slot_shift) * task.v_stride;
}

// The factor of an int8 row; 1 for the other types.
template <class Element>
inline float key_scale(const AttentionTask& task, int64_t position) {
  if constexpr (Element::kScaled) {
    return task.k_scale[(position - task.slot_shift) * task.k_scale_stride];
  }
  return 1.0f;
}

template <class Element>
inline float value_scale(const AttentionTask& task, int64_t position) {
  if constexpr (Element::kScaled) {
    return task.v_scale[(position - task.slot_shift) * task.v_scale_stride];
  }
  return 1.0f;
}

// The maximum to subtract: 0 where nothing finite was seen yet, so that -inf - -inf never happens.
inline float finite_max(float max) { return max == kMinusInf ? 0.0f : max; }

template <class Vec>
inline Vec finite_max(Vec max) {
  return select_less(Vec::set(kMinusInf), max, max, Vec::set(0.0f));
}

}  // namespace
}  // namespace fasttps::cpu
