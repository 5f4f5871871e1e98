/* A step of a recurrent PoM: for each sequence one token x, with the sums of the terms of the tokens before it.

     h = act(W_h x + b_h),  S' = S + Σ_p α_p h^p,  y = W_o [σ(W_s x + b_s) ⊙ S' / count] + b_o

   Weights are read once, in their own layout and dtype (rows.h). x, the weights, α and y are all float32 or all bfloat16;
   S is float32, and so is all arithmetic, except that what W_o multiplies is rounded to the dtype of x. */

#include <omp.h>

#include "rows.h"
#include "product.h"

/* As in pom.py. */
typedef struct {
  int64_t rows, degree, act, gate, mean, bf16, threads;
} Step;

INLINE float number(const void *data, int64_t at, int bf16) {
  if (!bf16) return ((const float *)data)[at];
  union { uint32_t bits; float value; } whole = {(uint32_t)((const uint16_t *)data)[at] << 16};
  return whole.value;
}

/* Σ_p α_p h^p for `many` channels from `first` on, by Horner's rule; α is (channels, degree). */
INLINE vec polynomial(vec h, const void *alpha, int64_t first, int64_t many, int64_t degree, int bf16) {
  vec total = {0};
  for (int64_t p = degree - 1; p >= 0; p--) {
    vec factor = {0};
    for (int64_t i = 0; i < many; i++) factor[i] = number(alpha, (first + i) * degree + p, bf16);
    total = (total + factor) * h;
  }
  return total;
}

/* The new sums and the gated mean of the channels [first, first + n). */
static void state_strip(FewRows of, const Linear *poly, const Linear *gate, const void *alpha, const float *before,
                        const int64_t *count, float *after, void *gated, const Step *step, int64_t first, int64_t n) {
  float maps[HIGH][STRIP], gates[HIGH][STRIP];
  const int bf16 = of.bf16;
  for (int64_t row = 0; row < of.count; row += HIGH) {
    int64_t high = least(HIGH, of.count - row);
    strip_sums(of, row, high, poly->weight, first, n, maps);
    strip_sums(of, row, high, gate->weight, first, n, gates);
    for (int64_t t = 0; t < high; t++)
      for (int64_t a = 0; a < n; a += LANES) {
        int64_t many = least(LANES, n - a), channel = first + a, place = (row + t) * poly->out + channel;
        vec h = *(const floats *)(&maps[t][a]), g = *(const floats *)(&gates[t][a]);
        if (poly->bias) h += get(poly->bias, channel, many, bf16);
        if (gate->bias) g += get(gate->bias, channel, many, bf16);
#define ACT(k) h = act(h, k)
        OF_KIND(step->act, ACT)
#undef ACT
#define ACT(k) g = act(g, k)
        OF_KIND(step->gate, ACT)
#undef ACT
        vec total = get(before, place, many, 0) + polynomial(h, alpha, channel, many, step->degree, bf16);
        put(after, place, many, 0, total);
        put(gated, place, many, bf16, step->mean ? g * total / (float)most(1, count[row + t]) : g * total);
      }
  }
}

/* x (rows, D), sums before and after (rows, E), count (rows) with this token, gated (rows, E) for intermediates, y (rows, D).
   Returns 0. */
int decode_pom(const void *x, const Linear *poly, const Linear *gate, const Linear *proj, const void *alpha, const float *before,
             const int64_t *count, float *after, void *gated, void *y, const Step *step) {
  int64_t inner = over(poly->out, STRIP), outer = over(proj->out, STRIP);
  FewRows in = few_rows_of(x, step->rows, poly->in, step->bf16), middle = few_rows_of(gated, step->rows, proj->in, step->bf16);
#pragma omp parallel num_threads(most(1, least(step->threads, inner)))
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < inner; i++)
      state_strip(in, poly, gate, alpha, before, count, after, gated, step, i * STRIP, least(STRIP, poly->out - i * STRIP));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < outer; i++)
      strip(middle, proj->weight, proj->bias, NULL, y, proj->out, i * STRIP, least(STRIP, proj->out - i * STRIP), IDENTITY);
  }
  return 0;
}
