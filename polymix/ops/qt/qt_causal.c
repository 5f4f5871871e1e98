/* QT's compact form in causal order, including its linear maps, forward only:

       y_i = W_o (numerator / denominator) + b_o,   [numerator, denominator] = φ(q_i) · Σ_(j ≤ i) φ(k_j) ⊗ [v_j, 1]

   with φ(x) = [γ, β x, α x²]. Each thread takes one block of tokens at a time through all steps, head by head. The sums over the
   earlier blocks are handed from block to block (native/turns.h); inside a block, each pair of tokens is computed. So no sum is
   stored for a token, and queries, keys, values and features never leave the cache. */

#include "moments.h"
#include "turns.h"

/* The output channels of a head that a product computes at once: equal parts, since the rest of a division would be slow. */
INLINE int64_t part_of(Heads g) { return padded(over(g.stride, over(g.stride, PANEL))); }
INLINE int64_t powers_of(Heads g) { return g.order * g.stride; }

/* to = [β x, α x²] up to the order, for scale = [γ, β, α] */
static void power_rows(Rows x, Rows to, int64_t rows, const float *scale, Heads g) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < g.stride; c += LANES) {
      vec value = *at(row_of(x, r), c);
      *at(row_of(to, r), c) = scale[1] * value;
      if (g.order == 2) *at(row_of(to, r), g.stride + c) = scale[2] * (value * value);
    }
}

/* m = Σ [γ, features] ⊗ [v, b] over the rows of a block. Where b is 0, features and v are zero. */
static void sum_block(Sums m, Rows features, Rows v, const float *b, int64_t rows, float constant, Columns columns, Heads g) {
  add_rows(v, rows, m.top, 0);
  for (int64_t c = 0; c < g.stride; c += LANES) *at(m.top, c) *= constant;
  add_rows(features, rows, m.below, 0);
  clear(m.last, LANES);
  for (int64_t r = 0; r < rows; r++) *m.last += constant * b[r];
  if (columns.packed) {
    pack_turned(columns.turned, features, rows);
    pack_rows(columns.packed, v, rows);
    for (int64_t first = 0; first < g.stride; first += PANEL)
      outer_pairs(columns.turned, powers_of(g), columns.packed, g.stride, rows, m.top + g.stride, first, powers_of(g), 0);
    return;
  }
  for (int64_t first = 0, part = part_of(g); first < g.stride; first += part)
    for (int64_t t = 0, across = least(part, g.stride - first) / LANES - 1; t < powers_of(g); t += TALL)
      outers[across](features.at + t, features.pitch, v.at + first, v.pitch, rows, m.top + (1 + t) * g.stride + first, g.stride, 0);
}

/* The sums of a head from moments as in PyTorch, the inverse of write_sums; zeros without moments. */
static void read_sums(float *to, const float *from, Heads g) {
  clear(to, size_of_sums(g));
  if (!from) return;
  Sums m = sums_at(to, g);
  for (int64_t f = 0; f < 1 + g.order * g.each; f++, from += g.each + 1) {
    int64_t row = f ? 1 + (f - 1) / g.each * g.stride + (f - 1) % g.each : 0;
    for (int64_t c = 0; c < g.each; c += LANES) *at(m.top, row * g.stride + c) = get(from, c, least(LANES, g.each - c), 0);
    if (f) m.below[row - 1] = from[g.each];
    else *m.last = from[g.each];
  }
}

/* What one head of a block is computed in. Where maps multiply in pairs, products inside a head do, too. */
typedef struct {
  Rows keys, both, inputs;              /* features of the keys; those of the queries, then their similarity to each key; as inputs */
  float *turned, *values, *weights;     /* the keys as a map; [moments, values] as a map, and [moments of ones, ones] */
  float *constant, *below, *now, *edge; /* γ² as a bias; denominators; the sums before the block, and those of turns.h */
  uint16_t *narrowed;                   /* the numbers of `values` */
  Columns columns;
  int pairs;
} Room;
INLINE int64_t deep(Heads g) { return powers_of(g) + ROWS; } /* the inputs of the last product */
INLINE int64_t size_of_turned_keys(Heads g, int pairs) { return pairs ? TURNED * powers_of(g) : 0; }
INLINE int64_t size_of_room(Heads g, int pairs) {
  int64_t rows = size_of_rows(powers_of(g)) + size_of_rows(deep(g)) + (pairs ? size_of_rows(deep(g)) : 0);
  int64_t columns = size_of_turned_keys(g, pairs) + (pairs ? (ROWS + deep(g)) / 2 * g.stride : 0);
  return rows + columns + powers_of(g) * ROWS + g.stride * deep(g) + deep(g) + padded(PANEL) + ROWS + 2 * size_of_sums(g);
}
static Room take_room(float **own, Heads g, int pairs) {
  Rows keys = take_rows(own, powers_of(g)), both = take_rows(own, deep(g));
  Room u = {.keys = keys, .both = both, .inputs = both, .pairs = pairs};
  u.turned = take(own, powers_of(g) * ROWS), u.values = take(own, g.stride * deep(g)), u.weights = take(own, deep(g));
  u.constant = take(own, PANEL), u.below = take(own, ROWS), u.now = take(own, size_of_sums(g)), u.edge = take(own, size_of_sums(g));
  if (!pairs) return u;
  u.inputs = as_input(take_rows(own, deep(g)), 1);
  u.columns.turned = take(own, size_of_turned_keys(g, 1)), u.columns.packed = take(own, ROWS / 2 * g.stride);
  u.narrowed = (uint16_t *)take(own, deep(g) / 2 * g.stride);
  return u;
}

/* The features of the keys as a map from features to similarities, in panels of tokens. */
static void turn_keys(Room u, int64_t rows, Heads g) {
  Rows keys = round_input(u.keys, rows, u.pairs);
  for (int64_t first = 0, out = padded(rows), powers = powers_of(g); first < out; first += PANEL) {
    int64_t width = least(PANEL, out - first);
    if (u.pairs) {
      const uint16_t *from = (const uint16_t *)rows_from(keys, first).at;
      pack_pairs((uint32_t *)(u.turned + first * pairs_of(powers)), from, width, least(width, rows - first), powers, keys.pitch, 1);
      continue;
    }
    for (int64_t o = 0; o < width; o += LANES)
      for (int64_t i = 0; i < powers; i += LANES) {
        words square[LANES];
        UNROLL for (int k = 0; k < LANES; k++) square[k] = *(const words *)(row_of(keys, first + o + k) + i);
        transpose(square);
        UNROLL for (int k = 0; k < LANES; k++) *(words *)(u.turned + first * powers + (i + k) * width + o) = square[k];
      }
  }
}
INLINE Packed keys_of(Room u, int64_t first, int64_t rows, Heads g) {
  int64_t depth = u.pairs ? pairs_of(powers_of(g)) : powers_of(g);
  return (Packed){u.turned + first * depth, u.constant, least(PANEL, padded(rows) - first), powers_of(g), u.pairs};
}

/* The moments and the values as one map from features and similarities to numerators, and the weights of the denominators. */
static void join_values(Room u, Rows v, const float *b, int64_t rows, Heads g) {
  Sums m = sums_at(u.now, g);
  int64_t powers = powers_of(g), wide = u.pairs ? g.stride : part_of(g);
  for (int64_t first = 0; first < g.stride; first += wide) {
    int64_t width = least(wide, g.stride - first), at_first = first * deep(g);
    for (int64_t i = 0; i < powers + rows; i++)
      for (int64_t c = 0; c < width; c += LANES) {
        vec value = *at(i < powers ? m.top + (1 + i) * g.stride + first : row_of(v, i - powers) + first, c);
        if (u.pairs) *(halves *)(u.narrowed + i * width + c) = narrow(value);
        else *at(u.values + at_first, i * width + c) = value;
      }
  }
  memcpy(u.weights, m.below, sizeof(float) * powers);
  load_row(u.weights + powers, b, rows);
  if (!u.pairs) return;
  memset(u.narrowed + (powers + rows) * g.stride, 0, sizeof(uint16_t) * (ROWS - rows) * g.stride);
  for (int64_t first = 0, part = part_of(g); first < g.stride; first += part) {
    int64_t width = least(part, g.stride - first);
    pack_pairs((uint32_t *)(u.values + first * pairs_of(deep(g))), u.narrowed + first, width, width, deep(g), 1, g.stride);
  }
}
/* Of the `in` first inputs. */
INLINE Packed values_of(Room u, int64_t first, int64_t in, Heads g) {
  int64_t depth = u.pairs ? pairs_of(deep(g)) : deep(g);
  return (Packed){u.values + first * depth, sums_at(u.now, g).top + first, least(part_of(g), g.stride - first), in, u.pairs};
}

/* Round `width` numbers of a row of `both`, from `from` on, for `inputs`. */
INLINE void round_part(Room u, int64_t r, int64_t from, int64_t width) {
  for (int64_t c = from; u.pairs && c < from + width; c += LANES) put_at(u.inputs, r, c, *at(row_of(u.both, r), c));
}

/* z = the quotients of a block's rows; `bounds` are the least denominators. z may be q. */
static void attend(Room u, Rows q, Rows v, const float *b, int64_t rows, const float *scale, const float *bounds, Rows z, Heads g) {
  Sums m = sums_at(u.now, g);
  int64_t powers = powers_of(g), out = padded(rows);
  power_rows(q, u.both, rows, scale, g);
  turn_keys(u, rows, g);
  join_values(u, v, b, rows, g);
  for (int64_t c = 0; c < g.stride; c += LANES) *at(m.top, c) *= scale[0];
  for (int64_t c = 0; c < PANEL; c += LANES) *at(u.constant, c) = all(scale[0] * scale[0]);
  Rows similar = {u.both.at + powers, out, u.both.pitch, 0};
  for (int64_t r = 0; r < rows && u.pairs; r++) {
    clear(rows_from(u.inputs, r).at, u.inputs.pitch / 2); /* similarities to later keys, which products may read */
    round_part(u, r, 0, powers);
  }
  for (int64_t r = 0; r < rows; r += PANEL) { /* only panels of keys up to that of the queries */
    int64_t number = least(PANEL, rows - r), end = least(r + PANEL, out);
    Rows queries = rows_from(u.inputs, r);
    for (int64_t c = 0; c < end; c += PANEL)
      product(queries, number, keys_of(u, c, rows, g), rows_from(columns_of(similar, c), r), 0);
    for (int64_t i = r; i < r + number; i++) {
      float *row = row_of(u.both, i);
      clear(row + powers + i + 1, end - i - 1); /* the later keys */
      vec sum = {0};
      for (int64_t c = 0; c < powers + end; c += LANES) sum += *at(row, c) * *at(u.weights, c);
      float below = scale[0] * *m.last + sum_of(sum);
      u.below[i] = 1.0f / (below < bounds[i] ? bounds[i] : below); /* NaN stays NaN */
      round_part(u, i, powers, end);
    }
    for (int64_t first = 0; first < g.stride; first += part_of(g))
      product(queries, number, values_of(u, first, powers + r + number, g), rows_from(columns_of(z, first), r), 0);
    for (int64_t i = r; i < r + number; i++)
      for (int64_t c = 0; c < g.stride; c += LANES) *at(row_of(z, i), c) *= u.below[i];
  }
}

/* y (batch, tokens, out). W holds W_q, W_k and W_v; scale (heads, 3) holds γ, β and α of each head, bounds (batch, tokens) the
   least denominators. start and end (batch, heads, 1 + order · each, each + 1), either NULL: the moments before the first token
   and after the last. The order is at least 1. Returns 0, or 1 if memory cannot be allocated. */
int qt_causal(const Tokens *x, const Linear *w, const float *scale, const uint8_t *mask, const float *bounds, float *start,
              float *end, const Linear *last, const Tokens *y, const Sizes *s) {
  Heads g = heads_of(s);
  int64_t items = s->batch * blocks_of(s), width = g.number * g.stride, size = size_of_sums(g);
  int64_t each = size_of_rows(s->dim) + size_of_rows(3 * width) + size_of_rows(s->out) + ROWS + size_of_room(g, s->pairs);
  int64_t packed = size_of_packed(3 * width, s->dim) + size_of_packed(s->out, width);
  packed += size_to(3 * g.number, s->dim, g) + size_from(s->out, g);
  int64_t shared = padded(2 * g.number * size) + padded(2 * g.number);
  float *whole = reserve(packed + shared + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, 3 * width, s->dim, s->pairs);
  Packed finish = take_packed_for(&place, s->out, width, s->pairs);
  float *room_map = take(&place, size_to(3 * g.number, s->dim, g)), *room_last = take(&place, size_from(s->out, g));
  double *so_far = (double *)take(&place, 2 * g.number * size);
  int64_t *turns = (int64_t *)take(&place, 2 * g.number), next = 0;
  clear((float *)turns, 2 * g.number);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *b = take(&own, ROWS);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, 3 * width), room_out = take_rows(&own, s->out);
    Room room = take_room(&own, g, s->pairs);
    Rows q = {u.at, width, u.pitch, 0}, pairs = {u.at + width, 2 * width, u.pitch, 0};
    Linear to_heads = map_to(room_map, w, 3 * g.number, g, s->pairs), from_heads = map_from(room_last, last, g, s->pairs);
    pack_linear(map, &to_heads);
    pack_linear(finish, &from_heads);
    /* Blocks are taken in order, so that a waiting thread always waits for a running one. */
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
      Block k = block_of(s, item);
      product(read_block(room_in, x, k, s->dim, s), k.rows, map, u, 0);
      hide(pairs, k, mask, b, s);
      for (int64_t h = 0; h < g.number; h++) {
        const float *of_head = scale + 3 * h;
        Rows values = head_of(pairs, g.number + h, g), queries = head_of(q, h, g);
        power_rows(head_of(pairs, h, g), room.keys, k.rows, of_head, g);
        sum_block(sums_at(room.now, g), room.keys, values, b, k.rows, of_head[0], room.columns, g);
        if (!k.first) read_sums(room.edge, start ? sums_of_head(start, k.b, h, g) : NULL, g);
        take_turn(turns + h, item, so_far + h * size, room.now, room.edge, size, s);
        if (end && k.first + k.rows == s->tokens) write_sums(sums_of_head(end, k.b, h, g), room.edge, g);
        attend(room, queries, values, b, k.rows, of_head, bounds + k.b * s->tokens + k.first, queries, g);
      }
      write_product(round_input(q, k.rows, s->pairs), finish, room_out, y, k, s->out, s);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}
