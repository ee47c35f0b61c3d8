// Attention that reads paged KV in place.
//
// A block of keys is [head_dim, 16 tokens], and a block of values is [16 tokens, head_dim], so that both
// products have consecutive lanes. The context is cut into spans of 256 tokens, counted from the first
// token. Each span has its own softmax, and the spans are merged in order, weighted by their share of the
// whole (split-KV, Dao et al., "Flash-Decoding", 2023). A row's result depends only on its context. It
// depends neither on other rows nor on the thread that computes a span.
#pragma once
#include <cmath>
#include <type_traits>

#include "abi.h"
#include "vector.h"

namespace ullage {
namespace ULLAGE_ISA {

constexpr int kBlockTokens = 16, kSpan = 256, kRowsTogether = 16;

// Sums that are computed at once: enough of them hide an instruction's latency, and registers hold them.
#if ULLAGE_AVX512
constexpr int kMostQueries = 8, kMostSums = 16;
#else
constexpr int kMostQueries = 4, kMostSums = 12;
#endif

template <Format kFormat>
inline V load_kv(const uint8_t* block, int64_t place) {
  if constexpr (kFormat == kFloat8) return V::float8(block + place);
  if constexpr (kFormat == kBfloat16) return V::bfloat16(reinterpret_cast<const uint16_t*>(block) + place);
  return V::load(reinterpret_cast<const float*>(block) + place);
}

// Prefetches a block's memory. Blocks lie anywhere, so no processor predicts the next one.
inline void prefetch(const uint8_t* block, int64_t size) {
  for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(block + line, 0, 2);
}

struct Cache {
  const uint8_t *keys, *values;  // of one head: [blocks, 16 * head_dim]
  int64_t block_size;            // bytes
  float key_factor, value_factor;  // factors of the stored keys and values
};

// Scores of kRows queries [kRows, head_dim] against kBlocks blocks, [kRows, kSpan] from `scores` on.
template <int kRows, int kBlocks, Format kFormat>
inline void score_blocks(const float* queries, int64_t head_dim, const Cache& cache, const int32_t* blocks,
                         float* scores) {
  constexpr int kVectors = kBlockTokens / V::kWidth;
  const uint8_t* keys[kBlocks];
  V acc[kRows][kBlocks * kVectors];
  for (int b = 0; b < kBlocks; ++b) keys[b] = cache.keys + blocks[b] * cache.block_size;
  ULLAGE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ULLAGE_UNROLL
    for (int v = 0; v < kBlocks * kVectors; ++v) acc[r][v] = V::set(0.0f);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    V query[kRows];
    ULLAGE_UNROLL
    for (int r = 0; r < kRows; ++r) query[r] = V::set(queries[r * head_dim + d]);
    ULLAGE_UNROLL
    for (int v = 0; v < kBlocks * kVectors; ++v) {
      const V key = load_kv<kFormat>(keys[v / kVectors], d * kBlockTokens + v % kVectors * V::kWidth);
      ULLAGE_UNROLL
      for (int r = 0; r < kRows; ++r) acc[r][v] = fma(query[r], key, acc[r][v]);
    }
  }
  ULLAGE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ULLAGE_UNROLL
    for (int v = 0; v < kBlocks * kVectors; ++v) store(scores + r * kSpan + v * V::kWidth, acc[r][v]);
  }
}

// Scores of kRows queries against a span, for as many blocks at once as keep enough sums in flight. The
// first queries of a span prefetch the next keys, and the values that are read afterwards.
template <int kRows, Format kFormat>
inline void score_rows(const float* queries, int64_t head_dim, const Cache& cache, const int32_t* blocks,
                       int tokens, bool is_first, float* scores) {
  constexpr int kFit = kMostSums * V::kWidth / kBlockTokens / kRows;
  constexpr int kBlocks = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  const auto prefetch_from = [&](int first, int count) {
    for (int b = first; is_first && b < first + count; ++b) {
      prefetch(cache.values + blocks[b] * cache.block_size, cache.block_size);
      if ((b + count) * kBlockTokens < tokens) prefetch(cache.keys + blocks[b + count] * cache.block_size, cache.block_size);
    }
  };
  int start = 0;
  for (; start + kBlocks * kBlockTokens <= tokens; start += kBlocks * kBlockTokens) {
    prefetch_from(start / kBlockTokens, kBlocks);
    score_blocks<kRows, kBlocks, kFormat>(queries, head_dim, cache, blocks + start / kBlockTokens, scores + start);
  }
  if constexpr (kBlocks > 2) {
    for (; start + 2 * kBlockTokens <= tokens; start += 2 * kBlockTokens) {
      prefetch_from(start / kBlockTokens, 2);
      score_blocks<kRows, 2, kFormat>(queries, head_dim, cache, blocks + start / kBlockTokens, scores + start);
    }
  }
  for (; start < tokens; start += kBlockTokens) {
    score_blocks<kRows, 1, kFormat>(queries, head_dim, cache, blocks + start / kBlockTokens, scores + start);
  }
}

// Sums of kRows rows of weights [kRows, kSpan] times values, dimensions `d` to d + kVectors vectors.
template <int kRows, int kVectors, Format kFormat>
inline void weigh(const float* weights, const Cache& cache, const int32_t* blocks, int tokens,
                  int64_t head_dim, int64_t d, float* out) {
  V acc[kRows][kVectors];
  ULLAGE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ULLAGE_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = V::set(0.0f);
  }
  for (int start = 0; start < tokens; start += kBlockTokens) {
    const uint8_t* block = cache.values + blocks[start / kBlockTokens] * cache.block_size;
    for (int t = 0; t < kBlockTokens; ++t) {
      V value[kVectors];
      ULLAGE_UNROLL
      for (int v = 0; v < kVectors; ++v) value[v] = load_kv<kFormat>(block, t * head_dim + d + v * V::kWidth);
      ULLAGE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V weight = V::set(weights[r * kSpan + start + t]);
        ULLAGE_UNROLL
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
      }
    }
  }
  ULLAGE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ULLAGE_UNROLL
    for (int v = 0; v < kVectors; ++v) store(out + r * head_dim + d + v * V::kWidth, acc[r][v]);
  }
}

template <int kRows, Format kFormat>
inline void weigh_rows(const float* weights, const Cache& cache, const int32_t* blocks, int tokens,
                       int64_t head_dim, float* out) {
  constexpr int kWide = kMostSums / kRows >= 4 ? 4 : 2;
  int64_t d = 0;
  for (; d + kWide * V::kWidth <= head_dim; d += kWide * V::kWidth) {
    weigh<kRows, kWide, kFormat>(weights, cache, blocks, tokens, head_dim, d, out);
  }
  for (; d < head_dim; d += V::kWidth) weigh<kRows, 1, kFormat>(weights, cache, blocks, tokens, head_dim, d, out);
}

// Calls each(count, first) for all rows, as many at once as kMostQueries.
template <typename Each>
inline void in_runs(int rows, const Each& each) {
  int r = 0;
  if constexpr (kMostQueries == 8) {
    for (; r + 8 <= rows; r += 8) each(std::integral_constant<int, 8>(), r);
  }
  for (; r + 4 <= rows; r += 4) each(std::integral_constant<int, 4>(), r);
  if (rows - r == 3) each(std::integral_constant<int, 3>(), r);
  if (rows - r == 2) each(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) each(std::integral_constant<int, 1>(), r);
}

// Turns one row's scores of the tokens before `end` of a span into weights. Other tokens get 0.
inline void soften(float* scores, int end, int tokens, float* most, float* total) {
  const F none = set1(-INFINITY);
  F peak = none;
  for (int t = 0; t < tokens; t += F::kWidth) peak = max(peak, choose(load(scores + t), none, end - t));
  *most = largest(peak);
  F sums = zero();
  for (int t = 0; t < tokens; t += F::kWidth) {
    const F weight = choose(exp(load(scores + t) - set1(*most)), zero(), end - t);
    store(scores + t, weight);
    sums = sums + weight;
  }
  *total = sum(sums);
}

// The sums of a head's result over some spans. The values are not yet divided by the sum of weights.
struct Partial {
  float most, total;
};

inline void merge(Partial& whole, float* values, Partial part, const float* part_values, int64_t head_dim) {
  if (part.most == -INFINITY) return;
  if (whole.most == -INFINITY) {
    whole = part;
    memcpy(values, part_values, head_dim * sizeof(float));
    return;
  }
  const float most = whole.most > part.most ? whole.most : part.most;
  alignas(64) float factors[F::kWidth];
  store(factors, exp(set1(whole.most - most)));
  const float old_factor = factors[0];
  store(factors, exp(set1(part.most - most)));
  const float new_factor = factors[0];
  whole.most = most;
  whole.total = whole.total * old_factor + part.total * new_factor;
  for (int64_t d = 0; d < head_dim; d += F::kWidth) {
    const F scaled = load(part_values + d) * set1(new_factor);
    store(values + d, fma(load(values + d), set1(old_factor), scaled));
  }
}

inline void finish(Partial whole, const float* values, int64_t head_dim, float factor, float* out) {
  const F scale = set1(factor / whole.total);
  for (int64_t d = 0; d < head_dim; d += F::kWidth) store(out + d, load(values + d) * scale);
}

// Queries [rows, head_dim] of consecutive rows of the step, with `group` heads each, and their context.
struct Queries {
  const float* queries;
  int rows, group;
  int64_t position, head_dim;
  const int32_t* blocks;
  int64_t row;  // first row of the step
};

// Attends to one span of the context, and writes each query's part and values.
template <Format kFormat>
inline void attend_span(const Queries& own, const Cache& cache, int64_t span, float* scores, Partial* parts,
                        float* values) {
  const int64_t begin = span * kSpan, last = own.position + (own.rows - 1) / own.group;
  const int64_t seen = last + 1 - begin < kSpan ? last + 1 - begin : kSpan;
  const int tokens = static_cast<int>((seen + kBlockTokens - 1) / kBlockTokens * kBlockTokens);
  const int32_t* blocks = own.blocks + begin / kBlockTokens;
  in_runs(own.rows, [&](auto count, int r) {
    score_rows<count.value, kFormat>(own.queries + r * own.head_dim, own.head_dim, cache, blocks, tokens,
                                   r == 0, scores + r * kSpan);
  });
  for (int r = 0; r < own.rows; ++r) {
    const int64_t end = own.position + r / own.group + 1 - begin;
    const int seen_by_row = static_cast<int>(end > kSpan ? kSpan : end < 0 ? 0 : end);
    soften(scores + r * kSpan, seen_by_row, tokens, &parts[r].most, &parts[r].total);
  }
  in_runs(own.rows, [&](auto count, int r) {
    weigh_rows<count.value, kFormat>(scores + r * kSpan, cache, blocks, tokens, own.head_dim,
                                   values + r * own.head_dim);
  });
}

inline void attend_span(const Queries& own, const Cache& cache, int64_t format, int64_t span, float* scores,
                        Partial* parts, float* values) {
  if (format == kBfloat16) return attend_span<kBfloat16>(own, cache, span, scores, parts, values);
  if (format == kFloat8) return attend_span<kFloat8>(own, cache, span, scores, parts, values);
  attend_span<kFloat32>(own, cache, span, scores, parts, values);
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
