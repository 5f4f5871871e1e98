/* The output stage of PoM and Poly-SA, forward and backward: a linear map of the tokens, gated by a pooled vector, and a
   projection. The outputs of the inner map never leave the cache. */

#include "blocks.h"
#include "functions.h"

/* ---- gated: W_o (act(W x_n + b) ⊙ H ⊙ p_n) + b_o, with one H per sample and one factor p_n per head, or 1. `last` is W_o
   and may be NULL for no projection. ---- */

INLINE void gate_rows(Rows u, Block k, const float *gate, float *factors, const float *p, const Sizes *s, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    spread_row(factors, p, k.first + r, s);
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *place = at(u.at + r * u.pitch, c);
      *place = act(*place, kind) * *at((float *)gate, c) * *at(factors, c);
    }
  }
}

/* y (batch, tokens, out) for gate (batch, width). Returns 0, or 1 if memory cannot be allocated. */
int linear_gated(const Tokens *x, const Linear *w, const float *gate, const float *p, const Linear *last, const Tokens *y,
                 const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = size_of_rows(s->dim) + size_of_rows(s->width) + size_of_rows(s->out) + 2 * width;
  float *whole = reserve(size_of_packed(s->width, s->dim) + size_of_packed(s->out, s->width) + s->threads * each);
  float *place = whole;
  if (!whole) return 1;
  Packed map = take_packed(&place, s->width, s->dim), end = take_packed(&place, s->out, s->width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *factors = take(&own, width), *gate_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), room_out = take_rows(&own, s->out);
    pack_linear(map, w);
    if (last) pack_linear(end, last);
    clear(factors, width);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(gate_row, gate + k.b * s->width, s->width);
      product(in, k.rows, map, u, 0);
#define GATE(kind) gate_rows(u, k, gate_row, factors, p, s, kind)
      OF_KIND(s->kind, GATE)
#undef GATE
      if (last) write_product(u, end, room_out, y, k, s->out, s);
      else store(u, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
  }
  free(whole);
  return 0;
}

/* Replace u by act(u) ⊙ H ⊙ p, and its gradient dz by the gradient of u; add the gradient of H to `sums`. */
INLINE void gated_back(Rows u, Rows dz, Block k, const float *gate, float *factors, const float *p, float *sums,
                       float *product_row, float *grad_p, const Sizes *s, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    spread_row(factors, p, k.first + r, s);
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *value = at(u.at + r * u.pitch, c), *grad = at(dz.at + r * dz.pitch, c), f = *at(factors, c), h = *at((float *)gate, c);
      vec z = *value, a = act(z, kind), through = *grad * a;
      *at(sums, c) += through * f;
      *at(product_row, c) = through * h;
      *value = a * h * f;
      *grad *= h * f * slope(z, a, kind);
    }
    if (grad_p) sum_row(product_row, grad_p, k, r, s);
  }
}

/* The gradients of x, W, b, gate, p (batch, heads, tokens; may be NULL), W_o and b_o, for grad (batch, tokens, out). */
int linear_gated_backward(const Tokens *grad, const Tokens *x, const Linear *w, const float *gate, const float *p,
                          const Linear *last, const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_gate,
                          float *grad_p, float *grad_last, float *grad_last_b, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), ins = padded(s->dim), ends = padded(s->out);
  int64_t of_w = width * ins, of_last = ends * width, sums = of_w + width + of_last + ends;
  int64_t each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + size_of_rows(s->out) + 3 * width + sums;
  int64_t packed = size_of_packed(s->width, s->dim) + size_of_packed(s->dim, s->width) + size_of_packed(s->width, s->out);
  float *whole = reserve(packed + items * width + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed(&place, s->width, s->dim), back = take_packed(&place, s->dim, s->width);
  Packed end_back = take_packed(&place, s->width, s->out);
  float *parts = take(&place, items * width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *total = take(&own, sums), *total_last = total + of_w + width;
    float *factors = take(&own, width), *gate_row = take(&own, width), *product_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    Rows u = take_rows(&own, s->width), dz = take_rows(&own, s->width);
    pack_linear(map, w);
    pack_back(back, w);
    if (last) pack_back(end_back, last);
    clear(total, sums);
    clear(factors, width);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(gate_row, gate + k.b * s->width, s->width);
      product(in, k.rows, map, u, 0);
      Rows g = {0};
      if (last) product(g = load(room_g, grad, k.b, k.first, k.rows, s->out, s->bf16), k.rows, end_back, dz, 0);
      else copy(dz, grad, k.b, k.first, k.rows, s->out, s->bf16);
      clear(parts + item * width, width);
#define BACK(kind) gated_back(u, dz, k, gate_row, factors, p, parts + item * width, product_row, grad_p, s, kind)
      OF_KIND(s->kind, BACK)
#undef BACK
      if (last) {
        outer(g, u, k.rows, total_last);
        add_rows(g, k.rows, total_last + of_last);
      }
      product_back(dz, in, back, total, room_out, grad_x, k, s);
    }
    add_blocks(grad_gate, parts, 1, s->width, s);
    add_threads(grad_w, place, each, s->width, s->dim);
    add_threads(grad_b, place + of_w, each, 1, s->width);
    if (last) {
      add_threads(grad_last, place + of_w + width, each, s->out, s->width);
      add_threads(grad_last_b, place + of_w + width + of_last, each, 1, s->out);
    }
  }
  free(whole);
  return 0;
}
