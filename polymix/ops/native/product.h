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

/* y = x Wᵀ + b as in nn.Linear, contiguous; the bias may be NULL. Products of blocks take float32; those of few rows
   (decode/rows.h) read both as they are, also bfloat16. */
typedef struct {
  const float *weight, *bias;
  int64_t out, in;
} Linear;
/* Rows of `width` numbers (whole vectors), `pitch` elements apart. */
typedef struct {
  float *at;
  int64_t width, pitch;
} Rows;
/* A packed weight: panels of ACROSS vectors of outputs, each input by input; and the bias. With `pairs` it holds pairs of inputs in
   bfloat16, and is applied to rows of bfloat16, whose pitch counts them. */
typedef struct {
  float *at, *bias;
  int64_t out, in;
  int pairs;
} Packed;
INLINE int64_t depth_of(Packed w) { return w.pairs ? over(w.in, 2) : w.in; }

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
INLINE int64_t size_of_packed(int64_t out, int64_t in) { return padded(out) * (in + 1); }

INLINE Packed take_packed(float **room, int64_t out, int64_t in) {
  float *at = take(room, size_of_packed(out, in));
  return (Packed){at, at + padded(out) * in, padded(out), in, 0};
}
/* For a map of tokens: in bfloat16, without an error, if `pairs`. */
INLINE Packed take_packed_for(float **room, int64_t out, int64_t in, int pairs) {
  Packed map = take_packed(room, out, in);
  map.pairs = pairs;
  return map;
}
INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
/* A panel of `width` outputs in pairs of inputs; the values are those of bfloat16. */
static void pack_pairs(uint32_t *to, const float *from, int64_t width, int64_t real, int64_t in, int64_t by_out, int64_t by_in) {
  for (int64_t i = 0; i < in; i += 2, to += width)
    for (int64_t o = 0; o < width; o++) {
      const float *first = from + o * by_out + i * by_in;
      to[o] = o < real ? bits_of(first[0]) >> 16 | (i + 1 < in ? bits_of(first[by_in]) & 0xffff0000 : 0) : 0;
    }
}

/* Pack the weight whose entry (o, i) is weight[o · by_out + i · by_in]; one of the strides must be 1. All threads of the team
   must call this. */
static void pack(Packed p, const float *weight, int64_t out, int64_t by_out, int64_t by_in, const float *bias) {
#pragma omp for schedule(static)
  for (int64_t first = 0; first < p.out; first += ACROSS * LANES) {
    int64_t width = least(ACROSS * LANES, p.out - first), real = least(width, out - first);
    const float *from = weight + first * by_out;
    float *to = p.at + first * depth_of(p);
    if (p.pairs) pack_pairs((uint32_t *)to, from, width, real, p.in, by_out, by_in);
    else if (by_in == 1)
      for (int64_t o = 0; o < real; o++)
        for (int64_t i = 0; i < p.in; i++) to[i * width + o] = from[o * by_out + i];
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

/* sum + x_0 w_0 + x_1 w_1 for pairs of bfloat16 */
INLINE vec add_pairs(vec sum, words x, words w, const int fast) {
#if LANES == 16
  if (fast) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
#endif
  return sum + (vec)(x << 16) * (vec)(w << 16) + (vec)(x & 0xffff0000) * (vec)(w & 0xffff0000);
}
/* `product_tile` for pairs of bfloat16. */
INLINE void pair_tile(const float *x, int64_t by, const float *w, int64_t pairs, const float *start, int64_t step, float *y,
                      int64_t pitch, const int T, const int A, const int fast) {
  typedef uint32_t pair __attribute__((aligned(2), may_alias));
  vec sums[TALL][ACROSS];
  words weights[ACROSS];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = *(const floats *)(start + t * step + a * LANES);
  for (int64_t i = 0; i < pairs; i++, w += A * LANES) {
    UNROLL for (int a = 0; a < A; a++) weights[a] = (words)*(const vec *)(w + a * LANES);
    UNROLL for (int t = 0; t < T; t++) {
      words value = *(const pair *)((const uint16_t *)x + t * by + 2 * i) - (words){0};
      UNROLL for (int a = 0; a < A; a++) sums[t][a] = add_pairs(sums[t][a], value, weights[a], fast);
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
  }                                                                                                                 \
  static void pairs_##T##_##A(const float *x, int64_t by, const float *w, int64_t in, const float *start,           \
                              int64_t step, float *y, int64_t pitch) {                                              \
    pair_tile(x, by, w, in, start, step, y, pitch, T, A, 0);                                                        \
  }                                                                                                                 \
  FAST_PAIRS(T, A)
#if LANES == 16
#define FAST_PAIRS(T, A)                                                                                            \
  static void fast_##T##_##A(const float *x, int64_t by, const float *w, int64_t in, const float *start,            \
                             int64_t step, float *y, int64_t pitch) {                                               \
    pair_tile(x, by, w, in, start, step, y, pitch, T, A, 1);                                                        \
  }
#else
#define FAST_PAIRS(T, A)
#endif
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
static TileTable of_floats = TILES_OF(product), of_pairs = TILES_OF(pairs);
#if LANES == 16
static TileTable of_pairs_fast = TILES_OF(fast);
INLINE const TileTable *pair_tiles(void) { return __builtin_cpu_supports("avx512bf16") ? &of_pairs_fast : &of_pairs; }
#else
INLINE const TileTable *pair_tiles(void) { return &of_pairs; }
#endif
DEFINE_OUTER(1) DEFINE_OUTER(2) DEFINE_OUTER(3)
static OuterTile *const outers[] = {outer_1, outer_2, outer_3};

/* y = x Wᵀ + b, or y += x Wᵀ if `more`. Up to SHORT - 1 rows after the last are read and written. */
static void product(Rows x, int64_t rows, Packed w, Rows y, int more) {
  const TileTable *tiles = w.pairs ? pair_tiles() : &of_floats;
  int64_t depth = depth_of(w), pitch = x.pitch * (w.pairs ? sizeof(uint16_t) : sizeof(float));
  for (int64_t from = 0; from < depth; from += DEEP) {
    int64_t in = least(DEEP, depth - from);
    for (int64_t first = 0; first < w.out; first += ACROSS * LANES) {
      int64_t width = least(ACROSS * LANES, w.out - first), across = width / LANES - 1;
      const float *panel = w.at + first * depth + from * width;
      for (int64_t r = 0; r < rows;) {
        int high = rows - r > TALL - SHORT;
        float *to = y.at + r * y.pitch + first;
        const float *start = more || from ? to : w.bias + first;
        const float *tokens = (const float *)((const char *)x.at + r * pitch) + from;
        (*tiles)[high][across](tokens, x.pitch, panel, in, start, more || from ? y.pitch : 0, to, y.pitch);
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
INLINE Rows columns_of(Rows u, int64_t first) { return (Rows){u.at + first, least(PANEL, u.width - first), u.pitch}; }

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

/* total (width) = Σ_r x[r], or += if `more` */
static void add_rows(Rows x, int64_t rows, float *total, int more) {
  for (int64_t c = 0; c < x.width; c += LANES) {
    vec sum = {0}, *to = (vec *)(total + c);
    for (int64_t r = 0; r < rows; r++) sum += *(const floats *)(x.at + r * x.pitch + c);
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

/* The same tokens, of bfloat16, as rows of pairs. */
static Rows load_pairs(Rows room, const Tokens *x, int64_t b, int64_t first, int64_t rows, int64_t width) {
  uint16_t *from = (uint16_t *)x->data + b * x->batch + first * x->token, *to = (uint16_t *)room.at;
  if (rows % SHORT == 0 && width % 2 == 0) return (Rows){(float *)from, width, x->token};
  for (int64_t r = 0; r < rows; r++, from += x->token) {
    memcpy(to + 2 * r * room.pitch, from, sizeof(uint16_t) * width);
    if (width % 2) to[2 * r * room.pitch + width] = 0;
  }
  return (Rows){room.at, room.width, 2 * room.pitch};
}

/* Rows as a map in pairs reads them: `put_input` writes every value over those that were read before it, rounded to bfloat16. */
INLINE Rows as_input(Rows u, int pairs) { return pairs ? (Rows){u.at, u.width, 2 * u.pitch} : u; }
INLINE void put_input(float *row, int64_t c, vec value, int pairs) {
  if (pairs) *(halves *)((uint16_t *)row + c) = narrow(value);
  else *(vec *)(row + c) = value;
}
static Rows round_input(Rows u, int64_t rows, int pairs) {
  for (int64_t r = 0; pairs && r < rows; r++)
    for (int64_t c = 0; c < u.width; c += LANES) put_input(u.at + r * u.pitch, c, *(const vec *)(u.at + r * u.pitch + c), 1);
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
