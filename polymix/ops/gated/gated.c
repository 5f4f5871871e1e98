/* The output stage of PoM and Poly-SA, forward and backward: a linear map of the tokens, gated by a pooled vector, and a
   projection. The outputs of the inner map never leave the cache. */

#include "functions.h"
#include "gradients.h"

/* ---- gated: W_o (act(W x_n + b) ⊙ H ⊙ p_n) + b_o, with one H per sample and one factor p_n per head, or 1. `last` is W_o
   and may be NULL for no projection. ---- */

/* to = act(u) ⊙ H ⊙ p for the columns of a map from `first` on, as `last` reads it; `to` may be u. */
INLINE void gate_rows(Rows u, Rows to, Block k, int64_t first, const float *gate, const float *p, const Sizes *s, const int kind) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    vec by = *at((float *)gate, first + c);
    Factors factors = factors_of(p, first + c, s);
    for (int64_t r = 0; r < k.rows; r++) {
      vec value = act(*at(u.at + r * u.pitch, c), kind) * by * factors_at(factors, k.first + r, s);
      put_input(rows_from(to, r).at, c, value, to.halves);
    }
  }
}

/* y (batch, tokens, out) for gate (batch, width). Returns 0, or 1 if memory cannot be allocated. */
int linear_gated(const Tokens *x, const Linear *w, const float *gate, const float *p, const Linear *last, const Tokens *y,
                 const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = size_of_rows(s->dim) + size_of_rows(s->width) + size_of_rows(s->out) + size_of_rows(PANEL) + width;
  float *whole = reserve(size_of_packed(s->width, s->dim) + size_of_packed(s->out, s->width) + team_of(s) * each);
  float *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed end = take_packed_for(&place, s->out, s->width, last && s->pairs);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *gate_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), room_out = take_rows(&own, s->out);
    Rows v = take_rows(&own, PANEL), gated = as_input(u, end.pairs);
    pack_linear(map, w);
    if (last) pack_linear(end, last);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      load_row(gate_row, gate + k.b * s->width, s->width);
      Rows in = read_block(room_in, x, k, s->dim, s);
      for (int64_t c = 0; c < width; c += PANEL)
        for (int64_t r = 0; r < k.rows; r += stripe(map)) {
          Block part = stripe_of(k, r, map);
          Rows to = rows_from(columns_of(gated, c), r), from = end.pairs ? v : to;
          from.width = to.width;
          product(rows_from(in, r), part.rows, panel_of(map, c), from, 0);
#define GATE(kind) gate_rows(from, to, part, c, gate_row, p, s, kind)
          OF_KIND(quickly(s->kind, s->pairs), GATE)
#undef GATE
        }
      for (int64_t r = 0; r < k.rows; r++) end_input(u.at + r * u.pitch, width, end.pairs);
      if (last) write_product(gated, end, room_out, y, k, s->out, s);
      else store(u, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}

/* Replace u by act(u) ⊙ H ⊙ p, and its gradient dz by the gradient of u; add the gradient of H to `sums`. */
INLINE void gated_back(Rows u, Rows dz, Block k, const float *gate, float *factors, const float *p, float *sums,
                       float *product_row, float *grad_p, const Sizes *s, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    if (p) spread_row(factors, p, k.first + r, s);
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

/* The gradients of x, W, b, gate, p (batch, heads, tokens), W_o and b_o, for grad (batch, tokens, out). Each but that of the
   gate may be NULL if nobody asks for it. */
int linear_gated_backward(const Tokens *grad, const Tokens *x, const Linear *w, const float *gate, const float *p,
                          const Linear *last, const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_gate,
                          float *grad_p, float *grad_last, float *grad_last_b, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + size_of_rows(s->out) + 3 * width;
  Totals t = {0};
  Gradient of_w = gradient_of(&t, grad_w, grad_b, width, padded(s->dim));
  Gradient of_last = gradient_of(&t, grad_last, grad_last_b, padded(s->out), width);
  int64_t packed = size_of_packed(s->width, s->dim) + size_of_packed(s->width, s->out);
  packed += grad_x ? size_of_packed(s->dim, s->width) : 0;
  float *whole = reserve(packed + items * width + settle(&t, items, s) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, s->width, s->dim, s->pairs), back = {0};
  Packed end_back = take_packed_for(&place, s->width, s->out, s->pairs);
  if (grad_x) back = take_packed_for(&place, s->dim, s->width, s->pairs);
  float *totals = take_totals(&place, t, s), *parts = take(&place, items * width);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *factors = take(&own, width), *gate_row = take(&own, width);
    float *product_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    Rows u = take_rows(&own, s->width), dz = take_rows(&own, s->width);
    pack_linear(map, w);
    if (grad_x) pack_back(back, w);
    if (last) pack_back(end_back, last);
    clear(factors, width);
    spread_row(factors, NULL, 0, s);
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      int64_t item = item_of(&share);
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s->dim, s);
      load_row(gate_row, gate + k.b * s->width, s->width);
      product(in, k.rows, map, u, 0);
      Rows g = {0};
      if (last) product(g = read_block(room_g, grad, k, s->out, s), k.rows, end_back, dz, 0);
      else copy(dz, grad, k.b, k.first, k.rows, s->out, s->bf16);
      clear(parts + item * width, width);
#define BACK(kind) gated_back(u, dz, k, gate_row, factors, p, parts + item * width, product_row, grad_p, s, kind)
      OF_KIND(quickly(s->kind, s->pairs), BACK)
#undef BACK
      add_gradient(&share, of_last, g, u, k.rows);
      add_gradient(&share, of_w, dz, in, k.rows);
      if (grad_x) write_product(round_input(dz, k.rows, s->pairs), back, room_out, grad_x, k, s->dim, s);
    }
#pragma omp barrier
    add_blocks(grad_gate, parts, 1, s->width, s);
    write_gradient(of_w, totals, s->width, s->dim, t, s);
    write_gradient(of_last, totals, s->out, s->width, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}
