// Choosing a token from a row of logits, by the rules of `ullage_engine.runner.sampler`. A row's token
// depends on the row and its parameters alone: one thread computes it, in a fixed order.
#pragma once
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "vector.h"

namespace ullage {
namespace ULLAGE_ISA {

constexpr int kBlocksOfRow = 256;  // whose sums are kept, to find where a draw falls
constexpr int kCandidates = 2048;  // likeliest tokens that are sorted; more are left to the caller

// The likeliest token, the first of equals; `most` is its logit.
inline int32_t first_of(const float* logits, int64_t vocab, float most) {
  return static_cast<int32_t>(std::find(logits, logits + vocab, most) - logits);
}

// The likeliest token, the first of equals; -1 where a logit is not a finite number.
inline int32_t likeliest(const float* logits, int64_t vocab) {
  F most = load(logits), spoilt = zero();
  for (int64_t k = 0; k < vocab; k += F::kWidth) {
    const F v = load(logits + k);
    most = max(most, v);
    spoilt = fma(v, zero(), spoilt);  // 0, or not a number
  }
  return sum(spoilt) == 0.0f ? first_of(logits, vocab, largest(most)) : -1;
}

// A row's probabilities up to a factor, exp((logit - greatest) / temperature): the likeliest has 1.
class Weights {
 public:
  Weights(const float* logits, int64_t vocab, float most, double temperature)
      : logits_(logits), vocab_(vocab), greatest_(set1(most)) {
    scale_ = set1(static_cast<float>(1.0 / std::max(temperature, 1e-30)));
    block_ = (vocab + kBlocksOfRow * F::kWidth - 1) / (kBlocksOfRow * F::kWidth) * F::kWidth;
    for (int64_t start = 0, b = 0; start < vocab; start += block_, ++b) {
      F sums = zero();
      for (int64_t k = start; k < std::min(vocab, start + block_); k += F::kWidth) sums = sums + at(k);
      total_ += sum(sums);
      running_[b] = total_;
    }
  }

  double total() const { return total_; }

  // Logarithms of the weights of tokens k to k + F::kWidth.
  F powers(int64_t k) const { return (load(logits_ + k) - greatest_) * scale_; }

  // The weights; far below the likeliest they are 0, where exp gives e^-87.
  F at(int64_t k) const {
    const F power = powers(k);
    return above(power, set1(-86.0f), exp(power));
  }

  // The first token, by id, whose weights from the first on exceed a share of all.
  int32_t draw(double noise) const {
    const double target = noise * total_;
    int64_t b = 0;
    while ((b + 1) * block_ < vocab_ && !(running_[b] > target)) ++b;
    double running = b > 0 ? running_[b - 1] : 0.0;
    int64_t last = 0;
    for (int64_t k = b * block_; k < std::min(vocab_, (b + 1) * block_); k += F::kWidth) {
      alignas(64) float weights[F::kWidth];
      store(weights, at(k));
      for (int i = 0; i < F::kWidth; ++i) {
        running += weights[i];
        if (running > target) return static_cast<int32_t>(k + i);
        if (weights[i] > 0.0f) last = k + i;
      }
    }
    return static_cast<int32_t>(last);  // sums of another order may end a little lower
  }

  // Calls each(id, weight) for every token whose weight is at least e^power, until it returns false.
  template <typename Each>
  void over(float power, const Each& each) const {
    for (int64_t k = 0; k < vocab_; k += F::kWidth) {
      const F found = powers(k);
      if (largest(found) < power) continue;
      alignas(64) float weights[F::kWidth], own[F::kWidth];
      store(weights, at(k));
      store(own, found);
      for (int i = 0; i < F::kWidth; ++i) {
        if (own[i] >= power && !each(static_cast<int32_t>(k + i), weights[i])) return;
      }
    }
  }

 private:
  const float* logits_;
  int64_t vocab_, block_;
  F greatest_, scale_;
  double total_ = 0.0, running_[kBlocksOfRow];
};

struct Candidate {
  float weight, logit;
  int32_t id;
};

// Chooses by the filters of a draw; -1: more tokens than `kCandidates` would have to be sorted.
inline int32_t draw_filtered(const Weights& weights, const float* logits, const Draw& draw) {
  Candidate candidates[kCandidates];
  const bool is_limited = draw.top_k > 0, is_nucleus = draw.top_p < 1.0;
  const float min_p = static_cast<float>(draw.min_p);
  int count = 0;
  // All tokens down to a weight are gathered, and then those of less, until what is kept is among them.
  for (float power = -4.6f;; power -= 2.3f) {
    if (power < -80.0f) return -1;
    bool fits = true;
    double mass = 0.0;
    count = 0;
    weights.over(power, [&](int32_t id, float weight) {
      fits = count < kCandidates;
      if (fits) candidates[count++] = {weight, logits[id], id}, mass += weight;
      return fits;
    });
    if (!fits) return -1;
    if (is_limited && count >= draw.top_k) break;
    if (is_limited && is_nucleus) continue;  // the nucleus is a share of what top-k keeps
    if (is_nucleus && mass >= draw.top_p * weights.total()) break;
    if (min_p > 0.0f && std::log(min_p) > power + 0.01f) break;
  }
  std::sort(candidates, candidates + count, [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
  if (is_limited && draw.top_k < count) count = static_cast<int>(draw.top_k);
  double all = is_limited ? 0.0 : weights.total();
  for (int i = 0; is_limited && i < count; ++i) all += candidates[i].weight;
  double kept = 0.0;
  int end = 0;
  for (; end < count; kept += candidates[end++].weight) {
    const bool is_kept = (!is_nucleus || kept < draw.top_p * all) && candidates[end].weight >= min_p;
    if (end > 0 && !is_kept) break;
  }
  const double target = draw.noise * kept;
  double running = 0.0;
  for (int i = 0; i < end; ++i) {
    running += candidates[i].weight;
    if (running > target) return candidates[i].id;
  }
  return candidates[end - 1].id;
}

inline int32_t choose(const float* logits, int64_t vocab, const Draw& draw) {
  F most = load(logits);
  for (int64_t k = 0; k < vocab; k += F::kWidth) most = max(most, load(logits + k));
  const float greatest = largest(most);
  if (!(greatest > -INFINITY)) return -1;  // no token is allowed
  if (draw.temperature == 0.0 || draw.top_k == 1) return first_of(logits, vocab, greatest);
  const Weights weights(logits, vocab, greatest, draw.temperature);
  const bool is_filtered = draw.top_k > 0 || draw.top_p < 1.0 || draw.min_p > 0.0;
  return is_filtered ? draw_filtered(weights, logits, draw) : weights.draw(draw.noise);
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
