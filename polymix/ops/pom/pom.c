/* PoM: the pooled powers of a linear map of the tokens, forward and backward; the whole mixer, and its causal form, forward
   only. The outputs of the maps never leave the cache.

   Each thread takes one block of tokens at a time through all steps. Sums over tokens are float32 within a block and double
   over the blocks, in a fixed order, so they do not depend on the number of threads. The gradients of weights are summed as
   gradients.h says. */

#include "functions.h"
#include "gradients.h"
#include "turns.h"

/* ---- powers: Σ_j h_j^p for p = 1 … degree, h = act(W x_j + b) ---- */

/* sums (degree, step) += the powers of act(u), summed over the real rows of a part of a block */
INLINE void add_powers(Rows u, Block k, const uint8_t *mask, const Sizes *s, float *sums, int64_t step, const int kind) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    vec first = {0}, second = {0};
    for (int64_t r = 0; r < k.rows; r++) {
      if (hidden(mask, s, k, r)) continue;
      vec h = act(*at(u.at + r * u.pitch, c), kind), power = h * h;
      first += h, second += power;
      for (int64_t p = 2; p < s->degree; p++) *at(sums + p * step, c) += power *= h;
    }
    *at(sums, c) += first;
    if (s->degree > 1) *at(sums + step, c) += second;
  }
}

/* sums (batch, degree, width). Returns 0, or 1 if memory cannot be allocated, like all functions here. */
int linear_powers(const Tokens *x, const Linear *w, const uint8_t *mask, float *sums, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), part = s->degree * width;
  int64_t each = size_of_rows(s->dim) + size_of_rows(PANEL);
  float *whole = reserve(size_of_packed(s->width, s->dim) + items * part + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, s->width, s->dim, s->pairs);
  float *parts = take(&place, items * part);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each;
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, PANEL);
    pack_linear(map, w);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s->dim, s);
      float *block_sums = parts + item * part;
      clear(block_sums, part);
      for (int64_t c = 0; c < width; c += PANEL) {
        Packed panel = panel_of(map, c);
        u.width = panel.out;
        for (int64_t r = 0; r < k.rows; r += stripe(map)) {
          Block part = stripe_of(k, r, map);
          product(rows_from(in, r), part.rows, panel, u, 0);
#define ADD(kind) add_powers(u, part, mask, s, block_sums + c, width, kind)
          OF_KIND(quickly(s->kind, s->pairs), ADD)
#undef ADD
        }
      }
    }
    add_blocks(sums, parts, s->degree, s->width, s);
    end_team(s);
  }
  free(whole);
  return 0;
}

/* to = act'(u) Σ_p p g_p h^(p - 1), the gradient of u, where g (degree, step) is that of the sums; `to` may be u. */
INLINE void powers_back(Rows u, Rows to, Block k, const uint8_t *mask, const Sizes *s, float *g, int64_t step, const int kind) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    vec first = *at(g, c), second = s->degree > 1 ? 2.0f * *at(g + step, c) : (vec){0};
    for (int64_t r = 0; r < k.rows; r++) {
      vec z = *at(u.at + r * u.pitch, c), h = act(z, kind), by = first + second * h, power = h;
      for (int64_t p = 2; p < s->degree; p++) by += *at(g + p * step, c) * (power *= h) * (float)(p + 1);
      put_at(to, r, c, hidden(mask, s, k, r) ? (vec){0} : by * slope(z, h, kind));
    }
  }
}

/* The gradients of x, W and b for grad (batch, degree, width). Each may be NULL if nobody asks for it, as in all backward
   functions. */
int linear_powers_backward(const float *grad, const Tokens *x, const Linear *w, const uint8_t *mask, const Tokens *grad_x,
                           float *grad_w, float *grad_b, const Sizes *s) {
  int64_t width = padded(s->width), each = 2 * size_of_rows(s->dim) + size_of_rows(s->width) + s->degree * width;
  each += size_of_rows(PANEL);
  Totals t = {0};
  Gradient of_w = gradient_of(&t, grad_w, grad_b, width, padded(s->dim));
  int64_t packed = size_of_packed(s->width, s->dim) + (grad_x ? size_of_packed(s->dim, s->width) : 0);
  float *whole = reserve(packed + settle(&t, s->batch * blocks_of(s), s) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, s->width, s->dim, s->pairs), back = {0};
  if (grad_x) back = take_packed_for(&place, s->dim, s->width, s->pairs);
  float *totals = take_totals(&place, t, s);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *g = take(&own, s->degree * width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    Rows room_u = take_rows(&own, PANEL), du = as_input(take_rows(&own, s->width), s->pairs);
    pack_linear(map, w);
    if (grad_x) pack_back(back, w);
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      Block k = block_of(s, item_of(&share));
      Rows in = read_block(room_in, x, k, s->dim, s);
      for (int64_t p = 0; p < s->degree; p++) load_row(g + p * width, grad + (k.b * s->degree + p) * s->width, s->width);
      for (int64_t c = 0; c < width; c += PANEL)
        for (int64_t r = 0; r < k.rows; r += stripe(map)) {
          Block part = stripe_of(k, r, map);
          Rows to = rows_from(columns_of(du, c), r), u = before(to, room_u);
          product(rows_from(in, r), part.rows, panel_of(map, c), u, 0);
#define BACK(kind) powers_back(u, to, part, mask, s, g + c, width, kind)
          OF_KIND(quickly(s->kind, s->pairs), BACK)
#undef BACK
        }
      end_inputs(du, k.rows);
      add_gradient(&share, of_w, du, in, k.rows);
      if (grad_x) write_product(du, back, room_out, grad_x, k, s->dim, s);
    }
#pragma omp barrier
    write_gradient(of_w, totals, s->width, s->dim, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}

/* ---- without gradients: powers and the gated output (gated.c) in one call ---- */

int linear_gated(const Tokens *x, const Linear *w, const float *gate, const float *p, const Linear *last, const Tokens *y,
                 const Sizes *s);

/* The real tokens of sample b, at least 1. */
static float count_real(const uint8_t *mask, int64_t b, const Sizes *s) {
  int64_t count = mask ? 0 : s->tokens;
  for (int64_t n = 0; mask && n < s->tokens; n++) count += mask[b * s->tokens + n];
  return (float)most(count, 1);
}

/* y = W_o [gate(W_s x_i + b_s) ⊙ H] + b_o, where H is the sum or the mean of Σ_p α_p ⊙ h(W_h x_j + b_h)^p over the real tokens j;
   α is (width, degree). */
int pom_pooled(const Tokens *x, const Linear *poly, const Linear *gate, const Linear *proj, const float *alpha,
               const uint8_t *mask, const Tokens *y, int gating, int mean, const Sizes *s) {
  int64_t each = s->degree * s->width;
  float *sums = reserve(s->batch * (each + s->width)), *pooled = sums + s->batch * each;
  int64_t own = scratch_bytes;
  if (!sums) return 1;
  int failed = linear_powers(x, poly, mask, sums, s);
  own += scratch_bytes;
  for (int64_t b = 0; b < s->batch && !failed; b++) {
    float count = mean ? count_real(mask, b, s) : 1.0f;
    for (int64_t c = 0; c < s->width; c++) {
      float sum = 0.0f;
      for (int64_t p = 0; p < s->degree; p++) sum += sums[b * each + p * s->width + c] * alpha[c * s->degree + p];
      pooled[b * s->width + c] = sum / count;
    }
  }
  Sizes output = *s;
  output.kind = gating;
  failed = failed || linear_gated(x, gate, pooled, NULL, proj, y, &output);
  scratch_bytes = most(own, scratch_bytes);
  free(sums);
  return failed;
}

/* ---- causal: one pass, in which the terms, their running sums and the gate never leave the cache ---- */

/* Replace u by the running sums over its rows of Σ_p α_p h^p with h = act(u) and α (degree, step). `totals` gets the last. */
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

/* counts[r] = the number of real tokens of the block up to row r */
static void run_count(float *counts, Block k, const uint8_t *mask, const Sizes *s) {
  float seen = 0.0f;
  for (int64_t r = 0; r < k.rows; r++) counts[r] = seen += !hidden(mask, s, k, r);
}

/* Replace the counts by the factors of the running sums: 1 / count for a mean, else 1. */
static void divisors(float *counts, int64_t rows, float before, int mean) {
  for (int64_t r = 0; r < rows; r++) {
    float seen = before + counts[r];
    counts[r] = mean && seen > 1.0f ? 1.0f / seen : 1.0f;
  }
}

/* Replace the running sums u of a block by act(g) ⊙ (u + before) ⊙ by, with one factor `by` per row. */
INLINE void gate_sums(Rows u, Rows g, int64_t rows, const float *before, const float *by, const int kind) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < u.width; c += LANES) {
      vec *value = at(u.at + r * u.pitch, c);
      *value = act(*at(g.at + r * g.pitch, c), kind) * ((*value + *at((float *)before, c)) * by[r]);
    }
}

/* y = W_o [gate(W_s x_i + b_s) ⊙ H_i] + b_o, where H_i is the sum or the mean of Σ_p α_p ⊙ h(W_h x_j + b_h)^p over the real
   tokens j up to i; α is (degree, width). start (batch, width) and seen (batch), both or neither NULL: the sum and the count before
   the first token; end (batch, width) or NULL: the sum after the last. Returns 0, or 1 if memory cannot be allocated. */
int pom_causal(const Tokens *x, const Linear *poly, const Linear *gate, const Linear *proj, const float *alpha,
               const uint8_t *mask, const float *start, const int64_t *seen, float *end, const Tokens *y, int gating, int mean,
               const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), size = width + LANES; /* sums and a count */
  int64_t each = size_of_rows(s->dim) + size_of_rows(s->width) + size_of_rows(PANEL) + size_of_rows(s->out) + ROWS + 2 * size;
  int64_t packed = 2 * size_of_packed(s->width, s->dim) + size_of_packed(s->out, s->width);
  float *whole = reserve(packed + s->degree * width + 2 * size + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed poly_map = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed gate_map = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed finish = take_packed_for(&place, s->out, s->width, s->pairs);
  float *factors = take(&place, s->degree * width);
  double *so_far = (double *)take(&place, 2 * size);
  int64_t next = 0, turn = 0;
  for (int64_t p = 0; p < s->degree; p++) load_row(factors + p * width, alpha + p * s->width, s->width);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *counts = take(&own, ROWS), *sums = take(&own, size);
    float *edge = take(&own, size);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), g = take_rows(&own, PANEL);
    Rows room_out = take_rows(&own, s->out);
    pack_linear(poly_map, poly);
    pack_linear(gate_map, gate);
    pack_linear(finish, proj);
    /* Blocks are taken in order, so that a waiting thread always waits for a running one. */
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s->dim, s);
      clear(sums, size);
      for (int64_t c = 0; c < width; c += PANEL) {
        Rows panel = columns_of(u, c);
        product(in, k.rows, panel_of(poly_map, c), panel, 0);
#define RUN(kind) run_sums(panel, k, mask, factors + c, width, sums + c, s, kind)
        OF_KIND(quickly(s->kind, s->pairs), RUN)
#undef RUN
      }
      run_count(counts, k, mask, s);
      sums[width] = counts[k.rows - 1];
      if (!k.first) clear(edge, size);
      if (!k.first && start) load_row(edge, start + k.b * s->width, s->width);
      if (!k.first && seen) edge[width] = seen[k.b];
      take_turn(&turn, item, so_far, sums, edge, size, s);
      if (end && k.first + k.rows == s->tokens) memcpy(end + k.b * s->width, edge, sizeof(float) * s->width);
      divisors(counts, k.rows, sums[width], mean);
      for (int64_t c = 0; c < width; c += PANEL) {
        Rows panel = columns_of(u, c);
        product(in, k.rows, panel_of(gate_map, c), g, 0);
#define GATE(kind) gate_sums(panel, g, k.rows, sums + c, counts, kind)
        OF_KIND(quickly(gating, s->pairs), GATE)
#undef GATE
      }
      write_product(round_input(u, k.rows, s->pairs), finish, room_out, y, k, s->out, s);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}
