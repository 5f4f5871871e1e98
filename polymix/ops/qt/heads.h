/* Rows of heads in which every head starts at a whole vector and is padded with zeros to whole vectors; linear maps to and from
   such rows, and the gradients of their weights. */

#pragma once
#include "gradients.h"

/* `number` heads of `each` channels, padded to `stride` channels in a row */
typedef struct {
  int64_t number, each, stride, order;
} Heads;
INLINE Heads heads_of(const Sizes *s) {
  int64_t each = s->width / s->heads;
  return (Heads){s->heads, each, padded(each), s->degree};
}
INLINE Rows head_of(Rows x, int64_t h, Heads g) { return (Rows){x.at + h * g.stride, g.stride, x.pitch}; }
INLINE float *row_of(Rows x, int64_t r) { return x.at + r * x.pitch; }

/* ---- maps of heads that do not fill vectors ---- */

INLINE int64_t size_spaced(int64_t runs, int64_t each, int64_t stride) { return each == stride ? 0 : padded(runs * stride); }

/* Copy runs of `each` numbers of `size` bytes so that they lie `stride` apart, padded with zeros; if each == stride, return `from`.
   All threads of the team must call this. */
static const float *spaced(float **room, const float *from, int64_t runs, int64_t each, int64_t stride, int64_t size) {
  if (!from || each == stride) return from;
  float *to = take(room, runs * stride);
#pragma omp for schedule(static)
  for (int64_t run = 0; run < runs; run++) {
    char *place = (char *)to + run * stride * size;
    memcpy(place, (const char *)from + run * each * size, each * size);
    memset(place + each * size, 0, (stride - each) * size);
  }
  return to;
}
INLINE int64_t bytes_of_weights(int pairs) { return pairs ? sizeof(uint16_t) : sizeof(float); }
/* The map whose outputs are `heads` padded heads, and the map whose inputs are all padded heads. */
INLINE int64_t size_to(int64_t heads, int64_t in, Heads g) {
  return size_spaced(heads, g.each * in, g.stride * in) + size_spaced(heads, g.each, g.stride);
}
static Linear map_to(float *room, const Linear *w, int64_t heads, Heads g, int pairs) {
  const float *weight = spaced(&room, w->weight, heads, g.each * w->in, g.stride * w->in, bytes_of_weights(pairs));
  return (Linear){weight, spaced(&room, w->bias, heads, g.each, g.stride, sizeof(float)), heads * g.stride, w->in};
}
INLINE int64_t size_from(int64_t out, Heads g) { return size_spaced(out * g.number, g.each, g.stride); }
static Linear map_from(float *room, const Linear *w, Heads g, int pairs) {
  const float *weight = spaced(&room, w->weight, w->out * g.number, g.each, g.stride, bytes_of_weights(pairs));
  return (Linear){weight, w->bias, w->out, g.number * g.stride};
}

/* to (rows, width) = the sums at `from` without the padding, which has rows of `pitch`; of every row_stride rows only row_each
   are real, and of every `stride` columns only `each`. All threads of the team must call this. */
static void write_spaced(float *to, int64_t rows, int64_t row_each, int64_t row_stride, int64_t width, int64_t each,
                         int64_t stride, const float *sums, int64_t pitch, Totals t, const Sizes *s) {
  if (!to) return;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float *from = sums + (row / row_each * row_stride + row % row_each) * pitch;
    for (int64_t c = 0; c < width; c += each, from += stride)
      for (int64_t i = 0; i < each; i += LANES)
        put(to, row * width + c + i, least(LANES, each - i), 0, sum_of_groups(from + i, t, s));
  }
}
/* Write the gradients of a map from `in` channels to `heads` heads. */
static void write_to_heads(Gradient of_w, const float *sums, int64_t heads, Heads g, int64_t in, Totals t, const Sizes *s) {
  int64_t out = heads * g.each, ins = padded(in);
  write_spaced(of_w.weight, out, g.each, g.stride, in, in, ins, sums + of_w.of_weight, ins, t, s);
  write_spaced(of_w.bias, 1, 1, 1, out, g.each, g.stride, sums + of_w.of_bias, 0, t, s);
}
