/* Products of bfloat16 that are summed in float32, by pairs: a 32-bit word holds two neighbours of the sum.

       y[r, c] = start + Σ_i x[r, 2 i] w[2 i, c] + x[r, 2 i + 1] w[2 i + 1, c]

   There are three ways: in tiles (AMX), where the library is compiled for them; by vectors, with AVX512_BF16 where the processor
   has it; and, for tests, in tiles that EMULATE_TILES emulates. */

#pragma once
#include "vectors.h"

/* multiply_pairs, in each of the ways: y = start + x w for `rows` rows of x and `across` vectors of outputs, from 1 to 3. In x,
   rows lie `by` halves apart and pairs `along`; rows of w are `wide` words apart, of start `step` floats, of y `pitch`. */

#if defined(__AMX_BF16__) || defined(EMULATE_TILES)
#define IN_TILES
#define TILE 16     /* rows of a tile; each holds as many words */
#define PAIR_STEP TILE /* pairs that are multiplied at once: sums are padded with zeros to a multiple */
#define ROW_STEP TILE  /* rows likewise; what is in the rows added does not matter */
#else
#define PAIR_STEP 1
#define ROW_STEP 2
#endif

/* The words of 2 · LANES halves: those of `low` in the lower halves. */
INLINE words pair_up(halves low, halves high) {
  return words_of(low) | words_of(high) << 16;
}

/* Transpose a square of words, LANES by LANES. */
INLINE void transpose(words *m) {
#if LANES == 16
  const words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
  const words lane = {0, 1, 2, 3, 4, 5, 6, 7};
#else
  const words lane = {0, 1, 2, 3};
#endif
  UNROLL for (int half = LANES / 2; half > 0; half /= 2) {
    const words upper = lane + (lane & half) * (LANES / half - 1), lower = upper + half; /* where bit `half` is set, of b */
    UNROLL for (int i = 0; i < LANES; i++) {
      if (i & half) continue;
      words a = m[i], b = m[i + half];
      m[i] = __builtin_shuffle(a, b, upper);
      m[i + half] = __builtin_shuffle(a, b, lower);
    }
  }
}

#ifdef IN_TILES

/* ---- tiles: eight registers of 16 rows of 64 bytes ---- */

#ifdef EMULATE_TILES
typedef struct {
  uint32_t at[TILE][TILE];
} Tile;
static _Thread_local Tile tiles[8];
static _Thread_local int tiles_are_on;
INLINE void begin_tiles(void) { tiles_are_on = 1; }
INLINE void end_tiles(void) { tiles_are_on = 0; }
INLINE void tile_load(int t, const void *from, int64_t step) {
  if (!tiles_are_on) abort(); /* where a processor raises an illegal instruction */
  for (int r = 0; r < TILE; r++) memcpy(tiles[t].at[r], (const char *)from + r * step, sizeof tiles[t].at[r]);
}
INLINE void tile_store(int t, void *to, int64_t step) {
  for (int r = 0; r < TILE; r++) memcpy((char *)to + r * step, tiles[t].at[r], sizeof tiles[t].at[r]);
}
INLINE float upper_half(uint32_t word) {
  float value;
  word &= 0xffff0000;
  memcpy(&value, &word, sizeof value);
  return value;
}
INLINE void tile_dot(int to, int a, int b) {
  for (int r = 0; r < TILE; r++)
    for (int k = 0; k < TILE; k++)
      for (int c = 0; c < TILE; c++) {
        uint32_t x = tiles[a].at[r][k], y = tiles[b].at[k][c];
        float sum;
        memcpy(&sum, &tiles[to].at[r][c], sizeof sum);
        sum += upper_half(x << 16) * upper_half(y << 16) + upper_half(x) * upper_half(y);
        memcpy(&tiles[to].at[r][c], &sum, sizeof sum);
      }
}
#else
/* The configuration is constant: of one that is written first, gcc 12 takes the stores after the first 8 bytes for dead. */
static const struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} tile_shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
INLINE void begin_tiles(void) { _tile_loadconfig(&tile_shapes); }
INLINE void end_tiles(void) { _tile_release(); }
#define tile_load(t, from, step) _tile_loadd(t, from, step)
#define tile_store(t, to, step) _tile_stored(t, to, step)
#define tile_dot(to, a, b) _tile_dpbf16ps(to, a, b)
#endif

/* y = start + x w for 16 rows and `across` tiles of outputs. x has `by` bytes between rows, w `wide`, start `step`, y `pitch`. */
INLINE void tile_rows(const char *x, int64_t by, const char *w, int64_t wide, int64_t steps, const char *start, int64_t step,
                      char *y, int64_t pitch, const int across) {
  tile_load(0, start, step);
  if (across > 1) tile_load(1, start + 64, step);
  if (across > 2) tile_load(2, start + 128, step);
  for (int64_t i = 0; i < steps; i++, x += 64, w += TILE * wide) {
    tile_load(3, x, by);
    tile_load(4, w, wide);
    tile_dot(0, 3, 4);
    if (across > 1) {
      tile_load(5, w + 64, wide);
      tile_dot(1, 3, 5);
    }
    if (across > 2) {
      tile_load(6, w + 128, wide);
      tile_dot(2, 3, 6);
    }
  }
  tile_store(0, y, pitch);
  if (across > 1) tile_store(1, y + 64, pitch);
  if (across > 2) tile_store(2, y + 128, pitch);
}

static void multiply_pairs(const uint16_t *x, int64_t by, int64_t along, const uint32_t *w, int64_t wide, int64_t pairs,
                           int64_t rows, int across, const float *start, int64_t step, float *y, int64_t pitch) {
  (void)along; /* is 2 */
  __asm__ volatile("" ::: "memory"); /* the instructions of tiles do not tell the compiler what they read and write */
  for (int64_t r = 0; r < rows; r += TILE) {
    const char *from = (const char *)(x + r * by), *first = (const char *)(start + r * step);
    char *to = (char *)(y + r * pitch);
#define ROWS_OF(A) tile_rows(from, 2 * by, (const char *)w, 4 * wide, pairs / TILE, first, 4 * step, to, 4 * pitch, A)
    if (across == 3) ROWS_OF(3);
    else if (across == 2) ROWS_OF(2);
    else ROWS_OF(1);
#undef ROWS_OF
  }
  __asm__ volatile("" ::: "memory");
}

#else

/* ---- vectors ---- */

INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}

/* sum + x_0 w_0 + x_1 w_1 for pairs of bfloat16 */
INLINE vec add_pairs(vec sum, words x, words w, const int fast) {
#ifdef __AVX512F__
  if (fast) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
#endif
  return sum + (vec)(x << 16) * (vec)(w << 16) + (vec)(x & 0xffff0000) * (vec)(w & 0xffff0000);
}
/* `multiply_pairs` for T rows and A vectors. */
INLINE void pair_tile(const uint16_t *x, int64_t by, int64_t along, const uint32_t *w, int64_t wide, int64_t pairs,
                      const float *start, int64_t step, float *y, int64_t pitch, const int T, const int A, const int fast) {
  typedef uint32_t pair __attribute__((aligned(2), may_alias));
  vec sums[TALL][ACROSS];
  words weights[ACROSS];
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) sums[t][a] = *(const floats *)(start + t * step + a * LANES);
  for (int64_t i = 0; i < pairs; i++, x += along, w += wide) {
    UNROLL for (int a = 0; a < A; a++) weights[a] = *(const words *)(w + a * LANES);
    UNROLL for (int t = 0; t < T; t++) {
      words value = *(const pair *)(x + t * by) - (words){0};
      UNROLL for (int a = 0; a < A; a++) sums[t][a] = add_pairs(sums[t][a], value, weights[a], fast);
    }
  }
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int a = 0; a < A; a++) *(floats *)(y + t * pitch + a * LANES) = sums[t][a];
}

typedef void PairTile(const uint16_t *, int64_t, int64_t, const uint32_t *, int64_t, int64_t, const float *, int64_t, float *, int64_t);
#define PAIR_TILE(NAME, T, A, FAST)                                                                                     \
  static void NAME##_##T##_##A(const uint16_t *x, int64_t by, int64_t along, const uint32_t *w, int64_t wide,           \
                               int64_t pairs, const float *start, int64_t step, float *y, int64_t pitch) {              \
    pair_tile(x, by, along, w, wide, pairs, start, step, y, pitch, T, A, FAST);                                         \
  }
#define PAIR_TILES(NAME, T, FAST) PAIR_TILE(NAME, T, 1, FAST) PAIR_TILE(NAME, T, 2, FAST) PAIR_TILE(NAME, T, 3, FAST)
typedef PairTile *const PairTable[2][ACROSS]; /* for SHORT rows and for TALL */
#ifdef __AVX512F__
PAIR_TILES(slow, 8, 0) PAIR_TILES(slow, 2, 0) PAIR_TILES(fast, 8, 1) PAIR_TILES(fast, 2, 1)
static PairTable slow_pairs = {{slow_2_1, slow_2_2, slow_2_3}, {slow_8_1, slow_8_2, slow_8_3}};
static PairTable fast_pairs = {{fast_2_1, fast_2_2, fast_2_3}, {fast_8_1, fast_8_2, fast_8_3}};
INLINE const PairTable *pair_table(void) { return __builtin_cpu_supports("avx512bf16") ? &fast_pairs : &slow_pairs; }
#else
PAIR_TILES(slow, 4, 0) PAIR_TILES(slow, 2, 0)
static PairTable slow_pairs = {{slow_2_1, slow_2_2, slow_2_3}, {slow_4_1, slow_4_2, slow_4_3}};
INLINE const PairTable *pair_table(void) { return &slow_pairs; }
#endif

static void multiply_pairs(const uint16_t *x, int64_t by, int64_t along, const uint32_t *w, int64_t wide, int64_t pairs,
                           int64_t rows, int across, const float *start, int64_t step, float *y, int64_t pitch) {
  const PairTable *table = pair_table();
  for (int64_t from = 0; from < pairs; from += DEEP) {
    int64_t count = least(DEEP, pairs - from);
    for (int64_t r = 0; r < rows;) {
      int tall = rows - r > TALL - SHORT;
      float *to = y + r * pitch;
      (*table)[tall][across - 1](x + from * along + r * by, by, along, w + from * wide, wide, count, from ? to : start + r * step,
                                 from ? pitch : step, to, pitch);
      r += tall ? TALL : SHORT;
    }
  }
}
#endif
INLINE int64_t pairs_of(int64_t n) { return over(n, 2 * PAIR_STEP) * PAIR_STEP; }
