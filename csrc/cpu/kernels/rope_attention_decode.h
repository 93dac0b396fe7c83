// Included after attention.h. Few query rows: every cache row is read once for all of them, and a
// score is a dot product along head_dim.
namespace fasttps::cpu {
namespace {

// scores[r, j] = query_r . k_j for kRows rows and the keys of a block.
template <class Vec, class Element, int kRows>
void decode_scores(const AttentionTask& task, const KeyBlock& block, int64_t row, float* scores) {
  const float* query = task.query + row * task.padded_dim;
  for (int64_t j = 0; j < block.count; ++j) {
    const auto* k = key_row<Element>(task, block.position + j);
    Vec dot[kRows];
    for (int r = 0; r < kRows; ++r) dot[r] = Vec::set(0.0f);
    for (int64_t d = 0; d < task.head_dim; d += Vec::kLanes) {
      const Vec key = load_up_to<Vec, Element>(k + d, task.head_dim - d);
      for (int r = 0; r < kRows; ++r) {
        dot[r] = fmadd(Vec::load(query + r * task.padded_dim + d), key, dot[r]);
      }
    }
    const float factor = key_scale<Element>(task, block.position + j);
    for (int r = 0; r < kRows; ++r) scores[(row + r) * kKeyBlock + j] = reduce_add(dot[r]) * factor;
  }
}

// Turns the scores of one row into weights 2^(score - max); updates max and sum; returns the factor
// of what was accumulated before.
template <class Vec>
float decode_softmax(const AttentionTask& task, const KeyBlock& block, int64_t row, float* scores) {
  for (int64_t j = block.count; j < kKeyBlock; ++j) scores[j] = kMinusInf;
  if (task.softcap_log2 > 0.0f) {
    for (int64_t j = 0; j < kKeyBlock; j += Vec::kLanes) {
      (Vec::set(task.softcap_log2) * tanh(Vec::load(scores + j))).store(scores + j);
    }
    for (int64_t j = block.count; j < kKeyBlock; ++j) scores[j] = kMinusInf;
  }
  if (block.allowed[row] != block.all) {
    for (int64_t j = 0; j < block.count; ++j) {
      if ((block.allowed[row] >> j & 1) == 0) scores[j] = kMinusInf;
    }
  }
  Vec largest = Vec::set(task.max[row]);
  for (int64_t j = 0; j < kKeyBlock; j += Vec::kLanes) {
    largest = max(Vec::load(scores + j), largest);
  }
  const float new_max = reduce_max(largest);
  const Vec shift = Vec::set(finite_max(new_max));
  Vec sum = Vec::set(0.0f);
  for (int64_t j = 0; j < kKeyBlock; j += Vec::kLanes) {
    const Vec weight = exp2(Vec::load(scores + j) - shift);
    weight.store(scores + j);
    sum = sum + weight;
  }
  const float rescale = first_lane(exp2(Vec::set(task.max[row]) - shift));
  task.sum[row] = task.sum[row] * rescale + reduce_add(sum);
  task.max[row] = new_max;
  return rescale;
}

// out_r[d..] = out_r[d..] * rescale_r + sum_j weights[r, j] v_j[d..] for kRows rows and kVecs
// vectors along head_dim. A weight of a position that its row may not see is 0; with kExcluded such
// a position is left out, so that whatever lies there does not matter.
template <class Vec, class Element, int kRows, int kVecs, bool kExcluded>
void decode_values_at(const AttentionTask& task, const KeyBlock& block, int64_t row, int64_t d,
                      const float* weights, const float* rescale) {
  Vec total[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) total[r][i] = Vec::set(0.0f);
  }
  for (int64_t j = 0; j < block.count; ++j) {
    const auto* v = value_row<Element>(task, block.position + j) + d;
    const float factor = value_scale<Element>(task, block.position + j);
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) {
      value[i] = load_up_to<Vec, Element>(v + i * Vec::kLanes, task.head_dim - d - i * Vec::kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      if (kExcluded && (block.allowed[row + r] >> j & 1) == 0) continue;
      const Vec weight = Vec::set(weights[(row + r) * kKeyBlock + j] * factor);
      for (int i = 0; i < kVecs; ++i) total[r][i] = fmadd(weight, value[i], total[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) {
      float* out = task.out + (row + r) * task.padded_dim + d + i * Vec::kLanes;
      fmadd(Vec::load(out), Vec::set(rescale[row + r]), total[r][i]).store(out);
    }
  }
}

template <class Vec, class Element, int kRows, bool kExcluded>
void decode_values(const AttentionTask& task, const KeyBlock& block, int64_t row,
                   const float* weights, const float* rescale) {
  int64_t d = 0;
  for (; d + 2 * Vec::kLanes <= task.head_dim; d += 2 * Vec::kLanes) {
    decode_values_at<Vec, Element, kRows, 2, kExcluded>(task, block, row, d, weights, rescale);
  }
  for (; d < task.head_dim; d += Vec::kLanes) {
    decode_values_at<Vec, Element, kRows, 1, kExcluded>(task, block, row, d, weights, rescale);
  }
}

template <class Vec, class Element, int kRows>
void decode_block(const AttentionTask& task, const KeyBlock& block, int64_t row) {
  float* weights = task.scratch;
  float rescale[kMaxQueryRows];
  decode_scores<Vec, Element, kRows>(task, block, row, weights);
  for (int64_t r = row; r < row + kRows; ++r) {
    rescale[r] = decode_softmax<Vec>(task, block, r, weights + r * kKeyBlock);
  }
  if (block.partial) {
    decode_values<Vec, Element, kRows, true>(task, block, row, weights, rescale);
  } else {
    decode_values<Vec, Element, kRows, false>(task, block, row, weights, rescale);
  }
}

// See AttentionTask.
template <class Vec, class Element>
void rope_attention_decode(const AttentionTask& task) {
  for (int64_t position = task.begin; position < task.end; position += kKeyBlock) {
    const KeyBlock block = key_block(task, position);
    if (!block.any) continue;
    int64_t row = 0;
    for (; row + 4 <= task.rows; row += 4) decode_block<Vec, Element, 4>(task, block, row);
    switch (task.rows - row) {
      case 3:
        decode_block<Vec, Element, 3>(task, block, row);
        break;
      case 2:
        decode_block<Vec, Element, 2>(task, block, row);
        break;
      case 1:
        decode_block<Vec, Element, 1>(task, block, row);
        break;
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
