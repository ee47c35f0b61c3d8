// Vectors of float32 of one instruction set; the rest of the code knows their width only.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ullage {
namespace ULLAGE_ISA {

#if ULLAGE_AVX512

struct F {
  static constexpr int kWidth = 16;
  __m512 v;
};
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F power_of_two(F n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline F load_bfloat16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline F load_float16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Numbers of E4M3 as they lie in float16: 2^-8 times what they are, for its bias is 8 less.
inline F load_float8(const uint8_t* p) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {_mm512_cvtph_ps(halves)};
}
inline void store_int8(int8_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
// The first `end` lanes of `a`, the others of `other`.
inline F choose(F a, F other, int end) {
  const uint32_t mask = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(mask), a.v)};
}
// Lanes of `a` where `x` is above `limit`, else 0.
inline F above(F x, F limit, F a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ), a.v)};
}

#else

struct F {
  static constexpr int kWidth = 8;
  __m256 v;
};
inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm256_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F round(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F power_of_two(F n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
inline F load_bfloat16(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline F load_float16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_float8(const uint8_t* p) {
  const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80))))};
}
inline void store_int8(int8_t* p, F a) {
  const __m256i words = _mm256_cvtps_epi32(a.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float largest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline F choose(F a, F other, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(below))};
}
inline F above(F x, F limit, F a) { return {_mm256_and_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_GT_OQ), a.v)}; }

#endif

inline F zero() { return set1(0.0f); }

// e^x within 2 units of the last place, of x between -87 and 88: 2^n times a polynomial (Cephes, expf).
// What is not a number stays so: the processor's min and max give their second operand then.
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

// Rounds to the nearest, ties to even; what is not a number stays so.
inline uint16_t float_to_bfloat16(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

constexpr float kFloat8Unit = 256.0f;  // what a number of `load_float8` is to be multiplied by

// Rounds to the nearest number of E4M3, ties to even; beyond its largest, to that.
inline uint8_t float_to_float8(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7f;
  if (bits >= 0x43e00000u) return sign | 0x7e;  // 448
  float size;
  memcpy(&size, &bits, 4);
  if (bits < 0x3c800000u) return sign | static_cast<uint8_t>(_mm_cvtss_si32(_mm_set_ss(size * 512.0f)));  // below 2^-6
  return sign | static_cast<uint8_t>(((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

inline float bfloat16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

}  // namespace ULLAGE_ISA
}  // namespace ullage
