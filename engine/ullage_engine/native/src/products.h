// Products of rows with matrices in tiles of 16 rows.
//
// Rows are rounded to int8 with a scale for each group of columns, as in llama.cpp's Q8_1. Codes are
// unsigned. A group's products are summed exactly, as integers, and then
//
//     out += row_scale * (code_scale * sum(code * rounded) + minimum * sum(rounded))
//
// group by group in order, so that a row's result depends only on the row.
//
// Rounded rows lie in blocks of kMostRows rows. The last block may have fewer. A block has four columns of
// each row, then the next four columns, so that one address serves all rows of the block.
#pragma once
#include "abi.h"
#include "vector.h"

namespace ullage {
namespace ULLAGE_ISA {

constexpr int kTileRows = 16;  // rows of a tile

inline int64_t code_bytes(const Matrix& m) { return m.format == kInt4 ? m.group * 8 : m.group * 16; }
inline int64_t block_bytes(const Matrix& m) { return code_bytes(m) + 2 * kTileRows * 2; }

inline const uint8_t* tile_of(const Matrix& m, int64_t tile) {
  return m.data + tile * (m.columns / m.group) * block_bytes(m);
}

// Rows that are multiplied at once, limited by the registers for their sums. Results do not depend on it.
#if ULLAGE_AVX512
constexpr int kMostRows = 12;
#elif ULLAGE_PORTABLE
constexpr int kMostRows = 3;
#else
constexpr int kMostRows = 8;
#endif

constexpr int kParts = kTileRows / V::kWidth;  // registers for the rows of a tile

// Rounded rows of inputs.
struct Inputs {
  const int8_t* rounded;
  const float *scales, *sums;
  int64_t num_rows, columns, groups;
};

// Rounds a row of `num_rows` to int8: scale = largest / 127 of each group.
template <int kGroup>
inline void round_row(const float* x, int64_t row, int64_t num_rows, int64_t columns, int8_t* rounded,
                      float* scales, float* sums) {
  constexpr int n = kGroup / F::kWidth;
  const int64_t first = row / kMostRows * kMostRows, groups = columns / kGroup;
  const int64_t stride = num_rows - first < kMostRows ? num_rows - first : kMostRows;
  rounded += first * columns + (row - first) * 4;
  scales += first * groups + row - first;
  sums += first * groups + row - first;
  alignas(64) int8_t codes[kGroup];
  for (int64_t start = 0; start < columns; start += kGroup, x += kGroup) {
    F v[n], most = zero();
    for (int i = 0; i < n; ++i) {
      v[i] = load(x + i * F::kWidth);
      most = max(most, abs(v[i]));
    }
    const float limit = largest(most);
    const float scale = limit / 127.0f;
    const F inverse = set1(limit > 1e-30f ? 127.0f / limit : 0.0f);  // smaller numbers have no inverse
    F total = zero();
    for (int i = 0; i < n; ++i) {
      const F nearest = round(v[i] * inverse);
      store_int8(codes + i * F::kWidth, nearest);
      total = total + nearest;
    }
    for (int k = 0; k < kGroup; k += 4, rounded += 4 * stride) memcpy(rounded, codes + k, 4);
    *scales = scale;
    *sums = scale * sum(total);
    scales += stride;
    sums += stride;
  }
}

inline int32_t four_codes(const int8_t* p) {
  int32_t bits;
  memcpy(&bits, p, 4);
  return bits;
}

// The sums of one group. Lanes are rows of the tile, from part `part` on.
template <int kRows, int kLanes, bool kNibbles, int kGroup>
struct Sums {
#if ULLAGE_AVX512
  __m512i total[kRows];
  ULLAGE_INLINE void add(const uint8_t* codes, int, const int8_t* x) {
    const __m512i low = _mm512_set1_epi8(15);
    ULLAGE_UNROLL
    for (int m = 0; m < kRows; ++m) total[m] = _mm512_setzero_si512();
    if constexpr (kNibbles) {
      ULLAGE_UNROLL
      for (int j = 0; j < kGroup / 8; ++j) {
        const __m512i both = _mm512_loadu_si512(codes + j * 64);
        const __m512i first = _mm512_and_si512(both, low);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        ULLAGE_UNROLL
        for (int m = 0; m < kRows; ++m) {
          const int8_t* row = x + 4 * (j * kRows + m);
          const int8_t* other = row + kRows * kGroup / 2;
          total[m] = _mm512_dpbusd_epi32(total[m], first, _mm512_set1_epi32(four_codes(row)));
          total[m] = _mm512_dpbusd_epi32(total[m], second, _mm512_set1_epi32(four_codes(other)));
        }
      }
    } else {
      ULLAGE_UNROLL
      for (int j = 0; j < kGroup / 4; ++j) {
        const __m512i code = _mm512_loadu_si512(codes + j * 64);
        ULLAGE_UNROLL
        for (int m = 0; m < kRows; ++m) {
          const int8_t* row = x + 4 * (j * kRows + m);
          total[m] = _mm512_dpbusd_epi32(total[m], code, _mm512_set1_epi32(four_codes(row)));
        }
      }
    }
  }
  ULLAGE_INLINE V of(int m, int) const { return {_mm512_cvtepi32_ps(total[m])}; }
#elif ULLAGE_PORTABLE
  int32_t total[kRows][kTileRows];
  ULLAGE_INLINE void add(const uint8_t* codes, int, const int8_t* x) {
    memset(total, 0, sizeof total);
    for (int m = 0; m < kRows; ++m) {
      for (int k = 0; k < (kNibbles ? kGroup / 2 : kGroup); ++k) {
        const int8_t* place = x + 4 * (k / 4 * kRows + m) + k % 4;
        const int32_t first = place[0], second = kNibbles ? place[kRows * kGroup / 2] : 0;
        for (int lane = 0; lane < kTileRows; ++lane) {
          const uint8_t code = codes[k / 4 * 64 + lane * 4 + k % 4];
          total[m][lane] += kNibbles ? (code & 15) * first + (code >> 4) * second : code * first;
        }
      }
    }
  }
  ULLAGE_INLINE V of(int m, int) const { return V::of([&](int lane) { return static_cast<float>(total[m][lane]); }); }
#else
  // 16 bits hold the sum of eight pairs of products with codes up to 15: 8 * 2 * 15 * 127 < 2^15. A code
  // of eight bits is computed as two codes of four.
  __m256i low_sum[kRows][kLanes], high_sum[kNibbles ? 1 : kRows][kLanes];
  ULLAGE_INLINE void add(const uint8_t* codes, int part, const int8_t* x) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int m = 0; m < kRows; ++m) {
      for (int h = 0; h < kLanes; ++h) {
        low_sum[m][h] = _mm256_setzero_si256();
        if constexpr (!kNibbles) high_sum[m][h] = _mm256_setzero_si256();
      }
    }
#pragma GCC unroll 1
    for (int j = 0; j < (kNibbles ? kGroup / 8 : kGroup / 4); ++j) {
      for (int h = 0; h < kLanes; ++h) {
        const void* place = codes + j * 64 + (part + h) * 32;
        const __m256i both = _mm256_loadu_si256(static_cast<const __m256i*>(place));
        const __m256i first = _mm256_and_si256(both, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int m = 0; m < kRows; ++m) {
          const int8_t* row = x + 4 * (j * kRows + m);
          const __m256i a = _mm256_set1_epi32(four_codes(row));
          low_sum[m][h] = _mm256_add_epi16(low_sum[m][h], _mm256_maddubs_epi16(first, a));
          if constexpr (kNibbles) {
            const __m256i b = _mm256_set1_epi32(four_codes(row + kRows * kGroup / 2));
            low_sum[m][h] = _mm256_add_epi16(low_sum[m][h], _mm256_maddubs_epi16(second, b));
          } else {
            high_sum[m][h] = _mm256_add_epi16(high_sum[m][h], _mm256_maddubs_epi16(second, a));
          }
        }
      }
    }
  }
  ULLAGE_INLINE V of(int m, int h) const {
    __m256i total = _mm256_madd_epi16(low_sum[m][h], _mm256_set1_epi16(1));
    if constexpr (!kNibbles) {
      total = _mm256_add_epi32(total, _mm256_madd_epi16(high_sum[m][h], _mm256_set1_epi16(16)));
    }
    return {_mm256_cvtepi32_ps(total)};
  }
#endif
};

// Multiplies kRows rows by `kLanes` parts of a tile, from part `part` on. In `out` the lanes of a row are
// consecutive.
template <int kRows, int kLanes, bool kNibbles, int kGroup>
inline void integer_rows(const uint8_t* tile, int part, const Inputs& in, int64_t first,
                         float (*out)[kTileRows]) {
  constexpr int kCodes = kNibbles ? kGroup * 8 : kGroup * 16;
  constexpr int kBlock = kCodes + 2 * kTileRows * 2;
  const int8_t* x = in.rounded + first * in.columns;
  const float* scales = in.scales + first * in.groups;
  const float* sums = in.sums + first * in.groups;
  V acc[kRows][kLanes];
  ULLAGE_UNROLL
  for (int m = 0; m < kRows; ++m) {
    for (int h = 0; h < kLanes; ++h) acc[m][h] = V::set(0.0f);
  }
  for (int64_t g = 0; g < in.groups; ++g, tile += kBlock, x += kRows * kGroup) {
    Sums<kRows, kLanes, kNibbles, kGroup> group;
    group.add(tile, part, x);
    const uint16_t* factors = reinterpret_cast<const uint16_t*>(tile + kCodes);
    for (int h = 0; h < kLanes; ++h) {
      const V scale = V::float16(factors + (part + h) * V::kWidth);
      V minimum = V::float16(factors + kTileRows + (part + h) * V::kWidth);
      if constexpr (!kNibbles) minimum = fma(scale, V::set(-128.0f), minimum);
      ULLAGE_UNROLL
      for (int m = 0; m < kRows; ++m) {
        acc[m][h] = fma(group.of(m, h), scale * V::set(scales[g * kRows + m]), acc[m][h]);
        acc[m][h] = fma(minimum, V::set(sums[g * kRows + m]), acc[m][h]);
      }
    }
  }
  ULLAGE_UNROLL
  for (int m = 0; m < kRows; ++m) {
    for (int h = 0; h < kLanes; ++h) store(out[m] + (part + h) * V::kWidth, acc[m][h]);
  }
}

template <int kRows, int kLanes>
inline void some_rows(const Matrix& matrix, const uint8_t* tile, const Inputs& in, int64_t first,
                      float (*out)[kTileRows]) {
  for (int part = 0; part < kParts; part += kLanes) {
    if (matrix.format == kInt4 && matrix.group == 32) {
      integer_rows<kRows, kLanes, true, 32>(tile, part, in, first, out);
    } else if (matrix.format == kInt4) {
      integer_rows<kRows, kLanes, true, 16>(tile, part, in, first, out);
    } else if (matrix.format == kInt8 && matrix.group == 32) {
      integer_rows<kRows, kLanes, false, 32>(tile, part, in, first, out);
    } else {
      integer_rows<kRows, kLanes, false, 16>(tile, part, in, first, out);
    }
  }
}

// Multiplies a block of rows from `first` on by one tile.
template <int kRows>
inline void multiply_block(const Matrix& matrix, const uint8_t* tile, const Inputs& in, int64_t first,
                           int64_t count, float (*out)[kTileRows]) {
  if (count == kRows) {
    some_rows<kRows, (kRows <= 2 ? kParts : 1)>(matrix, tile, in, first, out);
  } else if constexpr (kRows > 1) {
    multiply_block<kRows - 1>(matrix, tile, in, first, count, out);
  }
}

// Multiplies the rows from `first` to `end` by one tile, and calls put(row, results) with each row's 16
// results. `first` is the start of a block.
template <typename Put>
inline void multiply_tile(const Matrix& matrix, int64_t tile, const Inputs& in, int64_t first,
                          int64_t end, const Put& put) {
  const uint8_t* data = tile_of(matrix, tile);
  alignas(64) float out[kMostRows][kTileRows];
  for (; first < end; first += kMostRows) {
    const int64_t count = end - first < kMostRows ? end - first : kMostRows;
    multiply_block<kMostRows>(matrix, data, in, first, count, out);
    for (int m = 0; m < count; ++m) put(first + m, out[m]);
  }
}

// Writes one row of a matrix as float32.
inline void read_row(const Matrix& matrix, int64_t row, float* out) {
  const uint8_t* tile = tile_of(matrix, row / kTileRows);
  const int lane = row % kTileRows;
  const int64_t codes = code_bytes(matrix), group = matrix.group;
  for (int64_t g = 0; g < matrix.columns / group; ++g, tile += block_bytes(matrix)) {
    const uint16_t* factors = reinterpret_cast<const uint16_t*>(tile + codes);
    const float scale = float16_to_float(factors[lane]);
    float minimum = float16_to_float(factors[kTileRows + lane]);
    if (matrix.format == kInt8) minimum -= 128.0f * scale;
    for (int64_t k = 0; k < group; ++k) {
      int code;
      if (matrix.format == kInt8) {
        code = tile[k / 4 * 64 + lane * 4 + k % 4];
      } else {
        const int64_t j = k % (group / 2);
        code = tile[j / 4 * 64 + lane * 4 + j % 4] >> (k < group / 2 ? 0 : 4) & 15;
      }
      *out++ = code * scale + minimum;
    }
  }
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
