// A mixture of experts: the choice of each token's experts, and the order of the rows.
//
// A pair is a token and one of its experts. Pairs are sorted by expert, so that each expert multiplies
// all its rows at once. These rows are a run, which is rounded and laid out as if it were alone.
#pragma once
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "vector.h"

namespace ullage {
namespace ULLAGE_ISA {

constexpr float kSigmoidEps = 1e-6f;  // LFM2 adds it to the sum by which weights are divided

inline float dot(const float* a, const float* b, int64_t columns) {
  F total = zero();
  for (int64_t k = 0; k < columns; k += F::kWidth) total = fma(load(a + k), load(b + k), total);
  return sum(total);
}

// Chooses a row's experts, best first, and their weights as LFM2 does: experts are ranked by sigmoid +
// bias, and weighted by their sigmoids. `scores` has room for two numbers of each expert and one more
// vector. A NaN is chosen first, so that it shows in the result.
inline void choose_experts(const Model& model, const Layer& layer, const float* row, float* scores,
                           int32_t* chosen, float* weights) {
  const int64_t count = model.num_experts, chosen_count = model.experts_per_token;
  float* ranks = scores + count + F::kWidth;
  for (int64_t e = 0; e < count; ++e) scores[e] = dot(layer.router + e * model.hidden, row, model.hidden);
  for (int64_t e = 0; e < count; e += F::kWidth) {
    store(scores + e, set1(1.0f) / (set1(1.0f) + exp(zero() - load(scores + e))));
  }
  for (int64_t e = 0; e < count; ++e) ranks[e] = scores[e] + layer.router_bias[e];
  float total = kSigmoidEps;
  for (int64_t j = 0; j < chosen_count; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      const bool is_taken = std::find(chosen, chosen + j, e) != chosen + j;
      if (!is_taken && (best < 0 || ranks[e] > ranks[best] || std::isnan(ranks[e]))) best = e;
    }
    chosen[j] = static_cast<int32_t>(best);
    weights[j] = scores[best];
    total += weights[j];
  }
  const float scale = static_cast<float>(model.expert_scale);
  for (int64_t j = 0; j < chosen_count; ++j) weights[j] *= model.is_normalised ? scale / total : scale;
}

// All or some rows of one expert, which are multiplied together.
struct Block {
  int32_t expert, start, end;  // start and end among the sorted pairs
};

// The pairs of some rows. The memory has 6 numbers for each pair, one for each expert, and one more.
class Pairs {
 public:
  Pairs(int32_t* memory, int64_t most, int64_t experts)
      : chosen_(memory), order_(memory + most), places_(memory + 2 * most),
        blocks_(reinterpret_cast<Block*>(memory + 3 * most)), starts_(memory + 6 * most), experts_(experts) {}

  // The expert of each pair, row by row. The caller fills it before `sort`.
  int32_t* chosen() const { return chosen_; }

  // Sorts pairs by expert and row, and cuts runs into blocks of at most `most_rows` rows.
  void sort(int64_t count, int64_t most_rows) {
    std::fill(starts_, starts_ + experts_ + 1, 0);
    for (int64_t pair = 0; pair < count; ++pair) ++starts_[chosen_[pair] + 1];
    num_blocks_ = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      const int64_t end = starts_[e + 1] += starts_[e];
      for (int64_t start = starts_[e]; start < end; start += most_rows) {
        blocks_[num_blocks_++] = {static_cast<int32_t>(e), static_cast<int32_t>(start),
                                  static_cast<int32_t>(std::min(end, start + most_rows))};
      }
    }
    for (int64_t pair = 0; pair < count; ++pair) {
      const int32_t place = starts_[chosen_[pair]]++;
      places_[pair] = place;
      order_[place] = static_cast<int32_t>(pair);
    }
    std::copy_backward(starts_, starts_ + experts_, starts_ + experts_ + 1);  // ends became starts
    starts_[0] = 0;
  }

  int64_t num_blocks() const { return num_blocks_; }
  const Block& block(int64_t index) const { return blocks_[index]; }
  int64_t pair_at(int64_t place) const { return order_[place]; }
  int64_t place_of(int64_t pair) const { return places_[pair]; }
  // The first place of an expert's run, and the first place after it.
  int64_t start(int64_t expert) const { return starts_[expert]; }
  int64_t end(int64_t expert) const { return starts_[expert + 1]; }

 private:
  int32_t *chosen_, *order_, *places_;
  Block* blocks_;
  int32_t* starts_;
  int64_t experts_, num_blocks_ = 0;
};

}  // namespace ULLAGE_ISA
}  // namespace ullage
