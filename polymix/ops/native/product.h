/* Products of a block of tokens with a weight, within one thread. The block stays in cache, so the steps before and after a
   product find it there; a product of all tokens would write them to memory and read them again.

   A tile of T tokens by A vectors of outputs stays in registers during the loop over the inputs. The weight is packed first,
   so that the part that a tile reads is contiguous. Rows are padded to whole vectors. */

#pragma once
#include "vectors.h"

#define ROWS 128 /* tokens in a block */
#define DEEP 192 /* inputs of a tile, so that its part of the packed weight fits in the L1 cache */
#define ACROSS 3
#if LANES == 16
#define TALL 8
#else /* with half the registers */
#define TALL 4
#endif
#define SHORT 2
#include "pairs.h"

/* y = x Wᵀ + b as in nn.Linear, contiguous; the bias may be NULL. Products of blocks take float32, or with `pairs` a weight in
   bfloat16; those of few rows (decode/rows.h) read both as they are. */
typedef struct {
  const float *weight, *bias;
  int64_t out, in;
} Linear;
INLINE const float *weight_at(const Linear *l, int64_t entry, int pairs) {
  return pairs ? (const float *)((const uint16_t *)l->weight + entry) : l->weight + entry;
}
/* Rows of `width` numbers (whole vectors), `pitch` elements apart; with `halves` they are bfloat16. */
typedef struct {
  float *at;
  int64_t width, pitch;
  int halves;
} Rows;
INLINE vec value_at(Rows x, int64_t r, int64_t c) {
  return x.halves ? widen(*(const halves *)((const uint16_t *)x.at + r * x.pitch + c)) : (vec)*(const floats *)(x.at + r * x.pitch + c);
}
INLINE void put_at(Rows x, int64_t r, int64_t c, vec value) {
  if (x.halves) *(halves *)((uint16_t *)x.at + r * x.pitch + c) = narrow(value);
  else *(vec *)(x.at + r * x.pitch + c) = value;
}
/* A packed weight: panels of ACROSS vectors of outputs, each input by input; and the bias. With `pairs` it holds pairs of inputs in
   bfloat16, and is applied to rows of them. */
typedef struct {
  float *at, *bias;
  int64_t out, in;
  int pairs;
} Packed;
INLINE int64_t depth_of(Packed w) { return w.pairs ? pairs_of(w.in) : w.in; }

/* Takes the next `size` floats from a larger buffer. */
INLINE float *take(float **room, int64_t size) {
  float *piece = *room;
  *room += padded(size);
  return piece;
}
/* The distance between rows is an odd number of vectors. With an even one, a column would map to few sets of the L1 cache. */
INLINE int64_t pitch_of(int64_t width) { return padded(width) | LANES; }
#ifdef __SANITIZE_ADDRESS__ /* in tests, the rows end with a gap that nothing may touch */
#include <sanitizer/asan_interface.h>
#define GAP 64
#define FENCE(at) __asan_poison_memory_region(at, sizeof(float) * GAP)
#else
#define GAP 0
#define FENCE(at) (void)(at)
#endif
INLINE int64_t size_of_rows(int64_t width) { return ROWS * pitch_of(width) + GAP; }
INLINE Rows take_rows(float **room, int64_t width) {
  float *rows = take(room, size_of_rows(width));
  FENCE(rows + size_of_rows(width) - GAP);
  return (Rows){rows, padded(width), pitch_of(width)};
}
INLINE int64_t deepest(int64_t in) { return most(in, pairs_of(in)); }
INLINE int64_t size_of_packed(int64_t out, int64_t in) { return padded(out) * (deepest(in) + 1); }

INLINE Packed take_packed(float **room, int64_t out, int64_t in) {
  float *at = take(room, size_of_packed(out, in));
  return (Packed){at, at + padded(out) * deepest(in), padded(out), in, 0};
}
/* For a map of tokens: in bfloat16, without an error, if `pairs`. */
INLINE Packed take_packed_for(float **room, int64_t out, int64_t in, int pairs) {
  Packed map = take_packed(room, out, in);
  map.pairs = pairs;
  return map;
}
/* A square of LANES outputs and as many pairs of inputs. One of the strides is 1. */
INLINE void pack_square(uint32_t *to, int64_t width, const uint16_t *from, int64_t by_out, int64_t by_in) {
  typedef words loose __attribute__((aligned(2), may_alias));
  words square[LANES];
  if (by_in == 1) {
    UNROLL for (int k = 0; k < LANES; k++) square[k] = *(const loose *)(from + k * by_out);
    transpose(square);
  } else
    UNROLL for (int k = 0; k < LANES; k++)
      square[k] = pair_up(*(const halves *)(from + 2 * k * by_in), *(const halves *)(from + (2 * k + 1) * by_in));
  UNROLL for (int k = 0; k < LANES; k++) *(words *)(to + k * width) = square[k];
}
/* A panel of `width` outputs, of which `real` exist, in pairs of inputs. */
static void pack_pairs(uint32_t *to, const uint16_t *from, int64_t width, int64_t real, int64_t in, int64_t by_out, int64_t by_in) {
  for (int64_t c = 0; c < width; c += LANES)
    for (int64_t i = 0; i < pairs_of(in); i += LANES) {
      if (c + LANES <= real && 2 * (i + LANES) <= in) {
        pack_square(to + i * width + c, width, from + c * by_out + 2 * i * by_in, by_out, by_in);
        continue;
      }
      for (int64_t k = i; k < least(i + LANES, pairs_of(in)); k++)
        for (int64_t o = c; o < c + LANES; o++) {
          const uint16_t *pair = from + o * by_out + 2 * k * by_in;
          uint32_t low = o < real && 2 * k < in ? pair[0] : 0, high = o < real && 2 * k + 1 < in ? pair[by_in] : 0;
          to[k * width + o] = low | high << 16;
        }
    }
}

/* Up to LANES outputs of a panel of `width`, whose weights are the rows of `from`: in squares, since writing column by column takes
   three times as long. */
static void pack_columns(float *to, int64_t width, const float *from, int64_t by_out, int64_t outs, int64_t in) {
  typedef words loose __attribute__((aligned(4), may_alias));
  int64_t i = 0;
  for (; outs == LANES && i + LANES <= in; i += LANES) {
    words square[LANES];
    UNROLL for (int k = 0; k < LANES; k++) square[k] = *(const loose *)(from + k * by_out + i);
    transpose(square);
    UNROLL for (int k = 0; k < LANES; k++) *(vec *)(to + (i + k) * width) = (vec)square[k];
  }
  for (; i < in; i++)
    for (int64_t o = 0; o < outs; o++) to[i * width + o] = from[o * by_out + i];
}

/* Pack the weight whose entry (o, i) is weight[o · by_out + i · by_in], in bfloat16 if p.pairs; one of the strides must be 1. All
   threads of the team must call this; those that multiply in pairs call end_tiles in the end. */
static void pack(Packed p, const float *weight, int64_t out, int64_t by_out, int64_t by_in, const float *bias) {
  if (p.pairs) begin_tiles();
#pragma omp for schedule(static)
  for (int64_t first = 0; first < p.out; first += ACROSS * LANES) {
    int64_t width = least(ACROSS * LANES, p.out - first), real = least(width, out - first);
    const float *from = weight + first * by_out;
    float *to = p.at + first * depth_of(p);
    if (p.pairs) pack_pairs((uint32_t *)to, (const uint16_t *)weight + first * by_out, width, real, p.in, by_out, by_in);
    else if (by_in == 1)
      for (int64_t o = 0; o < real; o += LANES) pack_columns(to + o, width, from + o * by_out, by_out, least(LANES, real - o), p.in);
    else
      for (int64_t i = 0; i < p.in; i++)
        for (int64_t o = 0; o < real; o++) to[i * width + o] = from[i * by_in + o];
    for (int64_t i = 0; !p.pairs && real < width && i < p.in; i++)
      for (int64_t o = real; o < width; o++) to[i * width + o] = 0.0f;
    for (int64_t o = 0; o < width; o++) p.bias[first + o] = bias && o < real ? bias[first + o] : 0.0f;
  }
}
static void pack_linear(Packed p, const Linear *l) { pack(p, l->weight, l->out, l->in, 1, l->bias); }
/* Pack the transposed weight, which maps the gradients of the outputs to those of the inputs. */
static void pack_back(Packed p, const Linear *l) { pack(p, l->weight, l->in, 1, l->in, NULL); }

INLINE void product_tile(const float *x, int64_t by, const float *w, int64_t in, const float *start, int64_t step,
                         float *y, int64_t pitch, const int T, const int A) {
  vec sums[TALL][ACROSS], weights[ACROSS];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = *(const floats *)(start + t * step + a * LANES);
  for (int64_t i = 0; i < in; i++, w += A * LANES) {
    UNROLL for (int a = 0; a < A; a++) weights[a] = *(const vec *)(w + a * LANES);
    UNROLL for (int t = 0; t < T; t++) {
      vec value = all(x[t * by + i]);
      UNROLL for (int a = 0; a < A; a++) sums[t][a] += value * weights[a];
    }
  }
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) *(floats *)(y + t * pitch + a * LANES) = sums[t][a];
}

/* total[t, a] = Σ_r x[r, t] y[r, a], or += if `more`. The rows are summed first: the longer a float32 sum, the less precise. */
INLINE void outer_tile(const float *x, int64_t by, const float *y, int64_t pitch, int64_t rows, float *total,
                       int64_t step, int more, const int T, const int A) {
  vec sums[TALL][ACROSS], values[ACROSS];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = (vec){0};
  for (int64_t r = 0; r < rows; r++, x += by, y += pitch) {
    UNROLL for (int a = 0; a < A; a++) values[a] = *(const floats *)(y + a * LANES);
    UNROLL for (int t = 0; t < T; t++) {
      vec value = all(x[t]);
      UNROLL for (int a = 0; a < A; a++) sums[t][a] += value * values[a];
    }
  }
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) {
      vec *to = (vec *)(total + t * step + a * LANES);
      *to = more ? *to + sums[t][a] : sums[t][a];
    }
}

typedef void ProductTile(const float *, int64_t, const float *, int64_t, const float *, int64_t, float *, int64_t);
typedef void OuterTile(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, int);
#define DEFINE_TILES(T, A)                                                                                          \
  static void product_##T##_##A(const float *x, int64_t by, const float *w, int64_t in, const float *start,         \
                                int64_t step, float *y, int64_t pitch) {                                            \
    product_tile(x, by, w, in, start, step, y, pitch, T, A);                                                        \
  }
#define DEFINE_OUTER(A)                                                                                             \
  static void outer_##A(const float *x, int64_t by, const float *y, int64_t pitch, int64_t rows, float *total,      \
                        int64_t step, int more) {                                                                   \
    outer_tile(x, by, y, pitch, rows, total, step, more, TALL, A);                                                  \
  }
#define DEFINE_ACROSS(T) DEFINE_TILES(T, 1) DEFINE_TILES(T, 2) DEFINE_TILES(T, 3)
#if LANES == 16
DEFINE_ACROSS(8)
DEFINE_ACROSS(2)
#define TALL_TILES(KIND) KIND##_8_1, KIND##_8_2, KIND##_8_3
#else
DEFINE_ACROSS(4)
DEFINE_ACROSS(2)
#define TALL_TILES(KIND) KIND##_4_1, KIND##_4_2, KIND##_4_3
#endif
#define TILES_OF(KIND) {{KIND##_2_1, KIND##_2_2, KIND##_2_3}, {TALL_TILES(KIND)}}
/* The tiles for SHORT tokens and for TALL, of each number of vectors. */
typedef ProductTile *const TileTable[2][ACROSS];
static TileTable of_floats = TILES_OF(product);
DEFINE_OUTER(1) DEFINE_OUTER(2) DEFINE_OUTER(3)
static OuterTile *const outers[] = {outer_1, outer_2, outer_3};

/* y = x Wᵀ + b, or y += x Wᵀ if `more`. Up to ROW_STEP - 1 rows after the last are read and written. */
static void product(Rows x, int64_t rows, Packed w, Rows y, int more) {
  int64_t depth = depth_of(w);
  for (int64_t first = 0; w.pairs && first < w.out; first += ACROSS * LANES) {
    int64_t width = least(ACROSS * LANES, w.out - first);
    multiply_pairs((const uint16_t *)x.at, x.pitch, 2, (const uint32_t *)(w.at + first * depth), width, depth, rows,
                   width / LANES, more ? y.at + first : w.bias + first, more ? y.pitch : 0, y.at + first, y.pitch);
  }
  for (int64_t from = 0; !w.pairs && from < depth; from += DEEP) {
    int64_t in = least(DEEP, depth - from);
    for (int64_t first = 0; first < w.out; first += ACROSS * LANES) {
      int64_t width = least(ACROSS * LANES, w.out - first), across = width / LANES - 1;
      const float *panel = w.at + first * depth + from * width;
      for (int64_t r = 0; r < rows;) {
        int high = rows - r > TALL - SHORT;
        float *to = y.at + r * y.pitch + first;
        const float *start = more || from ? to : w.bias + first;
        of_floats[high][across](x.at + r * x.pitch + from, x.pitch, panel, in, start, more || from ? y.pitch : 0, to, y.pitch);
        r += high ? TALL : SHORT;
      }
    }
  }
}

/* A map can be applied in panels of PANEL outputs, so that a panel is processed further while it is in the L1 cache. */
#define PANEL (ACROSS * LANES)
INLINE Packed panel_of(Packed w, int64_t first) {
  return (Packed){w.at + first * depth_of(w), w.bias + first, least(PANEL, w.out - first), w.in, w.pairs};
}
INLINE Rows columns_of(Rows u, int64_t first) {
  float *from = u.halves ? (float *)((uint16_t *)u.at + first) : u.at + first;
  return (Rows){from, least(PANEL, u.width - first), u.pitch, u.halves};
}
INLINE Rows rows_from(Rows x, int64_t r) {
  x.at = x.halves ? (float *)((uint16_t *)x.at + r * x.pitch) : x.at + r * x.pitch;
  return x;
}
/* The rows that a panel is applied to before they are processed further. Few of them, where a product is in tiles: the processor
   multiplies the next ones meanwhile. */
INLINE int64_t stripe(Packed w) { return w.pairs && ROW_STEP > 2 ? ROW_STEP : ROWS; }

/* The first `high` rows of columns [first, first + PANEL) of total (width of x, width of y) = Σ_r x[r] ⊗ y[r], or +=. */
static void outer_panel(Rows x, Rows y, int64_t rows, float *total, int64_t first, int64_t high, int more) {
  int64_t across = least(ACROSS, (y.width - first) / LANES) - 1;
  for (int64_t t = 0; t < high; t += TALL)
    outers[across](x.at + t, x.pitch, y.at + first, y.pitch, rows, total + t * y.width + first, y.width, more);
}
/* total (width of x, width of y) += Σ_r x[r] ⊗ y[r] */
static void outer(Rows x, Rows y, int64_t rows, float *total) {
  for (int64_t first = 0; first < y.width; first += PANEL) outer_panel(x, y, rows, total, first, x.width, 1);
}

/* ---- outer products in pairs of rows: the operands are packed first ---- */

INLINE halves half_at(Rows x, int64_t r, int64_t rows, int64_t c) { /* zero from row `rows` on */
  if (r >= rows) return (halves){0};
  return x.halves ? *(const halves *)((const uint16_t *)x.at + r * x.pitch + c) : narrow(value_at(x, r, c));
}
INLINE words pair_of_rows(Rows x, int64_t r, int64_t rows, int64_t c) {
  return pair_up(half_at(x, r, rows, c), half_at(x, r + 1, rows, c));
}
/* Two rows in a row of words. */
static void pack_rows(float *to, Rows x, int64_t rows) {
  for (int64_t i = 0; i < pairs_of(rows); i++)
    for (int64_t c = 0; c < x.width; c += LANES) *(words *)(to + i * x.width + c) = pair_of_rows(x, 2 * i, rows, c);
}
#ifdef IN_TILES
#define TURNED (ROWS / 2 + LANES) /* words between transposed rows */
INLINE void turn_square(float *to, Rows x, int64_t r, int64_t rows, int64_t c) {
  words square[LANES];
  UNROLL for (int k = 0; k < LANES; k++) square[k] = pair_of_rows(x, r + 2 * k, rows, c);
  transpose(square);
  UNROLL for (int k = 0; k < LANES; k++) *(words *)(to + (c + k) * TURNED + r / 2) = square[k];
}
static void pack_turned(float *to, Rows x, int64_t rows) {
  for (int64_t r = 0; r < 2 * pairs_of(rows); r += 2 * LANES)
    for (int64_t c = 0; c < x.width; c += LANES)
      if (x.halves && r + 2 * LANES <= rows) turn_square(to, (Rows){x.at, x.width, x.pitch, 1}, r, r + 2 * LANES, c);
      else turn_square(to, x, r, rows, c);
}
#else
#define TURNED (ROWS / 2)
#define pack_turned pack_rows /* there, any word of the first operand is read alone */
#endif
/* `outer_panel` for a packed x, turned, and y. */
static void outer_pairs(const float *x, int64_t x_width, const float *y, int64_t y_width, int64_t rows, float *total, int64_t first,
                        int64_t high, int more) {
  static const float none[ACROSS * LANES] __attribute__((aligned(64)));
  int64_t across = least(ACROSS, (y_width - first) / LANES);
#ifdef IN_TILES
  int64_t by = 2 * TURNED, along = 2;
#else
  int64_t by = 2, along = 2 * x_width;
#endif
  (void)x_width;
  multiply_pairs((const uint16_t *)x, by, along, (const uint32_t *)y + first, y_width, pairs_of(rows), high, across,
                 more ? total + first : none, more ? y_width : 0, total + first, y_width);
}

/* total (width) = Σ_r x[r], or += if `more` */
static void add_rows(Rows x, int64_t rows, float *total, int more) {
  for (int64_t c = 0; c < x.width; c += LANES) {
    vec sum = {0}, *to = (vec *)(total + c);
    for (int64_t r = 0; r < rows; r++) sum += value_at(x, r, c);
    *to = more ? *to + sum : sum;
  }
}

/* Whether a kernel can work on rows of an array directly: they need no conversion or padding, and no extra row is touched. */
INLINE int plain(int64_t rows, int64_t width, int bf16) { return !bf16 && rows % SHORT == 0 && width % LANES == 0; }
INLINE Rows rows_of(const Tokens *x, int64_t b, int64_t first, int64_t width) {
  return (Rows){(float *)x->data + b * x->batch + first * x->token, width, x->token};
}

/* Copy tokens [first, first + rows) of sample b, `width` channels, with zeros as padding. */
static void copy(Rows to, const Tokens *x, int64_t b, int64_t first, int64_t rows, int64_t width, int bf16) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = b * x->batch + (first + r) * x->token, c = 0;
    float *row = to.at + r * to.pitch;
    if (bf16)
      for (; c + LANES <= width; c += LANES) *(vec *)(row + c) = get(x->data, at + c, LANES, 1);
    else
      for (; c + LANES <= width; c += LANES) *(vec *)(row + c) = get(x->data, at + c, LANES, 0);
    if (c < width) *(vec *)(row + c) = get(x->data, at + c, width - c, bf16);
  }
}
/* The same tokens for reading only: in the array itself if possible, else copied to `room`. */
INLINE Rows load(Rows room, const Tokens *x, int64_t b, int64_t first, int64_t rows, int64_t width, int bf16) {
  if (plain(rows, width, bf16)) return rows_of(x, b, first, width);
  copy(room, x, b, first, rows, width, bf16);
  return room;
}

/* Zero what is read after `width` values of a row in pairs. */
INLINE void end_input(float *row, int64_t width, int pairs) {
  if (pairs) memset((uint16_t *)row + width, 0, sizeof(uint16_t) * (most(2 * pairs_of(width), padded(width)) - width));
}
/* The same tokens, of bfloat16, as rows of pairs. */
static Rows load_pairs(Rows room, const Tokens *x, int64_t b, int64_t first, int64_t rows, int64_t width) {
  uint16_t *from = (uint16_t *)x->data + b * x->batch + first * x->token, *to = (uint16_t *)room.at;
  if (rows % ROW_STEP == 0 && width % (2 * LANES) == 0) return (Rows){(float *)from, width, x->token, 1};
  for (int64_t r = 0; r < rows; r++, from += x->token) {
    memcpy(to + 2 * r * room.pitch, from, sizeof(uint16_t) * width);
    end_input(room.at + r * room.pitch, width, 1);
  }
  return (Rows){room.at, room.width, 2 * room.pitch, 1};
}

/* Rows as a map in pairs reads them: `put_input` writes every value over those that were read before it, rounded to
   bfloat16, and `end_input` ends the row. */
INLINE Rows as_input(Rows u, int pairs) { return pairs ? (Rows){u.at, u.width, 2 * u.pitch, 1} : u; }
INLINE void put_input(float *row, int64_t c, vec value, int pairs) {
  if (pairs) *(halves *)((uint16_t *)row + c) = narrow(value);
  else *(vec *)(row + c) = value;
}
static void end_inputs(Rows x, int64_t rows) {
  for (int64_t r = 0; x.halves && r < rows; r++) end_input(rows_from(x, r).at, x.width, 1);
}
static Rows round_input(Rows u, int64_t rows, int pairs) {
  for (int64_t r = 0; pairs && r < rows; r++) {
    float *row = u.at + r * u.pitch;
    for (int64_t c = 0; c < u.width; c += LANES) put_input(row, c, *(const vec *)(row + c), 1);
    end_input(row, u.width, 1);
  }
  return as_input(u, pairs);
}

/* Where to write rows that `store` puts into y: in y itself if possible, else in `from`. */
static Rows place_of(Rows from, const Tokens *y, int64_t b, int64_t first, int64_t rows, int64_t width, int bf16) {
  return plain(rows, width, bf16) ? rows_of(y, b, first, width) : from;
}
/* Store rows in y, unless `place_of` has put them there already. */
static void store(Rows from, const Tokens *y, int64_t b, int64_t first, int64_t rows, int64_t width, int bf16) {
  if (from.at == rows_of(y, b, first, width).at) return;
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = b * y->batch + (first + r) * y->token, c = 0;
    const float *row = from.at + r * from.pitch;
    if (bf16)
      for (; c + LANES <= width; c += LANES) put(y->data, at + c, LANES, 1, *(const vec *)(row + c));
    else
      for (; c + LANES <= width; c += LANES) put(y->data, at + c, LANES, 0, *(const vec *)(row + c));
    if (c < width) put(y->data, at + c, width - c, bf16, *(const vec *)(row + c));
  }
}
