/* y = act(x Wᵀ + b) ⊙ f for a few rows x, as in a step of decoding. The weight is read once, in its own layout and dtype, at
   the speed of memory: packing it first would take longer than the product. All arithmetic is float32; x, W, b, f and y are
   all float32 or all bfloat16. */

#include <omp.h>

#include "functions.h"

#define HIGH 4 /* rows of x in a tile */
#if LANES == 8
#define WIDE 2 /* outputs in a tile: with half the registers */
#else
#define WIDE 4
#endif
#define WIDEST (2 * WIDE) /* outputs in a tile of one or two rows: reading more rows of the weight at once is faster */
#define STRIP 16 /* outputs that a thread computes before it applies the activation */

/* Activations that only this kernel has, after those of functions.h. */
enum { GELU_TANH = HARDSIGMOID + 1, SILU };

INLINE vec activated(vec z, const int kind) {
  if (kind == SILU) return z * act(z, SIGMOID);
  if (kind == GELU_TANH) return z * act(1.5957691216f * (z + 0.044715f * z * z * z), SIGMOID); /* (1 + tanh a) / 2 = sigmoid(2 a) */
  return act(z, kind);
}

INLINE float sum_of(vec v) {
#if LANES == 16
  return _mm512_reduce_add_ps((__m512)v);
#endif
  UNROLL for (int half = LANES / 2; half > 0; half /= 2)
    UNROLL for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

/* Where the next strip of the weight lies, which is fetched into the L2 cache during this one; `pace` 0 fetches nothing. */
typedef struct {
  const char *at;
  int64_t row, pace;
} Next;

/* to[t][a] = Σ_i x[t, i] w[a, i] for T rows of x and A rows of the weight, which starts at element `at`. */
INLINE void dots(const void *x, const void *w, int64_t at, int64_t in, Next next, float (*to)[STRIP], const int T,
                 const int A, const int bf16) {
  vec sums[HIGH][WIDEST], values[HIGH];
  int64_t i = 0;
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = (vec){0};
  for (; i + LANES <= in; i += LANES, next.at += next.pace) {
    UNROLL for (int a = 0; a < A; a++) __builtin_prefetch(next.at + a * next.row, 0, 2);
    UNROLL for (int t = 0; t < T; t++) values[t] = get(x, t * in + i, LANES, bf16);
    UNROLL for (int a = 0; a < A; a++) {
      vec weight = get(w, at + a * in + i, LANES, bf16);
      UNROLL for (int t = 0; t < T; t++) sums[t][a] += values[t] * weight;
    }
  }
  if (i < in)
    UNROLL for (int a = 0; a < A; a++) {
      vec weight = get(w, at + a * in + i, in - i, bf16);
      UNROLL for (int t = 0; t < T; t++) sums[t][a] += get(x, t * in + i, in - i, bf16) * weight;
    }
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) to[t][a] = sum_of(sums[t][a]);
}

/* BODY(rows, outputs) with constants for the tile's sizes. */
#define OF_TILE(rows, outputs, BODY)                                                           \
  if ((outputs) == WIDEST && (rows) == 1) BODY(1, WIDEST);                                     \
  else if ((outputs) == WIDEST) BODY(2, WIDEST);                                               \
  else if ((outputs) == WIDE) OF_ROWS(rows, BODY, WIDE)                                        \
  else OF_ROWS(rows, BODY, 1)
#define OF_ROWS(rows, BODY, A)  \
  switch (rows) {               \
    case 1: BODY(1, A); break;  \
    case 2: BODY(2, A); break;  \
    case 3: BODY(3, A); break;  \
    default: BODY(HIGH, A);     \
  }

#if LANES == 16 /* some processors with AVX-512 multiply pairs of bfloat16 numbers, which takes half the instructions */
#define PAIRS __attribute__((target("avx512bf16")))
PAIRS INLINE void pair_dots(const uint16_t *x, const uint16_t *w, int64_t in, Next next, float (*to)[STRIP], const int T,
                            const int A) {
  __m512 sums[HIGH][WIDEST];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = _mm512_setzero_ps();
  for (int64_t i = 0; i < in; i += 2 * LANES, next.at += 2 * next.pace) {
    UNROLL for (int a = 0; a < A; a++) __builtin_prefetch(next.at + a * next.row, 0, 2);
    __mmask32 real = in - i < 2 * LANES ? (1u << (in - i)) - 1 : ~0u;
    __m512bh values[HIGH];
    UNROLL for (int t = 0; t < T; t++) values[t] = (__m512bh)_mm512_maskz_loadu_epi16(real, x + t * in + i);
    UNROLL for (int a = 0; a < A; a++) {
      __m512bh weight = (__m512bh)_mm512_maskz_loadu_epi16(real, w + a * in + i);
      UNROLL for (int t = 0; t < T; t++) sums[t][a] = _mm512_dpbf16_ps(sums[t][a], values[t], weight);
    }
  }
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) to[t][a] = sum_of((vec)sums[t][a]);
}
PAIRS static void pair_tile(const uint16_t *x, const uint16_t *w, int64_t in, Next next, float (*to)[STRIP], int64_t rows, int outputs) {
#define DOTS(T, A) pair_dots(x, w, in, next, to, T, A)
  OF_TILE(rows, outputs, DOTS)
#undef DOTS
}
static int has_pairs(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#else
#define pair_tile(x, w, in, next, to, rows, outputs) ((void)0)
static int has_pairs(void) { return 0; }
#endif

static void tile(const void *x, const void *w, int64_t at, int64_t in, Next next, float (*to)[STRIP], int64_t rows, int outputs, int bf16) {
#define DOTS(T, A) dots(x, w, at, in, next, to, T, A, 0)
#define DOTS_BF16(T, A) dots(x, w, at, in, next, to, T, A, 1)
  if (bf16) {
    OF_TILE(rows, outputs, DOTS_BF16)
  } else {
    OF_TILE(rows, outputs, DOTS)
  }
}

/* The outputs [first, first + n) of all rows. */
static void strip(const void *x, const void *w, const void *bias, const void *factor, void *y, int64_t rows, int64_t in,
                  int64_t out, int64_t first, int64_t n, int64_t kind, int bf16, int pairs) {
  float sums[HIGH][STRIP];
  int64_t size = bf16 ? 2 : 4;
  for (int64_t row = 0; row < rows; row += HIGH) {
    int64_t high = least(HIGH, rows - row);
    const void *from = (const char *)x + row * in * size;
    memset(sums, 0, sizeof sums);
    for (int64_t a = 0; a < n;) {
      int outputs = rows <= 2 && n - a >= WIDEST ? WIDEST : n - a >= WIDE ? WIDE : 1;
      int64_t at = (first + a) * in;
      float(*to)[STRIP] = (float(*)[STRIP])(&sums[0][0] + a);
      int fetch = a / WIDE % over(rows, HIGH) == row / HIGH; /* each part of the next strip in one of the passes */
      Next next = {(const char *)w + (fetch ? at + STRIP * in : at) * size, in * size, fetch ? LANES * size : 0};
      if (pairs) pair_tile(from, (const uint16_t *)w + at, in, next, to, high, outputs);
      else tile(from, w, at, in, next, to, high, outputs, bf16);
      a += outputs;
    }
    for (int64_t t = 0; t < high; t++)
      for (int64_t a = 0; a < n; a += LANES) {
        int64_t many = least(LANES, n - a), place = (row + t) * out + first + a;
        vec z = *(const floats *)(&sums[t][a]);
        if (bias) z += get(bias, first + a, many, bf16);
#define ACT(k) z = activated(z, k)
        if (kind == SILU) ACT(SILU);
        else if (kind == GELU_TANH) ACT(GELU_TANH);
        else OF_KIND(kind, ACT)
#undef ACT
        if (factor) z *= get(factor, place, many, bf16);
        put(y, place, many, bf16, z);
      }
  }
}

/* y (rows, out) for x (rows, in) and the weight (out, in); bias (out) and factor (rows, out) may be NULL. Returns 0. */
int few_rows_linear(const void *x, const void *w, const void *bias, const void *factor, void *y, int rows, int in, int out,
                    int kind, int bf16, int threads) {
  int64_t strips = over(out, STRIP);
  int pairs = bf16 && has_pairs();
#pragma omp parallel for schedule(static) num_threads(most(1, least(threads, strips)))
  for (int64_t i = 0; i < strips; i++)
    strip(x, w, bias, factor, y, rows, in, out, i * STRIP, least(STRIP, out - i * STRIP), kind, bf16, pairs);
  return 0;
}
