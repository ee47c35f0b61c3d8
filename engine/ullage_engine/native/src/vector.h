// Vectors of float32, and the single order in which every instruction set sums them.
//
// An answer has the same bits on every processor, so results must not depend on the width of a register.
// `F` is sixteen numbers everywhere: one register of AVX-512, two of AVX2, or a plain array in the portable
// set, with which tests compare the others. A sum over a row has sixteen partial sums, one for each lane,
// and `fold` adds them in a fixed tree. `V` is one register. Loops that never add lanes use it, and their
// lanes have the same bits in a register of any width.
//
// Compilers must not fuse or reorder operations (see OPTIONS in hatch_build.py): `fma` rounds once, and
// every other operation rounds by itself. If an operand is NaN, min and max return the second operand, as
// the processor does.
#pragma once
#if !ULLAGE_PORTABLE
#include <immintrin.h>
#endif

#include <climits>
#include <cstdint>
#include <cstring>

// Before a loop over an array of registers. Compilers keep an array in memory if they do not unroll its loops.
#if ULLAGE_PORTABLE
#define ULLAGE_UNROLL
#else
#define ULLAGE_UNROLL _Pragma("GCC unroll 16")
#endif

// Before a function of a loop over registers. A call of it would put all of them into memory.
#define ULLAGE_INLINE __attribute__((always_inline)) inline

namespace ullage {
namespace ULLAGE_ISA {

inline float float_of_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

inline uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}

inline float float16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
  if ((half & 0x7c00u) == 0x7c00u) return float_of_bits(sign | 0x7f800000u | rest);
  return float_of_bits(sign | bits_of(float_of_bits(rest) * 0x1p112f));  // the exponents' biases differ by 112
}

#if ULLAGE_AVX512

struct V {
  static constexpr int kWidth = 16;
  __m512 v;

  static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static V set(float x) { return {_mm512_set1_ps(x)}; }
  static V bfloat16(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static V float16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static V float8(const uint8_t* p) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    return {_mm512_cvtph_ps(halves)};
  }
};
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V abs(V a) { return {_mm512_abs_ps(a.v)}; }
inline V round(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline V power_of_two(V n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline void store_int8(int8_t* p, V a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// The first `end` lanes of `a`, and the rest of `other`.
inline V choose(V a, V other, int end) {
  const uint32_t mask = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(mask), a.v)};
}
// Lanes of `a` where `x` is above `limit`, and 0 elsewhere.
inline V above(V x, V limit, V a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ), a.v)};
}

#elif ULLAGE_PORTABLE

struct V {
  static constexpr int kWidth = 16;
  float v[kWidth];

  template <typename Each>
  static V of(const Each& each) {
    V out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = each(i);
    return out;
  }
  static V load(const float* p) { return of([&](int i) { return p[i]; }); }
  static V set(float x) { return of([&](int) { return x; }); }
  static V bfloat16(const uint16_t* p) {
    return of([&](int i) { return float_of_bits(static_cast<uint32_t>(p[i]) << 16); });
  }
  static V float16(const uint16_t* p) { return of([&](int i) { return float16_to_float(p[i]); }); }
  static V float8(const uint8_t* p) {
    return of([&](int i) { return float16_to_float(static_cast<uint16_t>((p[i] & 0x80u) << 8 | (p[i] & 0x7fu) << 7)); });
  }
};
inline void store(float* p, V a) { memcpy(p, a.v, sizeof a.v); }
inline V operator+(V a, V b) { return V::of([&](int i) { return a.v[i] + b.v[i]; }); }
inline V operator-(V a, V b) { return V::of([&](int i) { return a.v[i] - b.v[i]; }); }
inline V operator*(V a, V b) { return V::of([&](int i) { return a.v[i] * b.v[i]; }); }
inline V operator/(V a, V b) { return V::of([&](int i) { return a.v[i] / b.v[i]; }); }
inline V fma(V a, V b, V c) { return V::of([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
inline V max(V a, V b) { return V::of([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline V min(V a, V b) { return V::of([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline V abs(V a) { return V::of([&](int i) { return __builtin_fabsf(a.v[i]); }); }
inline V round(V a) { return V::of([&](int i) { return __builtin_nearbyintf(a.v[i]); }); }
// The number as int32. A number that does not fit becomes INT32_MIN, as on the processor.
inline int32_t whole_of(float a) { return a >= -0x1p31f && a < 0x1p31f ? static_cast<int32_t>(a) : INT32_MIN; }
inline V power_of_two(V n) {
  return V::of([&](int i) { return float_of_bits((static_cast<uint32_t>(whole_of(n.v[i])) + 127) << 23); });
}
inline void store_int8(int8_t* p, V a) {
  for (int i = 0; i < V::kWidth; ++i) {
    const int32_t whole = whole_of(a.v[i]);
    p[i] = static_cast<int8_t>(whole < -128 ? -128 : whole > 127 ? 127 : whole);
  }
}
inline V choose(V a, V other, int end) { return V::of([&](int i) { return i < end ? a.v[i] : other.v[i]; }); }
inline V above(V x, V limit, V a) { return V::of([&](int i) { return x.v[i] > limit.v[i] ? a.v[i] : 0.0f; }); }

#else

struct V {
  static constexpr int kWidth = 8;
  __m256 v;

  static V load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static V set(float x) { return {_mm256_set1_ps(x)}; }
  static V bfloat16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static V float16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static V float8(const uint8_t* p) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80))))};
  }
};
inline void store(float* p, V a) { _mm256_storeu_ps(p, a.v); }
inline V operator+(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.v, b.v)}; }
inline V abs(V a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline V round(V a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline V power_of_two(V n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
inline void store_int8(int8_t* p, V a) {
  const __m256i words = _mm256_cvtps_epi32(a.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline V choose(V a, V other, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(below))};
}
inline V above(V x, V limit, V a) { return {_mm256_and_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_GT_OQ), a.v)}; }

#endif

// Members have names, since a compiler keeps an array in memory if it does not unroll its loop early.
template <int kParts>
struct Sixteen;
template <>
struct Sixteen<1> {
  static constexpr int kWidth = 16;
  V low;
};
template <>
struct Sixteen<2> {
  static constexpr int kWidth = 16;
  V low, high;
};
using F = Sixteen<16 / V::kWidth>;

// Applies `each` to the registers of some vectors, one after the other.
template <typename Each, typename First, typename... Others>
inline First map(const Each& each, First first, Others... others) {
  if constexpr (V::kWidth == 16) {
    return {each(first.low, others.low...)};
  } else {
    return {each(first.low, others.low...), each(first.high, others.high...)};
  }
}

// Makes a vector whose registers are the results of `each`, called with the register's first lane.
template <typename Made, typename Each>
inline Made make(const Each& each) {
  if constexpr (V::kWidth == 16) {
    return {each(0)};
  } else {
    return {each(0), each(V::kWidth)};
  }
}

inline F load(const float* p) { return make<F>([=](int lane) { return V::load(p + lane); }); }
inline F load_bfloat16(const uint16_t* p) { return make<F>([=](int lane) { return V::bfloat16(p + lane); }); }
inline F set1(float x) { return make<F>([=](int) { return V::set(x); }); }
inline F zero() { return set1(0.0f); }
inline F operator+(F a, F b) { return map([](V x, V y) { return x + y; }, a, b); }
inline F operator-(F a, F b) { return map([](V x, V y) { return x - y; }, a, b); }
inline F operator*(F a, F b) { return map([](V x, V y) { return x * y; }, a, b); }
inline F operator/(F a, F b) { return map([](V x, V y) { return x / y; }, a, b); }
inline F fma(F a, F b, F c) { return map([](V x, V y, V z) { return fma(x, y, z); }, a, b, c); }
inline F max(F a, F b) { return map([](V x, V y) { return max(x, y); }, a, b); }
inline F min(F a, F b) { return map([](V x, V y) { return min(x, y); }, a, b); }
inline F abs(F a) { return map([](V x) { return abs(x); }, a); }
inline F round(F a) { return map([](V x) { return round(x); }, a); }
inline F power_of_two(F n) { return map([](V x) { return power_of_two(x); }, n); }
inline F above(F x, F limit, F a) { return map([](V u, V v, V w) { return above(u, v, w); }, x, limit, a); }

template <typename Vector>
inline void store_sixteen(float* p, Vector a) {
  store(p, a.low);
  if constexpr (V::kWidth == 8) store(p + V::kWidth, a.high);
}
inline void store(float* p, F a) { store_sixteen(p, a); }

template <typename Vector>
inline void store_sixteen(int8_t* p, Vector a) {
  store_int8(p, a.low);
  if constexpr (V::kWidth == 8) store_int8(p + V::kWidth, a.high);
}
inline void store_int8(int8_t* p, F a) { store_sixteen(p, a); }

template <typename Vector>
inline Vector choose_sixteen(Vector a, Vector other, int end) {
  if constexpr (V::kWidth == 16) {
    return {choose(a.low, other.low, end)};
  } else {
    return {choose(a.low, other.low, end), choose(a.high, other.high, end - V::kWidth)};
  }
}
inline F choose(F a, F other, int end) { return choose_sixteen(a, other, end); }

// Folds sixteen lanes into one: each of the first eight with the lane eight after it, then four, two, one.
#if ULLAGE_PORTABLE
template <typename Two>
inline float fold(F a, const Two& two) {
  float lanes[F::kWidth];
  store(lanes, a);
  for (int half = F::kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = two(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}
struct Add {
  float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  float operator()(float a, float b) const { return a > b ? a : b; }
};
#else
template <typename Two>
inline float fold(F a, const Two& two) {
#if ULLAGE_AVX512
  const __m256 low = _mm512_castps512_ps256(a.low.v);
  const __m256 high = _mm512_extractf32x8_ps(a.low.v, 1);
#else
  const __m256 low = a.low.v, high = a.high.v;
#endif
  const __m256 eight = two(low, high);
  const __m128 four = two(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 pair = two(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two(pair, _mm_shuffle_ps(pair, pair, 1)));
}
struct Add {
  __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
  __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};
struct Larger {
  __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};
#endif
inline float sum(F a) { return fold(a, Add()); }
inline float largest(F a) { return fold(a, Larger()); }

// e^x within 2 units in the last place, for x between -87 and 88: 2^n times a polynomial (Cephes, expf).
// A NaN stays NaN, since min and max return the second operand then.
inline F exp(F x) {
  x = min(set1(88.0f), max(set1(-87.0f), x));
  const F n = round(x * set1(1.44269504088896341f));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return p * power_of_two(n);
}

// Rounds to the nearest number, ties to even. A NaN stays NaN.
inline uint16_t float_to_bfloat16(float number) {
  const uint32_t bits = bits_of(number);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The exponent bias of E4M3 is 8 less than that of float16. So the bits of a number, shifted into a
// float16, are 2^-8 of its value. `V::float8` returns these.
constexpr float kFloat8Unit = 256.0f;

// Rounds to the nearest number of E4M3, ties to even. Larger numbers become the largest one.
inline uint8_t float_to_float8(float number) {
  uint32_t bits = bits_of(number);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7f;
  if (bits >= 0x43e00000u) return sign | 0x7e;  // 448
  // Below 2^-6 numbers are multiples of 2^-9. A sum above 2^23 has no fraction bits, so it rounds to these.
  if (bits < 0x3c800000u) return sign | static_cast<uint8_t>(float_of_bits(bits) * 0x1p9f + 0x1p23f - 0x1p23f);
  return sign | static_cast<uint8_t>(((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

inline float bfloat16_to_float(uint16_t half) { return float_of_bits(static_cast<uint32_t>(half) << 16); }

}  // namespace ULLAGE_ISA
}  // namespace ullage
