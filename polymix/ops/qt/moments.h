/* The moments of QT's heads, on the rows of one block: Σ [1, q, q²] ⊗ [v, b], and features times moments, with the backward. */

#pragma once
#include "heads.h"

/* The moments Σ [1, q, q²] ⊗ [v, b] of one head: those of v (1 + order · stride, stride), those of b (order · stride), and Σ b. */
typedef struct {
  float *top, *below, *last;
} Sums;
/* Moments as maps that features are multiplied with: from q and q² to v, from v back to both; and the moments of b. In pairs, the
   first map takes q and q² at once. */
typedef struct {
  Packed query[2], back;
  float *below, last;
} MomentMaps;
/* Where a thread packs features and values to multiply them in pairs; NULL for products in float32. */
typedef struct {
  float *turned, *packed;
} Columns;

/* ---- moments; without padding, as in PyTorch, they are (1 + order · each, each + 1) ---- */

INLINE int64_t size_of_sums(Heads g) { return (1 + g.order * g.stride) * g.stride + g.order * g.stride + LANES; }
INLINE Sums sums_at(float *at, Heads g) {
  float *below = at + (1 + g.order * g.stride) * g.stride;
  return (Sums){at, below, below + g.order * g.stride};
}

/* The moments of head h of sample b. */
INLINE float *sums_of_head(float *to, int64_t b, int64_t h, Heads g) {
  return to + (b * g.number + h) * (1 + g.order * g.each) * (g.each + 1);
}

/* b[r] = 1 if row r is a real token; else 0, and the row is zeroed. */
static void hide(Rows u, Block k, const uint8_t *mask, float *b, const Sizes *s) {
  for (int64_t r = 0; r < k.rows; r++) {
    b[r] = !hidden(mask, s, k, r);
    if (!b[r]) clear(row_of(u, r), u.width);
  }
}

static void square_rows(Rows q, Rows squares, int64_t rows, Heads g) {
  for (int64_t r = 0; r < rows && g.order == 2; r++)
    for (int64_t c = 0; c < g.stride; c += LANES) {
      vec x = *at(row_of(q, r), c);
      *at(row_of(squares, r), c) = x * x;
    }
}

/* Add the moments of a block's q, q², v and b. */
static void add_sums(Sums m, Rows q, Rows squares, Rows v, const float *b, int64_t rows, Columns columns, Heads g) {
  if (columns.packed && g.order) pack_rows(columns.packed, v, rows);
  add_rows(v, rows, m.top, 1);
  float sum_b = 0.0f;
  for (int64_t r = 0; r < rows; r++) sum_b += b[r];
  *m.last += sum_b;
  for (int64_t p = 0; p < g.order; p++) {
    Rows power = p ? squares : q;
    float *total = m.top + (1 + p * g.stride) * g.stride;
    if (columns.packed) pack_turned(columns.turned, power, rows);
    for (int64_t first = 0; columns.packed && first < g.stride; first += PANEL)
      outer_pairs(columns.turned, g.stride, columns.packed, g.stride, rows, total, first, g.stride, 1);
    if (!columns.packed) outer(power, v, rows, total);
    for (int64_t c = 0; c < g.stride; c += LANES) {
      vec sum = {0};
      for (int64_t r = 0; r < rows; r++) sum += b[r] * *at(row_of(power, r), c);
      *at(m.below, p * g.stride + c) += sum;
    }
  }
}

static void write_sums(float *to, float *from, Heads g) {
  Sums m = sums_at(from, g);
  for (int64_t f = 0; f < 1 + g.order * g.each; f++, to += g.each + 1) {
    int64_t row = f ? 1 + (f - 1) / g.each * g.stride + (f - 1) % g.each : 0;
    for (int64_t c = 0; c < g.each; c += LANES) put(to, c, least(LANES, g.each - c), 0, *at(m.top, row * g.stride + c));
    to[g.each] = f ? m.below[row - 1] : *m.last;
  }
}

/* ---- features times moments, and the backward ---- */

INLINE int64_t size_of_list(Heads g) { return padded(over(g.number * sizeof(MomentMaps), sizeof(float))); }
/* Of one head; in pairs, with their bfloat16 before it is packed. */
INLINE int64_t size_of_moment_maps(Heads g, int pairs) {
  int64_t in = g.order * g.stride;
  int64_t queries = pairs ? size_of_packed(g.stride, in) + in * g.stride / 2 : 2 * size_of_packed(g.stride, g.stride);
  return queries + size_of_packed(in, g.stride) + in;
}
/* The rows for features in pairs. */
INLINE int64_t size_of_features(Heads g, int pairs) { return pairs ? size_of_rows(g.order * g.stride) : 0; }
INLINE Rows take_features(float **room, Heads g, int pairs) { return pairs ? take_rows(room, g.order * g.stride) : (Rows){0}; }
/* Load the moments of one head as maps in pairs. */
static MomentMaps take_moment_pairs(float **room, const float *from, int with_back, Heads g) {
  int64_t in = g.order * g.stride;
  MomentMaps m = {.last = from[g.each]};
  m.query[0] = take_packed_for(room, g.stride, in, 1);
  m.back = take_packed_for(room, in, g.stride, 1);
  m.below = take(room, in);
  uint16_t *moments = (uint16_t *)take(room, in * g.stride / 2);
  clear(m.back.bias, in);
  clear(m.below, in);
  for (int64_t c = 0; c < g.stride; c += LANES) *at(m.query[0].bias, c) = get(from, c, most(0, least(LANES, g.each - c)), 0);
  for (int64_t i = 0; i < in; i++) {
    int real = i % g.stride < g.each;
    if (real) from += g.each + 1;
    for (int64_t c = 0; c < g.stride; c += LANES)
      *(halves *)(moments + i * g.stride + c) = narrow(get(from, c, real ? most(0, least(LANES, g.each - c)) : 0, 0));
    if (real) m.below[i] = from[g.each];
  }
  for (int64_t first = 0; first < g.stride; first += PANEL) {
    Packed part = panel_of(m.query[0], first);
    pack_pairs((uint32_t *)part.at, moments + first, part.out, part.out, in, 1, g.stride);
  }
  for (int64_t first = 0; with_back && first < in; first += PANEL) {
    Packed part = panel_of(m.back, first);
    pack_pairs((uint32_t *)part.at, moments + first * g.stride, part.out, part.out, g.stride, g.stride, 1);
  }
  return m;
}
/* Entry (o, i) of a packed map is at index i · step of the result. */
INLINE float *column_of(Packed p, int64_t o, int64_t *step) {
  int64_t first = o - o % (ACROSS * LANES);
  *step = least(ACROSS * LANES, p.out - first);
  return p.at + first * p.in + o - first;
}
/* Load the moments of one head from (1 + order · each, each + 1). The map from v back is loaded only if `with_back`. */
static MomentMaps take_moment_maps(float **room, const float *from, int with_back, int pairs, Heads g) {
  if (pairs) return take_moment_pairs(room, from, with_back, g);
  if (g.each < g.stride) clear(*room, size_of_moment_maps(g, 0));
  MomentMaps m;
  for (int p = 0; p < 2; p++) m.query[p] = take_packed(room, g.stride, g.stride);
  m.back = take_packed(room, g.order * g.stride, g.stride);
  m.below = take(room, g.order * g.stride);
  m.last = from[g.each];
  for (int64_t c = 0; c < g.stride; c += LANES) *at(m.query[0].bias, c) = get(from, c, least(LANES, g.each - c), 0);
  clear(m.query[1].bias, g.stride);
  clear(m.back.bias, g.order * g.stride);
  for (int64_t p = 0; p < g.order; p++)
    for (int64_t i = 0; i < g.each; i++) {
      const float *row = from += g.each + 1;
      int64_t step;
      for (int64_t c = 0; c < g.stride; c += LANES) {
        float *column = column_of(m.query[p], c, &step);
        *at(column, i * step) = get(row, c, least(LANES, g.each - c), 0);
      }
      float *column = column_of(m.back, p * g.stride + i, &step);
      for (int64_t c = 0; with_back && c < g.each; c++) column[c * step] = row[c];
      m.below[p * g.stride + i] = row[g.each];
    }
  return m;
}

/* to = [1, q, q²] · the moments of v; in pairs, `features` gets q and q² in bfloat16 */
static void query(const MomentMaps *m, Rows q, Rows squares, int64_t rows, Rows features, Rows to, Heads g) {
  if (m->query[0].pairs && g.order) {
    for (int64_t r = 0; r < rows; r++) {
      float *row = row_of(features, r);
      for (int64_t c = 0; c < g.stride; c += LANES) {
        put_input(row, c, *at(row_of(q, r), c), 1);
        if (g.order == 2) put_input(row, g.stride + c, *at(row_of(squares, r), c), 1);
      }
      end_input(row, g.order * g.stride, 1);
    }
    product(as_input(features, 1), rows, m->query[0], to, 0);
    return;
  }
  for (int64_t p = 0; p < g.order; p++) product(p ? squares : q, rows, m->query[p], to, p);
  for (int64_t r = 0; r < rows && !g.order; r++) memcpy(row_of(to, r), m->query[0].bias, sizeof(float) * g.stride);
}

/* Replace q by its gradient; `both` holds the products of v with the maps back to q and q². */
static void slopes(const MomentMaps *m, Rows q, Rows both, const float *b, int64_t rows, Heads g) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < g.stride; c += LANES) {
      vec *place = at(row_of(q, r), c), sum = {0};
      if (g.order == 2) sum = 2.0f * *place * (*at(row_of(both, r), g.stride + c) + b[r] * *at(m->below, g.stride + c));
      if (g.order) sum += *at(row_of(both, r), c) + b[r] * *at(m->below, c);
      *place = sum;
    }
}

/* ---- quotients ---- */

/* z = the quotients of one head, with denominators `below` of at least `bound`; also computes squares = q². */
static void divide(const MomentMaps *m, Rows q, Rows squares, int64_t rows, float bound, float *below, Rows features, Rows z,
                   Heads g) {
  for (int64_t r = 0; r < rows; r++) {
    vec sum = {0};
    for (int64_t c = 0; c < g.order * g.stride && c < g.stride; c += LANES) {
      vec x = *at(row_of(q, r), c);
      sum += x * *at(m->below, c);
      if (g.order < 2) continue;
      *at(row_of(squares, r), c) = x * x;
      sum += x * x * *at(m->below, g.stride + c);
    }
    below[r] = m->last + sum_of(sum);
  }
  query(m, q, squares, rows, features, z, g);
  for (int64_t r = 0; r < rows; r++) {
    float by = 1.0f / (below[r] < bound ? bound : below[r]); /* NaN stays NaN */
    for (int64_t c = 0; c < g.stride; c += LANES) *at(row_of(z, r), c) *= by;
  }
}

/* Replace dz, the gradients of the quotients z, by those of the numerators, and `below` by those of the denominators. */
static void divide_back(Rows z, Rows dz, float *below, float bound, int64_t rows, Heads g) {
  for (int64_t r = 0; r < rows; r++) {
    float by = 1.0f / (below[r] < bound ? bound : below[r]);
    vec sum = {0};
    for (int64_t c = 0; c < g.stride; c += LANES) {
      vec *place = at(row_of(dz, r), c);
      sum += (*place *= by) * *at(row_of(z, r), c);
    }
    below[r] = below[r] < bound ? 0.0f : -sum_of(sum);
  }
}
