/* A causal depthwise convolution of one token, as in a step of decoding, and the window of the tokens before the next one.
   The window and all arithmetic are float32; x, w and y are all float32 or all bfloat16. */

#include <omp.h>

#include "vectors.h"

#define FAR 65536 /* products from which two threads take less time than one */

/* y (rows, width) for x (rows, width), the window (rows, δ (taps - 1), width) and w (width, taps); `next` is the next window. */
int decode_convolution(const void *x, const float *window, const void *w, void *y, float *next, int rows, int width, int taps, int dilation,
              int bf16, int threads) {
  const int64_t reach = (int64_t)dilation * (taps - 1), blocks = over(width, LANES), work = (int64_t)rows * width * taps;
#pragma omp parallel for schedule(static) num_threads(work < FAR ? 1 : threads)
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t first = block * LANES, n = least(LANES, width - first);
    for (int64_t row = 0; row < rows; row++) {
      const float *before = window + row * reach * width + first;
      float *after = next + row * reach * width + first;
      vec last = get(x, row * width + first, n, bf16), sum = {0};
      for (int64_t t = 0; t < taps; t++) {
        vec tap = {0};
        for (int64_t i = 0; i < n; i++) {
          int64_t at = (first + i) * taps + t;
          if (bf16) tap[i] = get(w, at, 1, 1)[0];
          else tap[i] = ((const float *)w)[at];
        }
        sum += tap * (t + 1 < taps ? get(before, t * dilation * width, n, 0) : last);
      }
      put(y, row * width + first, n, bf16, sum);
      for (int64_t t = 0; t < reach; t++) put(after, t * width, n, 0, t + 1 < reach ? get(before, (t + 1) * width, n, 0) : last);
    }
  }
  return 0;
}
