/* Linear maps and feed-forward networks of a few rows x: y = act(x Wᵀ + b) ⊙ f, and two or three of those in a row; and
   their norm. All arithmetic is float32; x, W, b, f and y are all float32 or all bfloat16. */

#include <math.h>
#include <omp.h>

#include "rows.h"
#include "product.h"

/* y (rows, out) for x (rows, in) and the weight (out, in); bias (out) and factor (rows, out) may be NULL. Returns 0. */
int decode_linear(const void *x, const void *w, const void *bias, const void *factor, void *y, int rows, int in, int out,
                    int kind, int bf16, int threads) {
  int64_t strips = over(out, STRIP);
  FewRows of = few_rows_of(x, rows, in, bf16);
#pragma omp parallel for schedule(static) num_threads(most(1, least(threads, strips)))
  for (int64_t i = 0; i < strips; i++)
    strip(of, w, bias, factor, y, out, i * STRIP, least(STRIP, out - i * STRIP), kind);
  return 0;
}

/* y = W_down h + b_down with h = act(W_up x + b_up), or h = act(W_gate x + b_gate) ⊙ (W_up x + b_up) if there is a gate.
   `hidden` (rows, up->out) holds h, in the dtype of x. Returns 0. */
int decode_feed_forward(const void *x, const Linear *up, const Linear *gate, const Linear *down, void *hidden, void *y,
                          int rows, int kind, int bf16, int threads) {
  int64_t inner = over(up->out, STRIP), outer = over(down->out, STRIP);
  FewRows in = few_rows_of(x, rows, up->in, bf16), middle = few_rows_of(hidden, rows, down->in, bf16);
#pragma omp parallel num_threads(most(1, least(threads, inner)))
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < inner; i++) {
      int64_t first = i * STRIP, n = least(STRIP, up->out - first);
      strip(in, up->weight, up->bias, NULL, hidden, up->out, first, n, gate ? IDENTITY : kind);
      if (gate) strip(in, gate->weight, gate->bias, hidden, hidden, gate->out, first, n, kind);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < outer; i++)
      strip(middle, down->weight, down->bias, NULL, y, down->out, i * STRIP, least(STRIP, down->out - i * STRIP), IDENTITY);
  }
  return 0;
}

/* y = x / sqrt(mean x² + eps) ⊙ w for x (rows, width) and w (width), on one thread. Returns 0. */
int decode_rms_norm(const void *x, const void *w, void *y, int rows, int width, double eps, int bf16) {
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * width;
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
      vec part = get(x, at + i, least(LANES, width - i), bf16);
      squares += part * part;
    }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + (float)eps);
    for (int64_t i = 0; i < width; i += LANES) {
      int64_t n = least(LANES, width - i);
      put(y, at + i, n, bf16, get(x, at + i, n, bf16) * scale * get(w, i, n, bf16));
    }
  }
  return 0;
}
