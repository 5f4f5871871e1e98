/* Products of a few rows x with the rows of a weight, as in a step of decoding. The weight is read once, in its own layout and
   dtype, at the speed of memory: packing it first would take longer than the product. Sums are float32; x and the weight are
   both float32 or both bfloat16. */

#pragma once
#include "functions.h"

#define HIGH 4 /* rows of x in a tile */
#if LANES == 8
#define WIDE 2 /* outputs in a tile: with half the registers */
#else
#define WIDE 4
#endif
#define STRIP 16 /* outputs that a thread computes before it goes on with them */
#define FEW 2 /* so many rows of x read the weight straight on; it is fetched AHEAD bytes before it is needed */
#define AHEAD 2048

/* Rows of x (count, in), which are multiplied by bfloat16 pairs if the processor can. */
typedef struct {
  const void *x;
  int64_t count, in;
  int bf16, pairs;
} FewRows;

/* to[t][0] = Σ_i x[t, i] w[i] for T ≤ FEW rows of x and the row of the weight that starts at element `at`. */
INLINE void line(const void *x, const void *w, int64_t at, int64_t in, float (*to)[STRIP], const int T, const int bf16) {
  const int parts = 8 / T;
  const int size = bf16 ? 2 : 4;
  vec sums[FEW][8] = {{{0}}};
  int64_t i = 0;
  for (; i + parts * LANES <= in; i += parts * LANES)
    UNROLL for (int u = 0; u < parts; u++) {
      int64_t place = i + u * LANES;
      if (u * LANES * size % 64 == 0) __builtin_prefetch((const char *)w + (at + place) * size + AHEAD, 0, 2);
      vec weight = get(w, at + place, LANES, bf16);
      UNROLL for (int t = 0; t < T; t++) sums[t][u] += get(x, t * in + place, LANES, bf16) * weight;
    }
  for (; i < in; i += LANES) {
    int64_t many = least(LANES, in - i);
    vec weight = get(w, at + i, many, bf16);
    UNROLL for (int t = 0; t < T; t++) sums[t][0] += get(x, t * in + i, many, bf16) * weight;
  }
  UNROLL for (int t = 0; t < T; t++) {
    UNROLL for (int u = 1; u < parts; u++) sums[t][0] += sums[t][u];
    to[t][0] = sum_of(sums[t][0]);
  }
}

/* Where the next strip of the weight lies, which is fetched into the L2 cache during this one; `pace` 0 fetches nothing. */
typedef struct {
  const char *at;
  int64_t row, pace;
} Next;

/* to[t][a] = Σ_i x[t, i] w[a, i] for T rows of x and A rows of the weight, which starts at element `at`. */
INLINE void dots(const void *x, const void *w, int64_t at, int64_t in, Next next, float (*to)[STRIP], const int T,
                 const int A, const int bf16) {
  vec sums[HIGH][WIDE], values[HIGH];
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
#define OF_TILE(rows, outputs, BODY)                \
  if ((outputs) == WIDE) OF_ROWS(rows, BODY, WIDE) \
  else OF_ROWS(rows, BODY, 1)
#define OF_ROWS(rows, BODY, A)  \
  switch (rows) {               \
    case 1: BODY(1, A); break;  \
    case 2: BODY(2, A); break;  \
    case 3: BODY(3, A); break;  \
    default: BODY(HIGH, A);     \
  }

#ifdef __AVX512F__ /* some processors with AVX-512 multiply pairs of bfloat16 numbers, which takes half the instructions */
#define PAIRS __attribute__((target("avx512bf16")))
PAIRS INLINE void pair_line(const uint16_t *x, const uint16_t *w, int64_t in, float (*to)[STRIP], const int T) {
  const int parts = 8 / T;
  __m512 sums[FEW][8];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int u = 0; u < parts; u++) sums[t][u] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + parts * 2 * LANES <= in; i += parts * 2 * LANES)
    UNROLL for (int u = 0; u < parts; u++) {
      int64_t place = i + u * 2 * LANES;
      __builtin_prefetch((const char *)(w + place) + AHEAD, 0, 2);
      __m512bh weight = (__m512bh)_mm512_loadu_si512(w + place);
      UNROLL for (int t = 0; t < T; t++)
        sums[t][u] = _mm512_dpbf16_ps(sums[t][u], (__m512bh)_mm512_loadu_si512(x + t * in + place), weight);
    }
  for (; i < in; i += 2 * LANES) {
    __mmask32 real = in - i < 2 * LANES ? (1u << (in - i)) - 1 : ~0u;
    __m512bh weight = (__m512bh)_mm512_maskz_loadu_epi16(real, w + i);
    UNROLL for (int t = 0; t < T; t++)
      sums[t][0] = _mm512_dpbf16_ps(sums[t][0], (__m512bh)_mm512_maskz_loadu_epi16(real, x + t * in + i), weight);
  }
  UNROLL for (int t = 0; t < T; t++) {
    UNROLL for (int u = 1; u < parts; u++) sums[t][0] = _mm512_add_ps(sums[t][0], sums[t][u]);
    to[t][0] = sum_of((vec)sums[t][0]);
  }
}
PAIRS INLINE void pair_dots(const uint16_t *x, const uint16_t *w, int64_t in, Next next, float (*to)[STRIP], const int T,
                            const int A) {
  __m512 sums[HIGH][WIDE];
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
PAIRS static void pair_lines(const uint16_t *x, const uint16_t *w, int64_t in, float (*to)[STRIP], int64_t rows, int64_t n) {
  for (int64_t a = 0; a < n; a++, to = (float(*)[STRIP])(&to[0][1])) {
    if (rows == 1) pair_line(x, w + a * in, in, to, 1);
    else pair_line(x, w + a * in, in, to, 2);
  }
}
PAIRS static void pair_dot_tile(const uint16_t *x, const uint16_t *w, int64_t in, Next next, float (*to)[STRIP], int64_t rows, int outputs) {
#define DOTS(T, A) pair_dots(x, w, in, next, to, T, A)
  OF_TILE(rows, outputs, DOTS)
#undef DOTS
}
static int has_pairs(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#else
#define pair_lines(x, w, in, to, rows, n) ((void)0)
#define pair_dot_tile(x, w, in, next, to, rows, outputs) ((void)0)
static int has_pairs(void) { return 0; }
#endif

static void lines(const void *x, const void *w, int64_t at, int64_t in, float (*to)[STRIP], int64_t rows, int64_t n, int bf16) {
  for (int64_t a = 0; a < n; a++, at += in, to = (float(*)[STRIP])(&to[0][1])) {
    if (rows == 1 && bf16) line(x, w, at, in, to, 1, 1);
    else if (rows == 1) line(x, w, at, in, to, 1, 0);
    else if (bf16) line(x, w, at, in, to, 2, 1);
    else line(x, w, at, in, to, 2, 0);
  }
}

static void dot_tile(const void *x, const void *w, int64_t at, int64_t in, Next next, float (*to)[STRIP], int64_t rows, int outputs, int bf16) {
#define DOTS(T, A) dots(x, w, at, in, next, to, T, A, 0)
#define DOTS_BF16(T, A) dots(x, w, at, in, next, to, T, A, 1)
  if (bf16) {
    OF_TILE(rows, outputs, DOTS_BF16)
  } else {
    OF_TILE(rows, outputs, DOTS)
  }
#undef DOTS
#undef DOTS_BF16
}

INLINE FewRows few_rows_of(const void *x, int64_t count, int64_t in, int bf16) {
  return (FewRows){x, count, in, bf16, bf16 && has_pairs()};
}

/* sums[t][a] for the `high` ≤ HIGH rows of x from `row` on, and the outputs [first, first + n), n ≤ STRIP; 0 beyond n. */
static void strip_sums(FewRows of, int64_t row, int64_t high, const void *w, int64_t first, int64_t n, float (*sums)[STRIP]) {
  int64_t size = of.bf16 ? 2 : 4;
  const void *from = (const char *)of.x + row * of.in * size;
  memset(sums, 0, HIGH * sizeof *sums);
  if (of.count <= FEW) {
    if (of.pairs) pair_lines(from, (const uint16_t *)w + first * of.in, of.in, sums, high, n);
    else lines(from, w, first * of.in, of.in, sums, high, n, of.bf16);
    return;
  }
  for (int64_t a = 0; a < n;) {
    int outputs = n - a >= WIDE ? WIDE : 1;
    int64_t at = (first + a) * of.in;
    float(*to)[STRIP] = (float(*)[STRIP])(&sums[0][0] + a);
    int fetch = a / WIDE % over(of.count, HIGH) == row / HIGH; /* each part of the next strip in one of the passes */
    Next next = {(const char *)w + (fetch ? at + STRIP * of.in : at) * size, of.in * size, fetch ? LANES * size : 0};
    if (of.pairs) pair_dot_tile(from, (const uint16_t *)w + at, of.in, next, to, high, outputs);
    else dot_tile(from, w, at, of.in, next, to, high, outputs, of.bf16);
    a += outputs;
  }
}

/* Activations of feed-forward networks alone, after those of functions.h. */
enum { GELU_TANH = HARDSIGMOID + 1, SILU };

INLINE vec activated(vec z, const int kind) {
  if (kind == SILU) return z * act(z, SIGMOID);
  if (kind == GELU_TANH) return z * act(1.5957691216f * (z + 0.044715f * z * z * z), SIGMOID); /* (1 + tanh a) / 2 = sigmoid(2 a) */
  return act(z, kind);
}

/* y = act(x Wᵀ + b) ⊙ f for the outputs [first, first + n) of all rows; bias (out) and factor (rows, out) may be NULL. */
static void strip(FewRows of, const void *w, const void *bias, const void *factor, void *y, int64_t out, int64_t first,
                  int64_t n, int64_t kind) {
  float sums[HIGH][STRIP];
  for (int64_t row = 0; row < of.count; row += HIGH) {
    int64_t high = least(HIGH, of.count - row);
    strip_sums(of, row, high, w, first, n, sums);
    for (int64_t t = 0; t < high; t++)
      for (int64_t a = 0; a < n; a += LANES) {
        int64_t many = least(LANES, n - a), place = (row + t) * out + first + a;
        vec z = *(const floats *)(&sums[t][a]);
        if (bias) z += get(bias, first + a, many, of.bf16);
#define ACT(k) z = activated(z, k)
        if (kind == SILU) ACT(SILU);
        else if (kind == GELU_TANH) ACT(GELU_TANH);
        else OF_KIND(kind, ACT)
#undef ACT
        if (factor) z *= get(factor, place, many, of.bf16);
        put(y, place, many, of.bf16, z);
      }
  }
}
