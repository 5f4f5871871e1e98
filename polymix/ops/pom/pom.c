/* PoM: powers of a linear map of the tokens, pooled over them, forward and backward; and the whole of the causal form,
   forward. The map's outputs never leave the cache.

   A thread takes a block of tokens through all of it. Sums over tokens are made block by block in float32, then over the
   blocks in order in double, so they do not depend on the number of threads; a weight's gradient is summed thread by
   thread. */

#include <sched.h>

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

/* ---- causal: one pass, in which neither the terms and their running sums nor the gate leave the cache ----

   Threads take blocks of tokens in order. Each runs the sums over its own block, waits for its turn, takes over the sums of
   the blocks of its sample before it and hands them on with its own added, then does the rest. The rest is the larger part,
   so the next thread hardly ever waits, and one long sequence occupies all threads. Sums are made within blocks in float32,
   then over the blocks in order in double, so they do not depend on the threads. */

/* u -> the running sums over its rows of Σ_p α_p h^p, h = act(u), for α (degree, step); the totals are the last of them */
INLINE void run_sums(Rows u, Block k, const uint8_t *mask, const float *alpha, int64_t step, float *totals, const Sizes *s,
                     const int kind) {
  for (int64_t r = 0; r < k.rows; r++) {
    int real = !hidden(mask, s, k, r);
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *value = at(u.at + r * u.pitch, c), h = act(*value, kind), term = {0};
      for (int64_t p = s->degree - 1; p >= 0; p--) term = (term + *at((float *)alpha + p * step, c)) * h;
      if (real) *at(totals, c) += term;
      *value = *at(totals, c);
    }
  }
}

/* counts[r] = the real tokens of a block up to row r, as a running sum like the others */
static void run_count(float *counts, Block k, const uint8_t *mask, const Sizes *s) {
  float seen = 0.0f;
  for (int64_t r = 0; r < k.rows; r++) counts[r] = seen += !hidden(mask, s, k, r);
}

/* counts -> what the sums are multiplied with */
static void divisors(float *counts, int64_t rows, float before, int mean) {
  for (int64_t r = 0; r < rows; r++) {
    float seen = before + counts[r];
    counts[r] = mean && seen > 1.0f ? 1.0f / seen : 1.0f;
  }
}

/* running sums u of a block -> act(g) ⊙ (u + before) ⊙ by, `by` one a row */
INLINE void gate_sums(Rows u, Rows g, int64_t rows, const float *before, const float *by, const int kind) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *value = at(u.at + r * u.pitch, c);
      *value = act(*at(g.at + r * g.pitch, c), kind) * ((*value + *at((float *)before, c)) * by[r]);
    }
}

/* totals of block `item` -> what its sample has before it, by turns; where threads are more than processors, who waits makes
   room. A sample of one block waits for nobody. */
static void take_turn(int64_t *turn, int64_t item, double *so_far, float *totals, int64_t size, const Sizes *s) {
  int64_t later = item % blocks_of(s);
  if (blocks_of(s) == 1) {
    clear(totals, size);
    return;
  }
  for (int tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != item; tries++)
    if (tries > 1000) sched_yield();
  for (int64_t c = 0; c < size; c++) {
    double before = later ? so_far[c] : 0.0;
    so_far[c] = before + totals[c];
    totals[c] = (float)before;
  }
  __atomic_store_n(turn, item + 1, __ATOMIC_RELEASE);
}

/* y = W_o [gate(W_s x_i + b_s) ⊙ H_i] + b_o with H_i = Σ_j Σ_p α_p ⊙ h(W_h x_j + b_h)^p over the real tokens j up to i, or
   their mean; α (degree, width). Returns 0, or 1 where there was no memory. */
int pom_causal(const Tokens *x, const Linear *poly, const Linear *gate, const Linear *proj, const float *alpha,
               const uint8_t *mask, const Tokens *y, int gating, int mean, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), size = width + LANES; /* of sums, and a count */
  int64_t each = size_of_rows(s->dim) + size_of_rows(s->width) + size_of_rows(PANEL) + size_of_rows(s->out) + ROWS + size;
  int64_t packed = 2 * size_of_packed(s->width, s->dim) + size_of_packed(s->out, s->width);
  float *whole = reserve(packed + s->degree * width + 2 * size + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed into = take_packed(&place, s->width, s->dim), ask = take_packed(&place, s->width, s->dim);
  Packed end = take_packed(&place, s->out, s->width);
  float *factors = take(&place, s->degree * width);
  double *so_far = (double *)take(&place, 2 * size);
  int64_t next = 0, turn = 0;
  for (int64_t p = 0; p < s->degree; p++) load_row(factors + p * width, alpha + p * s->width, s->width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *counts = take(&own, ROWS), *sums = take(&own, size);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), g = take_rows(&own, PANEL);
    Rows room_out = take_rows(&own, s->out);
    pack_linear(into, poly);
    pack_linear(ask, gate);
    pack_linear(end, proj);
    /* in their order, so that whoever waits, waits for one who works */
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      clear(sums, size);
      for (int64_t c = 0; c < width; c += PANEL) {
        Rows panel = columns_of(u, c);
        product(in, k.rows, panel_of(into, c), panel, 0);
#define RUN(kind) run_sums(panel, k, mask, factors + c, width, sums + c, s, kind)
        OF_KIND(s->kind, RUN)
#undef RUN
      }
      run_count(counts, k, mask, s);
      sums[width] = counts[k.rows - 1];
      take_turn(&turn, item, so_far, sums, size, s);
      divisors(counts, k.rows, sums[width], mean);
      for (int64_t c = 0; c < width; c += PANEL) {
        Rows panel = columns_of(u, c);
        product(in, k.rows, panel_of(ask, c), g, 0);
#define GATE(kind) gate_sums(panel, g, k.rows, sums + c, counts, kind)
        OF_KIND(gating, GATE)
#undef GATE
      }
      write_product(u, end, room_out, y, k, s->out, s);
    }
  }
  free(whole);
  return 0;
}
