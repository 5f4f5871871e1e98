/* Vectors of LANES floats, tokens in float32 or bfloat16, and small helpers for all kernels. */

#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AVX512F__) || defined(EMULATE_TILES) /* tiles have rows of 16 floats */
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define UNROLL _Pragma("GCC unroll 64")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

/* An array (batch, tokens, channels) and its strides in elements; the channels are contiguous. */
typedef struct {
  void *data;
  int64_t batch, token;
} Tokens;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t padded(int64_t n) { return over(n, LANES) * LANES; }

INLINE vec all(float a) { return a - (vec){0}; } /* a - 0 is a, so nothing is computed; a + 0 is not, because of -0 */

INLINE words words_of(halves h) {
#ifdef __AVX512F__ /* gcc takes four instructions for a conversion that there is one for */
  return (words)_mm512_cvtepu16_epi32((__m256i)h);
#endif
  return __builtin_convertvector(h, words);
}
INLINE vec widen(halves h) { return (vec)(words_of(h) << 16); }

INLINE halves narrow(vec v) { /* rounds to nearest, ties to even; NaN stays NaN */
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)v);
#endif
  words bits = (words)v, nan = (words)(v != v);
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words result = (rounded & ~nan) | (0x7fc0 & nan);
#ifdef __AVX512F__
  return (halves)_mm512_cvtepi32_epi16((__m512i)result);
#endif
  return __builtin_convertvector(result, halves);
}

/* Loads n ≤ LANES values starting at element `at`, in float32 or bfloat16. */
INLINE vec get(const void *data, int64_t at, int64_t n, int bf16) {
  if (n == LANES) return bf16 ? widen(*(const halves *)((const uint16_t *)data + at)) : (vec)*(const floats *)((const float *)data + at);
  vec v = {0};
  halves h = {0};
  for (int i = 0; i < n; i++)
    if (bf16) h[i] = ((const uint16_t *)data)[at + i];
    else v[i] = ((const float *)data)[at + i];
  return bf16 ? widen(h) : v;
}

/* Stores n ≤ LANES values starting at element `at`. */
INLINE void put(void *data, int64_t at, int64_t n, int bf16, vec v) {
  halves h = bf16 ? narrow(v) : (halves){0};
  if (n == LANES) {
    if (bf16) *(halves *)((uint16_t *)data + at) = h;
    else *(floats *)((float *)data + at) = v;
    return;
  }
  for (int i = 0; i < n; i++)
    if (bf16) ((uint16_t *)data)[at + i] = h[i];
    else ((float *)data)[at + i] = v[i];
}

/* Allocates memory for vectors; NULL if there is none. */
INLINE void *room(int64_t vectors) { return aligned_alloc(sizeof(vec), sizeof(vec) * most(1, vectors)); }
