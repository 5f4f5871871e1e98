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
      put_at(to, r, c, value);
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
          Rows to = rows_from(columns_of(gated, c), r), from = before(to, v);
          product(rows_from(in, r), part.rows, panel_of(map, c), from, 0);
#define GATE(kind) gate_rows(from, to, part, c, gate_row, p, s, kind)
          OF_KIND(quickly(s->kind, s->pairs), GATE)
#undef GATE
        }
      end_inputs(gated, k.rows);
      if (last) write_product(gated, end, room_out, y, k, s->out, s);
      else store(u, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}

/* v = act(u) ⊙ H ⊙ p, and du = the gradient of u for that of v, dz; add the gradients of H to `sums`, and of p to grad_p. For the
   columns of a map from `first` on; v may be u, and du dz. */
INLINE void gated_back(Rows u, Rows dz, Rows v, Rows du, Block k, int64_t first, const float *gate, const float *p, float *sums,
                       float *grad_p, const Sizes *s, const int kind) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    vec h = *at((float *)gate, first + c), sum = {0};
    Factors factors = factors_of(p, first + c, s);
    for (int64_t r = 0; r < k.rows; r++) {
      vec z = *at(u.at + r * u.pitch, c), a = act(z, kind), grad = *at(dz.at + r * dz.pitch, c), through = grad * a;
      vec f = factors_at(factors, k.first + r, s);
      sum += through * f;
      if (grad_p) add_to_heads(grad_p, through * h, factors, k, r, s);
      put_at(v, r, c, a * h * f);
      put_at(du, r, c, grad * h * f * slope(z, a, kind));
    }
    *at(sums, first + c) += sum;
  }
}

/* The gradients of x, W, b, gate, p (batch, heads, tokens), W_o and b_o, for grad (batch, tokens, out). Each but that of the
   gate may be NULL if nobody asks for it; that of p is added to. */
int linear_gated_backward(const Tokens *grad, const Tokens *x, const Linear *w, const float *gate, const float *p,
                          const Linear *last, const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_gate,
                          float *grad_p, float *grad_last, float *grad_last_b, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + size_of_rows(s->out) + width;
  each += 2 * size_of_rows(PANEL);
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
    float *own = place + omp_get_thread_num() * each, *gate_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    Rows room_u = take_rows(&own, PANEL), room_dz = take_rows(&own, PANEL);
    Rows v = as_input(take_rows(&own, s->width), s->pairs), du = as_input(take_rows(&own, s->width), s->pairs);
    pack_linear(map, w);
    if (grad_x) pack_back(back, w);
    if (last) pack_back(end_back, last);
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      int64_t item = item_of(&share);
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s->dim, s);
      load_row(gate_row, gate + k.b * s->width, s->width);
      clear(parts + item * width, width);
      Rows g = last ? read_block(room_g, grad, k, s->out, s) : (Rows){0};
      for (int64_t c = 0; c < width; c += PANEL)
        for (int64_t r = 0; r < k.rows; r += stripe(map)) {
          Block part = stripe_of(k, r, map);
          Rows to = rows_from(columns_of(v, c), r), to_du = rows_from(columns_of(du, c), r);
          Rows u = before(to, room_u), dz = before(to_du, room_dz);
          Tokens columns = {(char *)grad->data + c * (s->bf16 ? sizeof(uint16_t) : sizeof(float)), grad->batch, grad->token};
          product(rows_from(in, r), part.rows, panel_of(map, c), u, 0);
          if (last) product(rows_from(g, r), part.rows, panel_of(end_back, c), dz, 0);
          else copy(dz, &columns, k.b, part.first, part.rows, least(PANEL, s->out - c), s->bf16);
#define BACK(kind) gated_back(u, dz, to, to_du, part, c, gate_row, p, parts + item * width, grad_p, s, kind)
          OF_KIND(quickly(s->kind, s->pairs), BACK)
#undef BACK
        }
      end_inputs(du, k.rows);
      add_gradient(&share, of_last, g, v, k.rows);
      add_gradient(&share, of_w, du, in, k.rows);
      if (grad_x) write_product(du, back, room_out, grad_x, k, s->dim, s);
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
