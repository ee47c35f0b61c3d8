// Sampling of a token from a row of logits, by the rules of `ullage_engine.runner.sampler`. A row's token
// depends only on the row and its parameters, since one thread computes it in a fixed order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "abi.h"
#include "vector.h"

namespace ullage {
namespace ULLAGE_ISA {

constexpr int kBlocksOfRow = 256;  // blocks whose running sums are kept, to find the place of a draw
constexpr int kCandidates = 2048;  // tokens that can be sorted without allocating memory
// Tokens that a filter may keep are gathered down to e^kFirstPower of the likeliest token's weight, then a
// step further down, then twice that step, and so on. A token at kLeastPower or below has no weight.
constexpr float kFirstPower = -4.6f, kPowerStep = 2.3f, kLeastPower = -86.0f;

// The likeliest token, the first of equals, whose logit is `most`.
inline int32_t first_of(const float* logits, int64_t vocab, float most) {
  return static_cast<int32_t>(std::find(logits, logits + vocab, most) - logits);
}

// The likeliest token, the first of equals, or -1 if a logit is not finite.
inline int32_t likeliest(const float* logits, int64_t vocab) {
  F most = load(logits), spoilt = zero();
  for (int64_t k = 0; k < vocab; k += F::kWidth) {
    const F v = load(logits + k);
    most = max(most, v);
    spoilt = fma(v, zero(), spoilt);  // 0, or NaN if any logit is not finite
  }
  return sum(spoilt) == 0.0f ? first_of(logits, vocab, largest(most)) : -1;
}

// A row's probabilities up to a factor: exp((logit - greatest) / temperature). The likeliest token has 1.
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

  // The logarithms of the weights of tokens k to k + F::kWidth.
  F powers(int64_t k) const { return (load(logits_ + k) - greatest_) * scale_; }

  // The weights. Far below the likeliest token they are 0, where exp gives e^-87.
  F at(int64_t k) const {
    const F power = powers(k);
    return above(power, set1(kLeastPower), exp(power));
  }

  // The first token, by id, at which the running sum of weights exceeds the share `noise` of their total.
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
    return static_cast<int32_t>(last);  // this sum has another order, so it may end slightly lower
  }

  // Calls each(id, weight) for every token with a weight of at least e^power, until it returns false.
  template <typename Each>
  void over(float power, const Each& each) const {
    for (int64_t k = 0; k < vocab_; k += F::kWidth) {
      const F found = powers(k);
      if (largest(found) < power) continue;
      alignas(64) float weights[F::kWidth], own[F::kWidth];
      store(weights, at(k));
      store(own, found);
      for (int i = 0; i < F::kWidth; ++i) {
        if (own[i] >= power && weights[i] > 0.0f && !each(static_cast<int32_t>(k + i), weights[i])) return;
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

// Tokens to sort, up to a row's vocabulary. Memory is only allocated for more than kCandidates.
class Candidates {
 public:
  explicit Candidates(int64_t vocab) : vocab_(vocab) {}
  ~Candidates() { free(more_); }
  Candidates(const Candidates&) = delete;

  void clear() { count_ = 0; }

  // Adds a token. Returns false if there is no memory.
  bool add(Candidate candidate) {
    if (count_ == kCandidates && more_ == nullptr) {
      more_ = static_cast<Candidate*>(malloc(vocab_ * sizeof(Candidate)));
      if (more_ == nullptr) return false;
      memcpy(more_, few_, sizeof few_);
    }
    begin()[count_++] = candidate;
    return true;
  }

  int64_t count() const { return count_; }
  Candidate* begin() { return more_ == nullptr ? few_ : more_; }

 private:
  int64_t vocab_, count_ = 0;
  Candidate few_[kCandidates], *more_ = nullptr;
};

// Gathers all tokens down to a weight, and lowers that weight until the tokens include all that the
// filters keep, or no token is left. Returns false if there is no memory.
inline bool gather(const Weights& weights, const float* logits, const Draw& draw, Candidates& candidates) {
  const bool is_limited = draw.top_k > 0, is_nucleus = draw.top_p < 1.0;
  float power = kFirstPower;
  for (float step = kPowerStep;; step *= 2.0f) {
    bool has_memory = true;
    double mass = 0.0;
    candidates.clear();
    weights.over(power, [&](int32_t id, float weight) {
      mass += weight;
      return has_memory = candidates.add({weight, logits[id], id});
    });
    if (!has_memory) return false;
    if (power <= kLeastPower || (is_limited && candidates.count() >= draw.top_k)) return true;
    // The nucleus is a share of the mass that top-k keeps, so all tokens of top-k must be gathered.
    if (!is_limited && is_nucleus && mass >= draw.top_p * weights.total()) return true;
    if (!(is_limited && is_nucleus) && draw.min_p > 0.0 && std::log(draw.min_p) > power + 0.01) return true;
    power = std::max(power - step, kLeastPower);
  }
}

// Chooses a token with the filters of a draw.
inline int32_t draw_filtered(const Weights& weights, const float* logits, int64_t vocab, const Draw& draw) {
  Candidates candidates(vocab);
  if (!gather(weights, logits, draw, candidates)) return kNoMemory;
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  };
  Candidate* const first = candidates.begin();
  int64_t count = candidates.count();
  const bool is_limited = draw.top_k > 0, is_nucleus = draw.top_p < 1.0;
  const float min_p = static_cast<float>(draw.min_p);
  if (is_limited && draw.top_k < count) {
    std::nth_element(first, first + draw.top_k, first + count, is_before);
    count = draw.top_k;
  }
  std::sort(first, first + count, is_before);
  double all = is_limited ? 0.0 : weights.total();
  for (int64_t i = 0; is_limited && i < count; ++i) all += first[i].weight;
  double kept = 0.0;
  int64_t end = 0;
  for (; end < count; kept += first[end++].weight) {
    const bool is_kept = (!is_nucleus || kept < draw.top_p * all) && first[end].weight >= min_p;
    if (end > 0 && !is_kept) break;
  }
  const double target = draw.noise * kept;
  double running = 0.0;
  for (int64_t i = 0; i < end; ++i) {
    running += first[i].weight;
    if (running > target) return first[i].id;
  }
  return first[end - 1].id;
}

inline float greatest_of(const float* logits, int64_t vocab) {
  F most = load(logits);
  for (int64_t k = 0; k < vocab; k += F::kWidth) most = max(most, load(logits + k));
  return largest(most);
}

inline int32_t choose(const float* logits, int64_t vocab, const Draw& draw) {
  const float greatest = greatest_of(logits, vocab);
  if (!(greatest > -INFINITY)) return kNothingAllowed;
  if (draw.temperature == 0.0 || draw.top_k == 1) return first_of(logits, vocab, greatest);
  const Weights weights(logits, vocab, greatest, draw.temperature);
  const bool is_filtered = draw.top_k > 0 || draw.top_p < 1.0 || draw.min_p > 0.0;
  return is_filtered ? draw_filtered(weights, logits, vocab, draw) : weights.draw(draw.noise);
}

// The natural logarithm of a number of at least 1: 2 artanh((m - 1) / (m + 1)) for the mantissa m. The
// logarithms of C libraries may differ in the last bit.
inline double natural_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double mantissa;
  memcpy(&mantissa, &bits, 8);
  if (mantissa > 1.4142135623730951) mantissa *= 0.5, ++exponent;
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  double series = 0.0;
  for (int n = 21; n >= 1; n -= 2) series = series * square + 1.0 / n;  // 0.03^11 is beyond a double
  return static_cast<double>(exponent) * 0.69314718055994531 + 2.0 * s * series;
}

// The logarithm of a row's sum of exp(logit - greatest).
inline float log_mass(const float* logits, int64_t vocab) {
  return static_cast<float>(natural_log(Weights(logits, vocab, greatest_of(logits, vocab), 1.0).total()));
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
