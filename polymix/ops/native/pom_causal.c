/* PoM where every token sees all of the past: one pass, in which neither the terms and their running sums nor the gate
   leave the cache.

   The threads take blocks of tokens in their order. Each runs the sums over its own block, waits for its turn, takes over
   what the blocks of its sample before it sum up to and hands that on with its own added, then does the rest: the larger
   part, so that who comes next has hardly ever to wait, and one long sequence occupies all threads. Sums are made within
   blocks in float32, then over the blocks in their order in double: the threads do not show. */

#include <sched.h>

#include "blocks.h"
#include "functions.h"

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
