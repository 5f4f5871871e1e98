/* Poly-SA and Poly-NL, forward and backward: the pooled product of two linear maps of the tokens; the mean and second moment
   of the tokens, which replace it if there are many tokens; and a linear map of scaled tokens.

   Each thread takes one block of tokens at a time through all steps. Sums over tokens are float32 within a block and double
   over the blocks, in a fixed order. The gradients of weights are summed per thread. */

#include "blocks.h"
#include "functions.h"

/* ---- pairs: Σ_j p_j ⊙ (W_1 x_j + b_1) ⊙ (W_2 x_j + b_2), with one factor p_j per head, or 1; W holds W_1, then W_2 ---- */

static Linear half_of(const Linear *w, int second) {
  int64_t out = w->out / 2;
  return (Linear){w->weight + second * out * w->in, w->bias ? w->bias + second * out : NULL, out, w->in};
}

/* sums (batch, width). Returns 0, or 1 if memory cannot be allocated, like all functions here. */
int linear_pairs(const Tokens *x, const Linear *w, const float *p, const uint8_t *mask, float *sums, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = size_of_rows(s->dim) + 2 * size_of_rows(s->width) + width;
  float *whole = reserve(2 * size_of_packed(s->width, s->dim) + items * width + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed first = take_packed(&place, s->width, s->dim), second = take_packed(&place, s->width, s->dim);
  float *parts = take(&place, items * width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *factors = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, s->width), v = take_rows(&own, s->width);
    Linear w_1 = half_of(w, 0), w_2 = half_of(w, 1);
    pack_linear(first, &w_1);
    pack_linear(second, &w_2);
    clear(factors, width);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      product(in, k.rows, first, u, 0);
      product(in, k.rows, second, v, 0);
      float *block_sums = parts + item * width;
      clear(block_sums, width);
      for (int64_t r = 0; r < k.rows; r++) {
        if (hidden(mask, s, k, r)) continue;
        spread_row(factors, p, k.first + r, s);
        for (int64_t c = 0; c < width; c += LANES)
          *at(block_sums, c) += *at(u.at + r * u.pitch, c) * *at(v.at + r * v.pitch, c) * *at(factors, c);
      }
    }
    add_blocks(sums, parts, 1, s->width, s);
  }
  free(whole);
  return 0;
}

/* The gradients of x, W, b and p (batch, heads, tokens; may be NULL), for grad (batch, width). */
int linear_pairs_backward(const float *grad, const Tokens *x, const Linear *w, const float *p, const uint8_t *mask,
                          const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_p, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width), ins = padded(s->dim), square = width * ins;
  int64_t sums = 2 * (square + width);
  int64_t each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + 3 * width + sums;
  float *whole = reserve(2 * (size_of_packed(s->width, s->dim) + size_of_packed(s->dim, s->width)) + s->threads * each);
  float *place = whole;
  if (!whole) return 1;
  Packed first = take_packed(&place, s->width, s->dim), first_back = take_packed(&place, s->dim, s->width);
  Packed second = take_packed(&place, s->width, s->dim), second_back = take_packed(&place, s->dim, s->width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *total = take(&own, sums), *bias = total + 2 * square;
    float *factors = take(&own, width), *g = take(&own, width), *product_row = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    Rows u = take_rows(&own, s->width), v = take_rows(&own, s->width);
    Linear w_1 = half_of(w, 0), w_2 = half_of(w, 1);
    pack_linear(first, &w_1);
    pack_back(first_back, &w_1);
    pack_linear(second, &w_2);
    pack_back(second_back, &w_2);
    clear(total, sums);
    clear(factors, width);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s);
      load_row(g, grad + k.b * s->width, s->width);
      product(in, k.rows, first, u, 0);
      product(in, k.rows, second, v, 0);
      for (int64_t r = 0; r < k.rows; r++) {
        float *a = u.at + r * u.pitch, *b = v.at + r * v.pitch;
        if (hidden(mask, s, k, r)) {
          clear(a, width);
          clear(b, width);
          continue;
        }
        spread_row(factors, p, k.first + r, s);
        for (int64_t c = 0; c < width; c += LANES) {
          vec left = *at(a, c), right = *at(b, c), slopes = *at(g, c);
          *at(product_row, c) = slopes * left * right;
          slopes *= *at(factors, c);
          *at(a, c) = slopes * right;
          *at(b, c) = slopes * left;
        }
        if (grad_p) sum_row(product_row, grad_p, k, r, s);
      }
      outer(u, in, k.rows, total);
      outer(v, in, k.rows, total + square);
      add_rows(u, k.rows, bias);
      add_rows(v, k.rows, bias + width);
      Rows out = place_of(room_out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
      product(u, k.rows, first_back, out, 0);
      product(v, k.rows, second_back, out, 1);
      store(out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
    }
    for (int half = 0; half < 2; half++) {
      add_threads(grad_w + half * s->width * s->dim, place + half * square, each, s->width, s->dim);
      add_threads(grad_b + half * s->width, place + 2 * square + half * width, each, 1, s->width);
    }
  }
  free(whole);
  return 0;
}

/* ---- moments: the mean and the second moment about it; scaled: a linear map of scaled tokens ---- */

/* to = x - centre; zero at masked tokens and in the padding of the channels */
static void about(Rows to, const Tokens *x, const float *centre, const uint8_t *mask, Block k, const Sizes *s) {
  copy(to, x, k.b, k.first, k.rows, s->dim, s->bf16);
  for (int64_t r = 0; r < k.rows; r++) {
    float *row = to.at + r * to.pitch;
    if (hidden(mask, s, k, r)) clear(row, to.width);
    else
      for (int64_t c = 0; centre && c < to.width; c += LANES) *at(row, c) -= *at((float *)centre, c);
  }
}

/* The tiles of outer(x, x) on or above the diagonal. */
static void outer_above(Rows x, int64_t rows, float *total) {
  for (int64_t first = 0; first < x.width; first += ACROSS * LANES) {
    int64_t across = least(ACROSS, (x.width - first) / LANES);
    for (int64_t t = 0; t < first + across * LANES; t += TALL)
      outers[across - 1](x.at + t, x.pitch, x.at + first, x.pitch, rows, total + t * x.width + first, x.width);
  }
}

/* The first item of a thread; each thread has a contiguous run of items. */
INLINE int64_t first_of(int64_t items, int64_t thread, int64_t threads) { return items * thread / threads; }

/* centre (batch, dim) is the mean of the real tokens, and moment (batch, dim, dim) the sum of their second moments about it;
   count (batch) is the number of real tokens, at least 1. */
int moments(const Tokens *x, const uint8_t *mask, const float *count, float *centre, float *moment, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim), square = width * width;
  int64_t slots = s->batch + s->threads; /* one for each pair of a thread and one of its samples, at index thread + sample */
  int64_t each = size_of_rows(s->dim);
  float *whole = reserve(items * width + s->batch * width + slots * square + s->threads * each), *place = whole;
  if (!whole) return 1;
  float *parts = take(&place, items * width), *means = take(&place, s->batch * width);
  float *totals = take(&place, slots * square);
#pragma omp parallel num_threads(s->threads)
  {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    float *own = place + thread * each;
    Rows centred = take_rows(&own, s->dim);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      about(centred, x, NULL, mask, k, s);
      clear(parts + item * width, width);
      add_rows(centred, k.rows, parts + item * width);
    }
    add_blocks(centre, parts, 1, s->dim, s);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < s->batch; b++) {
      for (int64_t c = 0; c < s->dim; c++) centre[b * s->dim + c] /= count[b];
      load_row(means + b * width, centre + b * s->dim, s->dim);
    }
    int64_t sample = -1;
    for (int64_t item = first_of(items, thread, threads); item < first_of(items, thread + 1, threads); item++) {
      Block k = block_of(s, item);
      if (k.b != sample) clear(totals + (k.b + thread) * square, square);
      sample = k.b;
      about(centred, x, means + k.b * width, mask, k, s);
      outer_above(centred, k.rows, totals + (k.b + thread) * square);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s->batch * s->dim; item++) {
      int64_t b = item / s->dim, row = item % s->dim, begin = b * blocks_of(s), end = begin + blocks_of(s);
      for (int64_t c = row; c < s->dim; c++) {
        double sum = 0;
        for (int64_t t = 0; t < threads; t++)
          if (first_of(items, t, threads) < end && first_of(items, t + 1, threads) > most(begin, first_of(items, t, threads)))
            sum += totals[(b + t) * square + row * width + c];
        moment[(b * s->dim + row) * s->dim + c] = moment[(b * s->dim + c) * s->dim + row] = (float)sum;
      }
    }
  }
  free(whole);
  return 0;
}

/* y = x A + c, zero at masked tokens, for A (batch, dim, dim) and c (batch, dim). With A and c from the gradients of centre and
   moment, y is the gradient of x. */
int moments_backward(const Tokens *x, const uint8_t *mask, const float *a, const float *c, const Tokens *y, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), packed = size_of_packed(s->dim, s->dim), each = 2 * size_of_rows(s->dim);
  float *whole = reserve(s->batch * packed + s->threads * each), *place = whole;
  if (!whole) return 1;
  float *maps = take(&place, s->batch * packed);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each;
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    for (int64_t b = 0; b < s->batch; b++) {
      float *map_room = maps + b * packed;
      pack(take_packed(&map_room, s->dim, s->dim), a + b * s->dim * s->dim, s->dim, 1, s->dim, c + b * s->dim);
    }
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      float *map_room = maps + k.b * packed;
      Packed map = take_packed(&map_room, s->dim, s->dim);
      Rows in = read_block(room_in, x, k, s);
      Rows out = place_of(room_out, y, k.b, k.first, k.rows, s->dim, s->bf16);
      product(in, k.rows, map, out, 0);
      for (int64_t r = 0; r < k.rows; r++)
        if (hidden(mask, s, k, r)) clear(out.at + r * out.pitch, out.width);
      store(out, y, k.b, k.first, k.rows, s->dim, s->bf16);
    }
  }
  free(whole);
  return 0;
}

/* y = (x ⊙ scale) Wᵀ + b + rest x for scale (batch, dim); rest points to a number, or is NULL for none. */
int linear_scaled(const Tokens *x, const float *scale, const Linear *w, const float *rest, const Tokens *y, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim);
  int64_t each = size_of_rows(s->dim) + size_of_rows(s->out) + width;
  float *whole = reserve(size_of_packed(s->out, s->dim) + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed(&place, s->out, s->dim);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *scales = take(&own, width);
    Rows u = take_rows(&own, s->dim), room_out = take_rows(&own, s->out);
    pack_linear(map, w);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      copy(u, x, k.b, k.first, k.rows, s->dim, s->bf16);
      load_row(scales, scale + k.b * s->dim, s->dim);
      /* Write rest x + b to the outputs first; the product is added to it. */
      Rows out = place_of(room_out, y, k.b, k.first, k.rows, s->out, s->bf16);
      for (int64_t r = 0; r < k.rows; r++)
        for (int64_t c = 0; c < u.width; c += LANES) {
          vec *value = at(u.at + r * u.pitch, c);
          if (rest) *(floats *)(out.at + r * out.pitch + c) = *value * *rest + *(vec *)(map.bias + c);
          *value *= *at(scales, c);
        }
      product(u, k.rows, map, out, rest != NULL);
      store(out, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
  }
  free(whole);
  return 0;
}

/* The gradients of x, scale, W, b and rest (one per thread), for grad (batch, tokens, out). */
int linear_scaled_backward(const Tokens *grad, const Tokens *x, const float *scale, const Linear *w, const float *rest,
                           const Tokens *grad_x, float *grad_scale, float *grad_w, float *grad_b, float *grad_rest,
                           const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim), ends = padded(s->out), sums = ends * width + ends;
  int64_t each = 2 * size_of_rows(s->dim) + size_of_rows(s->out) + width + sums;
  float *whole = reserve(size_of_packed(s->dim, s->out) + items * width + s->threads * each), *place = whole;
  if (!whole) return 1;
  Packed back = take_packed(&place, s->dim, s->out);
  float *parts = take(&place, items * width);
#pragma omp parallel num_threads(s->threads)
  {
    float *own = place + omp_get_thread_num() * each, *total = take(&own, sums), *scales = take(&own, width);
    Rows u = take_rows(&own, s->dim), dz = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    doubles of_rest = {0};
    pack_back(back, w);
    clear(total, sums);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      copy(u, x, k.b, k.first, k.rows, s->dim, s->bf16);
      load_row(scales, scale + k.b * s->dim, s->dim);
      Rows g = load(room_g, grad, k.b, k.first, k.rows, s->out, s->bf16);
      product(g, k.rows, back, dz, 0);
      float *part = parts + item * width;
      clear(part, width);
      for (int64_t r = 0; r < k.rows; r++) {
        vec along = {0};
        for (int64_t c = 0; c < u.width; c += LANES) {
          vec *value = at(u.at + r * u.pitch, c), *slope = at(dz.at + r * dz.pitch, c), f = *at(scales, c);
          *at(part, c) += *slope * *value;
          *slope *= f;
          if (rest) {
            vec upper = *(floats *)(g.at + r * g.pitch + c);
            *slope += upper * *rest;
            along += upper * *value;
          }
          *value *= f;
        }
        of_rest += __builtin_convertvector(along, doubles);
      }
      outer(g, u, k.rows, total);
      add_rows(g, k.rows, total + ends * width);
      store(dz, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
    }
    double whole_rest = 0;
    for (int i = 0; i < LANES; i++) whole_rest += of_rest[i];
    if (rest) grad_rest[omp_get_thread_num()] = (float)whole_rest;
    add_blocks(grad_scale, parts, 1, s->dim, s);
    add_threads(grad_w, place, each, s->out, s->dim);
    add_threads(grad_b, place + ends * width, each, 1, s->out);
  }
  free(whole);
  return 0;
}
