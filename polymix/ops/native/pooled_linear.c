/* Linear maps of the tokens that are pooled over them, or multiplied with what was pooled, without their outputs ever
   leaving the cache: what PoM, Poly-SA and Poly-NL are made of, forward and backward.

   Each thread takes a block of tokens through all of it. Sums over tokens are made block by block in float32, then over the
   blocks in their order in double, whatever the number of threads; a weight's gradient thread by thread. */

#include "blocks.h"
#include "functions.h"

/* ---- powers: Σ_j h_j^p for p = 1 … degree, h = act(W x_j + b) ---- */

/* sums (degree, step) += the powers of act(u) */
INLINE void add_powers(Rows u, Block k, const uint8_t *mask, const Sizes *s, float *sums, int64_t step, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    if (hidden(mask, s, k, r)) continue;
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec h = act(*at(u.at + r * u.pitch, c), kind), power = h;
      *at(sums, c) += h;
      for (int64_t p = 1; p < s->degree; p++) *at(sums + p * step, c) += power *= h;
    }
  }
}

/* sums (batch, degree, width). Returns 0, or 1 where there was no memory, as all of these do. */
int linear_powers(const Tokens *x, const Linear *w, const uint8_t *mask, float *sums, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), part = s->degree * width;
  int64_t each = size_of_rows(s->dim) + size_of_rows(PANEL);
  float *whole = reserve(size_of_packed(s->width, s->dim) + items * part + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed(&place, s->width, s->dim);
  float *parts = take(&place, items * part);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each;
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, PANEL);
    pack_linear(map, w);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      float *its = parts + item * part;
      clear(its, part);
      for (int64_t c = 0; c < width; c += PANEL) {
        Packed panel = panel_of(map, c);
        u.width = panel.out;
        product(in, k.rows, panel, u, 0);
#define ADD(kind) add_powers(u, k, mask, s, its + c, width, kind)
        OF_KIND(s->kind, ADD)
#undef ADD
      }
    }
    add_blocks(sums, parts, s->degree, s->width, s);
  }
  free(whole);
  return 0;
}

/* u -> its gradient, act'(u) Σ_p p g_p h^(p - 1), where g is that of the sums, (degree, width) */
INLINE void powers_back(Rows u, Block k, const uint8_t *mask, const Sizes *s, float *g, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    float *row = u.at + r * u.pitch;
    if (hidden(mask, s, k, r)) {
      clear(row, u.width);
      continue;
    }
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec z = *at(row, c), h = act(z, kind), by = *at(g + (s->degree - 1) * u.width, c) * (float)s->degree;
      for (int64_t p = s->degree - 1; p > 0; p--) by = by * h + *at(g + (p - 1) * u.width, c) * (float)p;
      *at(row, c) = by * slope(z, h, kind);
    }
  }
}

/* The gradients of x, W and b, for grad (batch, degree, width). */
int linear_powers_backward(const float *grad, const Tokens *x, const Linear *w, const uint8_t *mask, const Tokens *grad_x,
                           float *grad_w, float *grad_b, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), ins = padded(s->dim), sums = width * ins + width;
  int64_t each = 2 * size_of_rows(s->dim) + size_of_rows(s->width) + s->degree * width + sums;
  float *whole = reserve(size_of_packed(s->width, s->dim) + size_of_packed(s->dim, s->width) + s->threads * each);
  float *place = whole;
  if (!whole) return 1;
  Packed map = take_packed(&place, s->width, s->dim), back = take_packed(&place, s->dim, s->width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *total = take(&own, sums), *g = take(&own, s->degree * width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), u = take_rows(&own, s->width);
    clear(total, sums);
    pack_linear(map, w);
    pack_back(back, w);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      for (int64_t p = 0; p < s->degree; p++) load_row(g + p * width, grad + (k.b * s->degree + p) * s->width, s->width);
      product(in, k.rows, map, u, 0);
#define BACK(kind) powers_back(u, k, mask, s, g, kind)
      OF_KIND(s->kind, BACK)
#undef BACK
      product_back(u, in, back, total, room_out, grad_x, k, s);
    }
    add_threads(grad_w, place, each, s->width, s->dim);
    add_threads(grad_b, place + sums - width, each, 1, s->width);
  }
  free(whole);
  return 0;
}

/* ---- pairs: Σ_j p_j ⊙ (W_1 x_j + b_1) ⊙ (W_2 x_j + b_2), p a number for each head, or 1; W holds W_1, then W_2 ---- */

static Linear half_of(const Linear *w, int second) {
  int64_t out = w->out / 2;
  return (Linear){w->weight + second * out * w->in, w->bias ? w->bias + second * out : NULL, out, w->in};
}

/* row = what p (heads, tokens) has for token n, in every channel of its head */
static void spread_row(float *row, const float *p, int64_t n, const Sizes *s) {
  int64_t wide = s->width / s->heads;
  for (int64_t h = 0; h < s->heads; h++, row += wide) {
    float value = p ? p[h * s->tokens + n] : 1.0f;
    for (int64_t c = 0; c < wide; c++) row[c] = value;
  }
}
/* p (batch, heads, tokens) of a block = the sum of the row over each head */
static void sum_row(const float *row, float *p, Block k, int64_t r, const Sizes *s) {
  int64_t wide = s->width / s->heads;
  for (int64_t h = 0; h < s->heads; h++) {
    vec sum = {0};
    for (int64_t c = 0; c < wide; c += LANES) sum += get(row, h * wide + c, least(LANES, wide - c), 0);
    float whole = 0;
    for (int i = 0; i < LANES; i++) whole += sum[i];
    p[(k.b * s->heads + h) * s->tokens + k.first + r] = whole;
  }
}

/* sums (batch, width) */
int linear_pairs(const Tokens *x, const Linear *w, const float *p, const uint8_t *mask, float *sums, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = size_of_rows(s->dim) + 2 * size_of_rows(s->width) + width;
  float *whole = reserve(2 * size_of_packed(s->width, s->dim) + items * width + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed first = take_packed(&place, s->width, s->dim), second = take_packed(&place, s->width, s->dim);
  float *parts = take(&place, items * width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *by = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), v = take_rows(&own, s->width);
    Linear w_1 = half_of(w, 0), w_2 = half_of(w, 1);
    pack_linear(first, &w_1);
    pack_linear(second, &w_2);
    clear(by, width);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      product(in, k.rows, first, u, 0);
      product(in, k.rows, second, v, 0);
      float *its = parts + item * width;
      clear(its, width);
      for (int64_t r = 0; r < k.rows; r++) {
        if (hidden(mask, s, k, r)) continue;
        spread_row(by, p, k.first + r, s);
        for (int64_t c = 0; c < width; c += LANES) *at(its, c) += *at(u.at + r * u.pitch, c) * *at(v.at + r * v.pitch, c) * *at(by, c);
      }
    }
    add_blocks(sums, parts, 1, s->width, s);
  }
  free(whole);
  return 0;
}

/* The gradients of x, W, b and p, that one (batch, heads, tokens) or NULL, for grad (batch, width). */
int linear_pairs_backward(const float *grad, const Tokens *x, const Linear *w, const float *p, const uint8_t *mask,
                          const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_p, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), ins = padded(s->dim), square = width * ins;
  int64_t sums = 2 * (square + width);
  int64_t each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + 3 * width + sums;
  float *whole = reserve(2 * (size_of_packed(s->width, s->dim) + size_of_packed(s->dim, s->width)) + s->threads * each);
  float *place = whole;
  if (!whole) return 1;
  Packed first = take_packed(&place, s->width, s->dim), first_back = take_packed(&place, s->dim, s->width);
  Packed second = take_packed(&place, s->width, s->dim), second_back = take_packed(&place, s->dim, s->width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *total = take(&own, sums), *bias = total + 2 * square;
    float *by = take(&own, width), *g = take(&own, width), *product_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    Rows u = take_rows(&own, s->width), v = take_rows(&own, s->width);
    Linear w_1 = half_of(w, 0), w_2 = half_of(w, 1);
    pack_linear(first, &w_1);
    pack_back(first_back, &w_1);
    pack_linear(second, &w_2);
    pack_back(second_back, &w_2);
    clear(total, sums);
    clear(by, width);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(g, grad + k.b * s->width, s->width);
      product(in, k.rows, first, u, 0);
      product(in, k.rows, second, v, 0);
      for (int64_t r = 0; r < k.rows; r++) {
        float *a = u.at + r * u.pitch, *b = v.at + r * v.pitch;
        if (hidden(mask, s, k, r)) {
          clear(a, width);
          clear(b, width);
          continue;
        }
        spread_row(by, p, k.first + r, s);
        for (int64_t c = 0; c < width; c += LANES) {
          vec left = *at(a, c), right = *at(b, c), its = *at(g, c);
          *at(product_row, c) = its * left * right;
          its *= *at(by, c);
          *at(a, c) = its * right;
          *at(b, c) = its * left;
        }
        if (grad_p) sum_row(product_row, grad_p, k, r, s);
      }
      outer(u, in, k.rows, total);
      outer(v, in, k.rows, total + square);
      add_rows(u, k.rows, bias);
      add_rows(v, k.rows, bias + width);
      Rows out = place_of(room_out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
      product(u, k.rows, first_back, out, 0);
      product(v, k.rows, second_back, out, 1);
      store(out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
    }
    for (int half = 0; half < 2; half++) {
      add_threads(grad_w + half * s->width * s->dim, place + half * square, each, s->width, s->dim);
      add_threads(grad_b + half * s->width, place + 2 * square + half * width, each, 1, s->width);
    }
  }
  free(whole);
  return 0;
}

/* ---- gated: W_o (act(W x_n + b) ⊙ H ⊙ p_n) + b_o with H one a sample and p a number for each head, or 1; `last` may be
   NULL for no W_o ---- */

INLINE void gate_rows(Rows u, Block k, const float *gate, float *by, const float *p, const Sizes *s, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    spread_row(by, p, k.first + r, s);
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *place = at(u.at + r * u.pitch, c);
      *place = act(*place, kind) * *at((float *)gate, c) * *at(by, c);
    }
  }
}

/* y (batch, tokens, out), for gate (batch, width) */
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
    float *own = place + omp_get_thread_num() * each, *by = take(&own, width), *its = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), room_out = take_rows(&own, s->out);
    pack_linear(map, w);
    if (last) pack_linear(end, last);
    clear(by, width);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(its, gate + k.b * s->width, s->width);
      product(in, k.rows, map, u, 0);
#define GATE(kind) gate_rows(u, k, its, by, p, s, kind)
      OF_KIND(s->kind, GATE)
#undef GATE
      if (last) write_product(u, end, room_out, y, k, s->out, s);
      else store(u, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
  }
  free(whole);
  return 0;
}

/* u -> act(u) ⊙ H ⊙ p, whose gradient dz -> that of u; adds up those of H */
INLINE void gated_back(Rows u, Rows dz, Block k, const float *gate, float *by, const float *p, float *sums,
                       float *product_row, float *grad_p, const Sizes *s, const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    spread_row(by, p, k.first + r, s);
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *value = at(u.at + r * u.pitch, c), *grad = at(dz.at + r * dz.pitch, c), f = *at(by, c), h = *at((float *)gate, c);
      vec z = *value, a = act(z, kind), through = *grad * a;
      *at(sums, c) += through * f;
      *at(product_row, c) = through * h;
      *value = a * h * f;
      *grad *= h * f * slope(z, a, kind);
    }
    if (grad_p) sum_row(product_row, grad_p, k, r, s);
  }
}

/* The gradients of x, W, b, gate, p (batch, heads, tokens) or NULL, W_o and b_o, for grad (batch, tokens, out). */
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
    float *by = take(&own, width), *its = take(&own, width), *product_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    Rows u = take_rows(&own, s->width), dz = take_rows(&own, s->width);
    pack_linear(map, w);
    pack_back(back, w);
    if (last) pack_back(end_back, last);
    clear(total, sums);
    clear(by, width);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(its, gate + k.b * s->width, s->width);
      product(in, k.rows, map, u, 0);
      Rows g = {0};
      if (last) product(g = load(room_g, grad, k.b, k.first, k.rows, s->out, s->bf16), k.rows, end_back, dz, 0);
      else copy(dz, grad, k.b, k.first, k.rows, s->out, s->bf16);
      clear(parts + item * width, width);
#define BACK(kind) gated_back(u, dz, k, its, by, p, parts + item * width, product_row, grad_p, s, kind)
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
