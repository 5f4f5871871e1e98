/* Blocks of tokens, for kernels that take one block after another through all their steps, and sums over blocks. */

#pragma once
#include <omp.h>

#include "functions.h"
#include "product.h"

/* The sizes of a call: batch × tokens of dim channels, `width` channels inside the kernel, `out` channels of the output.
   The tokens are bfloat16 if `bf16`; with `pairs`, so are the weights, and maps multiply in it.
   polymix/ops/native/arrays.py has the same struct. */
typedef struct {
  int64_t batch, tokens, dim, width, out, kind, degree, heads, bf16, pairs, threads;
} Sizes;
typedef struct {
  int64_t b, first, rows;
} Block;

INLINE int64_t blocks_of(const Sizes *s) { return over(s->tokens, ROWS); }
INLINE Block block_of(const Sizes *s, int64_t item) {
  int64_t step = s->pairs ? ROW_STEP : 1, each = over(over(s->tokens, blocks_of(s)), step) * step, first = item % blocks_of(s) * each;
  return (Block){item / blocks_of(s), first, least(each, s->tokens - first)};
}
INLINE int hidden(const uint8_t *mask, const Sizes *s, Block k, int64_t row) {
  return mask && !mask[k.b * s->tokens + k.first + row];
}
INLINE vec *at(float *row, int64_t c) { return (vec *)(row + c); }
/* The threads that a call can keep busy. */
INLINE int64_t team_of(const Sizes *s) { return most(1, least(s->threads, s->batch * blocks_of(s))); }

extern _Thread_local int64_t scratch_bytes; /* in scratch.c */
static float *reserve(int64_t size) {
  scratch_bytes = (int64_t)sizeof(vec) * over(size, LANES);
  return room(over(size, LANES));
}
static void clear(float *to, int64_t size) { memset(to, 0, sizeof(float) * size); }

static void load_row(float *to, const float *from, int64_t width) {
  memcpy(to, from, sizeof(float) * width);
  clear(to + width, padded(width) - width);
}

/* to (batch, rows, width) = the sums over the blocks of each sample. All threads of the team must call this. */
static void add_blocks(float *to, const float *parts, int64_t rows, int64_t width, const Sizes *s) {
  int64_t pitch = padded(width), blocks = blocks_of(s);
#pragma omp for schedule(static)
  for (int64_t item = 0; item < s->batch * rows; item++)
    for (int64_t c = 0; c < width; c += LANES) {
      doubles sum = {0};
      const float *from = parts + (item / rows * blocks * rows + item % rows) * pitch + c;
      for (int64_t k = 0; k < blocks; k++, from += rows * pitch) sum += __builtin_convertvector(*(const vec *)from, doubles);
      put(to, item * width + c, least(LANES, width - c), 0, __builtin_convertvector(sum, vec));
    }
}

/* The end of a team whose maps may have multiplied in pairs. */
INLINE void end_team(const Sizes *s) {
  if (s->pairs) end_tiles();
}
/* `width` channels of the tokens of a block, as maps read them. */
INLINE Rows read_block(Rows room, const Tokens *x, Block k, int64_t width, const Sizes *s) {
  return s->pairs ? load_pairs(room, x, k.b, k.first, k.rows, width) : load(room, x, k.b, k.first, k.rows, width, s->bf16);
}
/* The part of a block from row r on that a panel is applied to at once. */
INLINE Block stripe_of(Block k, int64_t r, Packed map) { return (Block){k.b, k.first + r, least(stripe(map), k.rows - r)}; }
/* Where to apply a map to rows that are written to `to` afterwards: there, but not where they are rounded. */
INLINE Rows before(Rows to, Rows room) { return to.halves ? (Rows){room.at, to.width, room.pitch} : to; }
/* Write u Wᵀ + b to a block of y, `width` channels. */
static void write_product(Rows u, Packed w, Rows room, const Tokens *y, Block k, int64_t width, const Sizes *s) {
  for (int64_t c = 0; w.pairs && c < width; c += PANEL)
    for (int64_t r = 0; r < k.rows; r += stripe(w)) {
      Block part = stripe_of(k, r, w);
      Tokens columns = {(uint16_t *)y->data + c, y->batch, y->token};
      product(rows_from(u, r), part.rows, panel_of(w, c), room, 0);
      store(room, &columns, k.b, part.first, part.rows, least(PANEL, width - c), 1);
    }
  if (w.pairs) return;
  Rows out = place_of(room, y, k.b, k.first, k.rows, width, s->bf16);
  product(u, k.rows, w, out, 0);
  store(out, y, k.b, k.first, k.rows, width, s->bf16);
}
/* ---- one factor per head: p (heads, tokens), repeated over the channels of a head, or summed over them ---- */

/* The factors of channels c … c + LANES - 1: of one head, whose factors are at `same`, or of several. */
typedef struct {
  const float *p, *same;
  int64_t c;
} Factors;
INLINE Factors factors_of(const float *p, int64_t c, const Sizes *s) {
  int64_t per_head = s->width / s->heads, head = c / per_head;
  return (Factors){p, p && (head + 1) * per_head >= least(c + LANES, s->width) ? p + head * s->tokens : NULL, c};
}
/* p[head, n] for each of the channels; 1 without p */
INLINE vec factors_at(Factors f, int64_t n, const Sizes *s) {
  if (f.same || !f.p) return all(f.p ? f.same[n] : 1.0f);
  vec factors = {0};
  for (int64_t i = 0; i < least(LANES, s->width - f.c); i++)
    factors[i] = f.p[(f.c + i) / (s->width / s->heads) * s->tokens + n];
  return factors;
}
/* Add the sums of a vector over the channels of each head to p (batch, heads, tokens) at row r of a block. */
INLINE void add_to_heads(float *p, vec v, Factors f, Block k, int64_t r, const Sizes *s) {
  float *place = p + k.b * s->heads * s->tokens + k.first + r;
  if (f.same) place[f.same - f.p] += sum_of(v);
  else
    for (int64_t i = 0; i < least(LANES, s->width - f.c); i++) place[(f.c + i) / (s->width / s->heads) * s->tokens] += v[i];
}
