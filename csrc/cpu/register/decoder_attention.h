#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "../team.h"
#include "decoder_plan.h"

// The attention of a decoder step over its KV caches, by the threads of a team.
namespace fasttps::cpu {

// What the threads share.
struct DecoderAttention {
  DecoderAttention(const DecoderStep& step, int64_t threads);

  const AttentionPlan& plan(const DecoderLayer& layer) const;

  std::vector<std::pair<int64_t, AttentionPlan>> plans;  // one a window
  int64_t padded_dim, rows;                              // query rows of a segment
  int64_t state_floats;  // of a segment: max, sum [rows], out [rows, padded_dim], attended
  std::unique_ptr<float[]> q, k, v;  // [tokens, heads or KV heads, head_dim], before RoPE
  std::unique_ptr<float[]> states;   // a segment each
  std::vector<std::unique_ptr<float[]>> scratch;  // a thread each: query rows, the kernel's own
  // A thread each: weights of the head norms, one head, and all heads of all tokens where a norm
  // is over them; empty without head norms.
  std::vector<std::unique_ptr<float[]>> norms;
};

// The weight of a norm in f32, its offset added.
void load_norm(const DecoderStep& step, const KernelTable& kernels, const NormWeight& norm,
               int64_t count, float* out);

// One thread's part of it.
class AttentionWorker {
 public:
  AttentionWorker(const DecoderStep& step, const KernelTable& kernels, DecoderAttention& shared,
                  const TeamMember& member);

  // Writes this member's new rows to the caches and attends with its segments. All members have
  // written q, k and v.
  void run(const DecoderLayer& layer);

  // out [tokens, num_heads * head_dim]: all heads' outputs, the segments' states merged by
  // (m, l, O) (paper 004). All members have run.
  void merge(const DecoderLayer& layer, float* out);

 private:
  // Rows of q or of k, [tokens, heads, head_dim], on their way through a norm to RoPE.
  struct Heads {
    const float* rows;
    int64_t heads;
    const float* weight;  // null: no norm, or `rows` have passed it
  };
  Heads normalize(const HeadNorm& norm, const float* rows, int64_t heads, float*& room) const;
  void rotate(const DecoderLayer& layer, const Heads& from, int64_t batch, int64_t token,
              int64_t head, float factor, float* out) const;
  void append(const DecoderLayer& layer, const Segment& s);
  void store(const CacheView& cache, const Segment& s, int64_t slot, const float* row);
  char* address(const CacheView& cache, int64_t element) const;
  int64_t group() const { return step_.num_heads / step_.num_kv_heads; }
  // Row r of a segment is token r / group, head kv_head * group + r % group.
  int64_t head_of(const Segment& s, int64_t r) const { return s.kv_head * group() + r % group(); }
  void attend(const DecoderLayer& layer, const Segment& s, float* state);
  float* state(size_t segment) const {
    return shared_.states.get() + static_cast<int64_t>(segment) * shared_.state_floats;
  }
  void merge_row(const Segment* segments, size_t begin, size_t end, int64_t r, float* heads);

  const DecoderStep& step_;
  const KernelTable& kernels_;
  DecoderAttention& shared_;
  const TeamMember& member_;
  float* const scratch_;
  Heads q_{}, k_{};
  float* head_ = nullptr;  // [head_dim]
  std::vector<const float*> part_rows_;
  std::vector<float> part_weights_;
};

}  // namespace fasttps::cpu
