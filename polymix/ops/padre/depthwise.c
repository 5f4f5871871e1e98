/* Depthwise convolution of tokens (B, H W, D) with contiguous channels, y = (x ⋆ w + b) ⊙ t, and the gradient of w.

   Channels are processed in vectors of LANES. A tile of T neighbouring outputs and G taps of a row of the kernel stay in
   registers, so that each input is loaded once for up to G products; a convolution that loads an input for every product is
   bound by its loads. To this end, strips of the grid that fit in the L2 cache are packed first, LANES channels at a time, with
   zeros around them. Sums are float32; the weight's gradient is summed over strips in double. */

#include "vectors.h"

#if LANES == 16
#define TILES(X, G) X(16, G) X(14, G) X(8, G) X(4, G)
#define GROUPS(X) X(11) X(9) X(7) X(5) X(4) X(3) X(2) X(1)
#else /* with half the registers */
#define TILES(X, G) X(8, G) X(7, G) X(4, G)
#define GROUPS(X) X(5) X(4) X(3) X(2) X(1)
#endif
#define LARGEST 16
#define STRIP (512 << 10) /* bytes of packed inputs in a strip */

/* kh × kw taps, h × w inputs with `top` rows and `left` columns of zeros before them, oh × ow outputs; bfloat16 or float32.
   polymix/ops/padre/native.py has the same struct. */
typedef struct {
  int64_t batch, dim, h, w, oh, ow, kh, kw, top, left, bf16, threads;
} Shape;
/* One float32 kernel per channel, with strides in elements; negative strides flip the kernel. */
typedef struct {
  float *data;
  int64_t channel, row, col;
} Taps;
/* The outputs [row, row + rows) × [col, col + cols) of sample b and channels [first, first + lanes), in tiles of `tile`. */
typedef struct {
  int64_t b, first, lanes, row, rows, col, cols, tile;
} Strip;

/* Expands BODY for whole vectors of float32, for whole vectors of bfloat16, and for the remaining channels. */
#define FOR_TYPES(s, p, BODY)                                        \
  do {                                                               \
    if ((p)->lanes == LANES && !(s)->bf16) BODY(LANES, 0);           \
    else if ((p)->lanes == LANES) BODY(LANES, 1);                    \
    else BODY((p)->lanes, (s)->bf16);                                \
  } while (0)

INLINE vec pack_row(vec *to, const Tokens *x, vec shift, const Tokens *scale, const Strip *p, int64_t token,
                    int64_t from, int64_t end, int64_t n, int bf16) {
  vec sum = {0};
  int64_t at = p->b * x->batch + token * x->token + p->first;
  int64_t by = scale ? p->b * scale->batch + token * scale->token + p->first : 0;
  for (int64_t j = from; j < end; j++) {
    vec v = get(x->data, at + j * x->token, n, bf16) + shift;
    if (scale) v *= get(scale->data, by + j * scale->token, n, bf16);
    sum += to[j] = v;
  }
  return sum;
}

/* Pack rows × pitch positions of a grid h × w, starting at (row, col): (x + shift) ⊙ scale, zero to the left and right of the
   grid; rows above and below it are not written. Returns the sum. */
static vec pack(vec *to, const Tokens *x, vec shift, const Tokens *scale, const Shape *s, const Strip *p, int64_t h, int64_t w,
                int64_t row, int64_t rows, int64_t col, int64_t pitch) {
  vec sum = {0};
  int64_t from = most(0, -col), end = most(from, least(pitch, w - col));
  for (int64_t i = most(0, -row); i < least(rows, h - row); i++) {
    vec *line = to + i * pitch;
    for (int64_t j = 0; j < from; j++) line[j] = (vec){0};
    for (int64_t j = end; j < pitch; j++) line[j] = (vec){0};
#define PACK(n, bf16) sum += pack_row(line, x, shift, scale, p, (row + i) * w + col, from, end, n, bf16)
    FOR_TYPES(s, p, PACK);
#undef PACK
  }
  return sum;
}

/* Prefetch tokens. They lie a whole row of channels apart, too far for the processor's own prefetching. */
INLINE void prefetch(const Tokens *t, const Shape *s, const Strip *p, int64_t token, int64_t count, const int write) {
  const char *at = (const char *)t->data + (p->b * t->batch + token * t->token + p->first) * (s->bf16 ? 2 : 4);
  for (int64_t o = 0; o < count; o++, at += t->token * (s->bf16 ? 2 : 4)) __builtin_prefetch(at, write);
}

INLINE void write_row(const Tokens *y, const Tokens *times, const Strip *p, int64_t token, int64_t count, vec *out,
                      vec add, int64_t n, int bf16) {
  int64_t at = p->b * y->batch + token * y->token + p->first;
  int64_t by = times ? p->b * times->batch + token * times->token + p->first : 0;
  /* All reads come before all writes: a read that might alias a recent write would wait for it. */
  for (int64_t o = 0; o < count; o++) out[o] += add;
  if (times)
    for (int64_t o = 0; o < count; o++) out[o] *= get(times->data, by + o * times->token, n, bf16);
  for (int64_t o = 0; o < count; o++) put(y->data, at + o * y->token, n, bf16, out[o]);
}

/* out[o] += Σ_k Σ_i w[k, i] x[k, o + i] over rows [0, rows) and G taps of each */
INLINE void slide(const vec *x, int64_t pitch, const vec *w, int64_t kw, int64_t rows, vec *out, const int T, const int G) {
  vec acc[LARGEST], taps[LARGEST];
  UNROLL for (int o = 0; o < T; o++) acc[o] = out[o];
  for (int64_t k = 0; k < rows; k++, x += pitch, w += kw) {
    UNROLL for (int i = 0; i < G; i++) taps[i] = w[i];
    UNROLL for (int j = 0; j < T + G - 1; j++) {
      vec v = x[j];
      UNROLL for (int i = 0; i < G; i++) if (j >= i && j - i < T) acc[j - i] += taps[i] * v;
    }
  }
  UNROLL for (int o = 0; o < T; o++) out[o] = acc[o];
}

/* out[i] += Σ_r Σ_o g[r, o] x[r, o + i] over rows [0, rows) of `tiles` tiles, for G taps */
INLINE void gather(const vec *x, int64_t pitch, const vec *g, int64_t tiles, int64_t rows, vec *out, const int T, const int G) {
  vec acc[LARGEST], grad[LARGEST];
  UNROLL for (int i = 0; i < G; i++) acc[i] = out[i];
  for (int64_t r = 0; r < rows; r++, x += pitch, g += tiles * T)
    for (int64_t t = 0; t < tiles; t++) {
      UNROLL for (int o = 0; o < T; o++) grad[o] = g[t * T + o];
      UNROLL for (int j = 0; j < T + G - 1; j++) {
        vec v = x[t * T + j];
        UNROLL for (int i = 0; i < G; i++) if (j >= i && j - i < T) acc[i] += grad[j - i] * v;
      }
    }
  UNROLL for (int i = 0; i < G; i++) out[i] = acc[i];
}

typedef void Kernel(const vec *, int64_t, const vec *, int64_t, int64_t, vec *);
typedef struct {
  int tile, group;
  Kernel *slide, *gather;
} Form;
#define DEFINE(T, G)                                                                                       \
  static void slide_##T##_##G(const vec *x, int64_t p, const vec *w, int64_t n, int64_t rows, vec *out) {  \
    slide(x, p, w, n, rows, out, T, G);                                                                    \
  }                                                                                                        \
  static void gather_##T##_##G(const vec *x, int64_t p, const vec *g, int64_t n, int64_t rows, vec *out) { \
    gather(x, p, g, n, rows, out, T, G);                                                                   \
  }
#define ENTRY(T, G) {T, G, slide_##T##_##G, gather_##T##_##G},
#define DEFINE_ALL(G) TILES(DEFINE, G)
#define ENTER_ALL(G) TILES(ENTRY, G)
GROUPS(DEFINE_ALL)
static const Form forms[] = {GROUPS(ENTER_ALL)};

/* The form with this tile size and the largest group of at most `taps` taps. */
static const Form *form(int64_t tile, int64_t taps) {
  const Form *f = forms;
  while (f->tile != tile || f->group > taps) f++;
  return f;
}

static int64_t best_tile(int64_t outputs) { /* unused outputs cost as much as others; loading a tile's taps costs about three */
  int64_t best = 0, cost = INT64_MAX;
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    int64_t tile_cost = over(outputs, forms[i].tile) * (forms[i].tile + 3);
    if (tile_cost < cost) best = forms[i].tile, cost = tile_cost;
  }
  return best;
}

/* The largest strip whose outputs, with the positions around them that the kernel reaches, fit in STRIP bytes. */
static Strip largest(const Shape *s) {
  int64_t tile = best_tile(s->ow), places = STRIP / sizeof(vec);
  int64_t cols = least(over(s->ow, tile), most(1, least(512, places / s->kh) / tile)) * tile;
  int64_t rows = most(1, places / (cols + s->kw - 1) - (s->kh - 1));
  return (Strip){.rows = over(s->oh, over(s->oh, rows)), .cols = cols, .tile = tile};
}

static Strip strip(const Shape *s, Strip all, int64_t b, int64_t block, int64_t place) {
  int64_t across = over(s->ow, all.cols);
  all.b = b, all.first = block * LANES, all.lanes = least(LANES, s->dim - all.first);
  all.row = place / across * all.rows, all.col = place % across * all.cols;
  all.rows = least(all.rows, s->oh - all.row);
  return all;
}

INLINE float *tap(const Taps *t, const Shape *s, int64_t channel, int64_t place) {
  return t->data + channel * t->channel + place / s->kw * t->row + place % s->kw * t->col;
}

/* y = (((x + shift) ⊙ scale) ⋆ weight + bias) ⊙ times. shift and bias are float32 (D); shift, scale, bias and times may be
   NULL; y may be the same array as times. Returns 0, or 1 if memory cannot be allocated. */
int depthwise(const Tokens *x, const float *shift, const Tokens *scale, const Taps *weight, const float *bias, const Tokens *times,
              const Tokens *y, const Shape *s) {
  Strip all = largest(s);
  int64_t blocks = over(s->dim, LANES), places = over(s->oh, all.rows) * over(s->ow, all.cols);
  int64_t items = s->batch * blocks * places, pitch = all.cols + s->kw - 1, taps = s->kh * s->kw;
  int failed = 0;
#pragma omp parallel num_threads(most(1, least(s->threads, items)))
  {
    vec *w = room(taps), *in = room(pitch * (all.rows + s->kh - 1)), out[LARGEST], add = {0}, moved = {0};
    int64_t block = -1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      if (!w || !in) {
#pragma omp atomic write
        failed = 1;
        continue;
      }
      Strip p = strip(s, all, item / places % s->batch, item / (places * s->batch), item % places);
      if (block != p.first) { /* many consecutive items share a block of channels */
        block = p.first;
        for (int64_t t = 0; t < taps; t++)
          for (int i = 0; i < LANES; i++) w[t][i] = i < p.lanes ? *tap(weight, s, block + i, t) : 0.0f;
        add = bias ? get(bias, block, p.lanes, 0) : (vec){0};
        moved = shift ? get(shift, block, p.lanes, 0) : (vec){0};
      }
      int64_t top = p.row - s->top;
      int64_t before = s->kh - 1; /* rows of inputs that the first row of outputs needs, except the last */
      pack(in, x, moved, scale, s, &p, s->h, s->w, top, before, p.col - s->left, pitch);
      for (int64_t i = 0; i < p.rows; i++) {
        pack(in + (i + before) * pitch, x, moved, scale, s, &p, s->h, s->w, top + i + before, 1, p.col - s->left, pitch);
        int64_t k0 = least(s->kh, most(0, -top - i)), k1 = most(k0, least(s->kh, s->h - top - i));
        for (int64_t j = 0; j < p.cols && p.col + j < s->ow; j += p.tile) {
          int64_t token = (p.row + i) * s->ow + p.col + j, count = least(p.tile, s->ow - p.col - j);
          prefetch(y, s, &p, token, count, 1);
          if (times) prefetch(times, s, &p, token, count, 0);
          if (top + i + s->kh < s->h && i + 1 < p.rows) { /* prefetch the inputs that are packed next */
            int64_t next = (top + i + s->kh) * s->w + p.col + j, ahead = least(p.tile, s->w - p.col - j);
            prefetch(x, s, &p, next, ahead, 0);
            if (scale) prefetch(scale, s, &p, next, ahead, 0);
          }
          for (int o = 0; o < p.tile; o++) out[o] = (vec){0};
          for (int64_t q = 0; q < s->kw;) {
            const Form *f = form(p.tile, s->kw - q);
            f->slide(in + (i + k0) * pitch + j + q, pitch, w + k0 * s->kw + q, s->kw, k1 - k0, out);
            q += f->group;
          }
#define WRITE(n, bf16) write_row(y, times, &p, token, count, out, add, n, bf16)
          FOR_TYPES(s, &p, WRITE);
#undef WRITE
        }
      }
    }
    free(w);
    free(in);
  }
  return failed;
}

/* weight = Σ g ⊙ (x at the tap) and bias (D) = Σ g over samples and outputs, with g = grad ⊙ scale; scale may be NULL, as may
   weight and bias if nobody asks for them. Returns 0, or 1 if memory cannot be allocated. */
int depthwise_weight(const Tokens *x, const Tokens *grad, const Tokens *scale, const Taps *weight, float *bias,
                     const Shape *s) {
  Strip all = largest(s);
  int64_t blocks = over(s->dim, LANES), places = over(s->oh, all.rows) * over(s->ow, all.cols);
  int64_t pitch = all.cols + s->kw - 1, tiles = all.cols / all.tile;
  int64_t splits = weight ? least(s->kh, over(s->threads, blocks)) : 1; /* with few channels, threads share the rows of the kernel */
  int failed = 0;
#pragma omp parallel num_threads(most(1, least(s->threads, blocks * splits)))
  {
    vec *in = room(pitch * (all.rows + s->kh - 1)), *g = room(all.cols * all.rows), out[LARGEST];
    doubles *sum = aligned_alloc(sizeof(doubles), sizeof(doubles) * (s->kh * s->kw + 1));
#pragma omp for schedule(static)
    for (int64_t item = 0; item < blocks * splits; item++) {
      if (!in || !g || !sum) {
#pragma omp atomic write
        failed = 1;
        continue;
      }
      int64_t block = item / splits, split = item % splits;
      for (int64_t t = 0; t <= s->kh * s->kw; t++) sum[t] = (doubles){0};
      doubles *whole = sum + s->kh * s->kw;
      for (int64_t part = 0; part < s->batch * places; part++) {
        Strip p = strip(s, all, part / places, block, part % places);
        int64_t top = p.row - s->top;
        if (weight) pack(in, x, (vec){0}, NULL, s, &p, s->h, s->w, top, p.rows + s->kh - 1, p.col - s->left, pitch);
        vec added = pack(g, grad, (vec){0}, scale, s, &p, s->oh, s->ow, p.row, p.rows, p.col, p.cols);
        *whole += __builtin_convertvector(added, doubles);
        for (int64_t k = split; weight && k < s->kh; k += splits) {
          int64_t first = least(p.rows, most(0, -top - k)), last = most(first, least(p.rows, s->h - top - k));
          for (int64_t q = 0; q < s->kw;) {
            const Form *f = form(p.tile, s->kw - q);
            for (int i = 0; i < f->group; i++) out[i] = (vec){0};
            f->gather(in + (first + k) * pitch + q, pitch, g + first * p.cols, tiles, last - first, out);
            for (int i = 0; i < f->group; i++) sum[k * s->kw + q + i] += __builtin_convertvector(out[i], doubles);
            q += f->group;
          }
        }
      }
      int64_t lanes = least(LANES, s->dim - block * LANES);
      for (int64_t k = split; weight && k < s->kh; k += splits)
        for (int64_t t = k * s->kw; t < (k + 1) * s->kw; t++)
          for (int64_t i = 0; i < lanes; i++) *tap(weight, s, block * LANES + i, t) = (float)sum[t][i];
      if (bias && split == 0)
        for (int64_t i = 0; i < lanes; i++) bias[block * LANES + i] = (float)(*whole)[i];
    }
    free(in);
    free(g);
    free(sum);
  }
  return failed;
}
