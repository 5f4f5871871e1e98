/* Poly-SA and Poly-NL, forward and backward: the pooled product of two linear maps of the tokens; the mean and second moment
   of the tokens, which replace it if there are many tokens; and a linear map of scaled tokens.

   Each thread takes one block of tokens at a time through all steps. Sums over tokens are float32 within a block and double
   over the blocks, in a fixed order. Second moments and the gradients of weights are summed as gradients.h says. */

#include "functions.h"
#include "gradients.h"

/* ---- pairs: Σ_j p_j ⊙ (W_1 x_j + b_1) ⊙ (W_2 x_j + b_2), with one factor p_j per head, or 1; W holds W_1, then W_2 ---- */

static Linear half_of(const Linear *w, int second, int pairs) {
  int64_t out = w->out / 2;
  return (Linear){weight_at(w, second * out * w->in, pairs), w->bias ? w->bias + second * out : NULL, out, w->in};
}

/* sums += u ⊙ v ⊙ p over the real rows of a part of a block, for the columns from `first` on. */
static void add_products(Rows u, Rows v, Block k, int64_t first, const uint8_t *mask, const float *p, float *sums, const Sizes *s) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    vec sum = {0};
    Factors factors = factors_of(p, first + c, s);
    for (int64_t r = 0; r < k.rows; r++)
      if (!hidden(mask, s, k, r))
        sum += *at(u.at + r * u.pitch, c) * *at(v.at + r * v.pitch, c) * factors_at(factors, k.first + r, s);
    *at(sums, first + c) += sum;
  }
}

/* sums (batch, width). Returns 0, or 1 if memory cannot be allocated, like all functions here. */
int linear_pairs(const Tokens *x, const Linear *w, const float *p, const uint8_t *mask, float *sums, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->width);
  int64_t each = size_of_rows(s->dim) + 2 * size_of_rows(PANEL);
  float *whole = reserve(2 * size_of_packed(s->width, s->dim) + items * width + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed first = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed second = take_packed_for(&place, s->width, s->dim, s->pairs);
  float *parts = take(&place, items * width);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each;
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, PANEL), v = take_rows(&own, PANEL);
    Linear w_1 = half_of(w, 0, s->pairs), w_2 = half_of(w, 1, s->pairs);
    pack_linear(first, &w_1);
    pack_linear(second, &w_2);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      Rows in = read_block(room_in, x, k, s->dim, s);
      float *block_sums = parts + item * width;
      clear(block_sums, width);
      for (int64_t c = 0; c < width; c += PANEL)
        for (int64_t r = 0; r < k.rows; r += stripe(first)) {
          Block part = stripe_of(k, r, first);
          u.width = least(PANEL, width - c);
          product(rows_from(in, r), part.rows, panel_of(first, c), u, 0);
          product(rows_from(in, r), part.rows, panel_of(second, c), v, 0);
          add_products(u, v, part, c, mask, p, block_sums, s);
        }
    }
    add_blocks(sums, parts, 1, s->width, s);
    end_team(s);
  }
  free(whole);
  return 0;
}

/* du = g ⊙ p ⊙ v and dv = g ⊙ p ⊙ u, zero at masked rows; add the gradients of p to grad_p. For the columns of a map from `first`
   on; du may be u, and dv v. */
static void products_back(Rows u, Rows v, Rows du, Rows dv, Block k, int64_t first, const float *g, const uint8_t *mask,
                          const float *p, float *grad_p, const Sizes *s) {
  for (int64_t c = 0; c < u.width; c += LANES) {
    Factors factors = factors_of(p, first + c, s);
    for (int64_t r = 0; r < k.rows; r++) {
      vec left = *at(u.at + r * u.pitch, c), right = *at(v.at + r * v.pitch, c), slopes = *at((float *)g, first + c), none = {0};
      int real = !hidden(mask, s, k, r);
      if (grad_p && real) add_to_heads(grad_p, slopes * left * right, factors, k, r, s);
      slopes *= factors_at(factors, k.first + r, s);
      put_at(du, r, c, real ? slopes * right : none);
      put_at(dv, r, c, real ? slopes * left : none);
    }
  }
}

/* The gradients of x, W, b and p (batch, heads, tokens), for grad (batch, width). Each may be NULL if nobody asks for it, as in
   all backward functions; that of p is added to. */
int linear_pairs_backward(const float *grad, const Tokens *x, const Linear *w, const float *p, const uint8_t *mask,
                          const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_p, const Sizes *s) {
  int64_t width = padded(s->width), each = 2 * size_of_rows(s->dim) + 2 * size_of_rows(s->width) + width;
  each += 2 * size_of_rows(PANEL);
  Totals t = {0};
  Gradient of_w[2];
  for (int half = 0; half < 2; half++)
    of_w[half] = gradient_of(&t, grad_w ? grad_w + half * s->width * s->dim : NULL, grad_b ? grad_b + half * s->width : NULL,
                             width, padded(s->dim));
  int64_t packed = 2 * size_of_packed(s->width, s->dim) + (grad_x ? 2 * size_of_packed(s->dim, s->width) : 0);
  float *whole = reserve(packed + settle(&t, s->batch * blocks_of(s), s) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed first = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed second = take_packed_for(&place, s->width, s->dim, s->pairs);
  Packed first_back = {0}, second_back = {0};
  if (grad_x) {
    first_back = take_packed_for(&place, s->dim, s->width, s->pairs);
    second_back = take_packed_for(&place, s->dim, s->width, s->pairs);
  }
  float *totals = take_totals(&place, t, s);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *g = take(&own, width);
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    Rows room_u = take_rows(&own, PANEL), room_v = take_rows(&own, PANEL);
    Rows du = as_input(take_rows(&own, s->width), s->pairs), dv = as_input(take_rows(&own, s->width), s->pairs);
    Linear w_1 = half_of(w, 0, s->pairs), w_2 = half_of(w, 1, s->pairs);
    pack_linear(first, &w_1);
    pack_linear(second, &w_2);
    if (grad_x) pack_back(first_back, &w_1);
    if (grad_x) pack_back(second_back, &w_2);
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      Block k = block_of(s, item_of(&share));
      Rows in = read_block(room_in, x, k, s->dim, s);
      load_row(g, grad + k.b * s->width, s->width);
      for (int64_t c = 0; c < width; c += PANEL)
        for (int64_t r = 0; r < k.rows; r += stripe(first)) {
          Block part = stripe_of(k, r, first);
          Rows to_du = rows_from(columns_of(du, c), r), to_dv = rows_from(columns_of(dv, c), r);
          Rows u = before(to_du, room_u), v = before(to_dv, room_v);
          product(rows_from(in, r), part.rows, panel_of(first, c), u, 0);
          product(rows_from(in, r), part.rows, panel_of(second, c), v, 0);
          products_back(u, v, to_du, to_dv, part, c, g, mask, p, grad_p, s);
        }
      end_inputs(du, k.rows);
      end_inputs(dv, k.rows);
      add_gradient(&share, of_w[0], du, in, k.rows);
      add_gradient(&share, of_w[1], dv, in, k.rows);
      if (!grad_x) continue;
      Rows out = place_of(room_out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
      product(du, k.rows, first_back, out, 0);
      product(dv, k.rows, second_back, out, 1);
      store(out, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
    }
#pragma omp barrier
    for (int half = 0; half < 2; half++) write_gradient(of_w[half], totals, s->width, s->dim, t, s);
    end_team(s);
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

/* Where a group of threads sums sample b: groups share at most their first and last sample, so group + b is unique. */
INLINE int64_t slot_of(int64_t group, int64_t b, Totals t) { return (group + b) * t.levels * t.size; }
/* The sum over the groups that have blocks of sample b; `at` is the place in a slot. */
static vec sum_of_sample(const float *slots, int64_t at, int64_t b, Totals t, const Sizes *s) {
  doubles sum = {0};
  for (int64_t g = 0; g < groups_of(t); g++) {
    Run run = run_of_group(g, t, s);
    int64_t count = least(run.to, (b + 1) * blocks_of(s)) - most(run.from, b * blocks_of(s));
    if (count > 0) sum = add_levels(sum, slots + slot_of(g, b, t) + at, count, t);
  }
  return __builtin_convertvector(sum, vec);
}

/* centre (batch, dim) is the mean of the real tokens, and moment (batch, dim, dim) the sum of their second moments about it;
   count (batch) is the number of real tokens, at least 1. */
int moments(const Tokens *x, const uint8_t *mask, const float *count, float *centre, float *moment, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim), each = size_of_rows(s->dim);
  Totals t = {.size = width * width, .units = over(width, PANEL)};
  int64_t turns = settle(&t, blocks_of(s), s) - t.groups * t.levels * t.size, slots = (s->batch + t.groups) * t.levels * t.size;
  float *whole = reserve(items * width + s->batch * width + slots + turns + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  float *parts = take(&place, items * width), *means = take(&place, s->batch * width);
  float *totals = take(&place, slots);
  int64_t *units = (int64_t *)take(&place, turns);
  clear((float *)units, turns);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each;
    Rows centred = take_rows(&own, s->dim);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      about(centred, x, NULL, mask, k, s);
      add_rows(centred, k.rows, parts + item * width, 0);
    }
    add_blocks(centre, parts, 1, s->dim, s);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < s->batch; b++) {
      for (int64_t c = 0; c < s->dim; c++) centre[b * s->dim + c] /= count[b];
      load_row(means + b * width, centre + b * s->dim, s->dim);
    }
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    if (share.turns) share.turns = units + share.group * t.units;
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      Block k = block_of(s, item_of(&share));
      about(centred, x, means + k.b * width, mask, k, s);
      share.count = item_of(&share) - most(share.run.from, k.b * blocks_of(s));
      share.sums = totals + slot_of(share.group, k.b, t);
      share.older = t.levels == 2 ? share.sums + t.size : NULL;
      for (int64_t first = 0; first < width; first += PANEL) /* only on and above the diagonal */
        add_panel(&share, centred, centred, k.rows, 0, first, least(width, first + PANEL));
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s->batch * s->dim; item++) {
      int64_t b = item / s->dim, row = item % s->dim;
      float *to = moment + b * s->dim * s->dim;
      for (int64_t first = row - row % LANES; first < s->dim; first += LANES) {
        vec sum = sum_of_sample(totals, row * width + first, b, t, s);
        for (int64_t c = most(row, first); c < least(s->dim, first + LANES); c++)
          to[row * s->dim + c] = to[c * s->dim + row] = sum[c - first];
      }
    }
  }
  free(whole);
  return 0;
}

/* centre (batch, dim) is the mean of the real tokens, and rest (batch, dim) what float32 rounds off from it. Sums are taken of
   the distances to the first real token, so that tokens far from zero lose no digits. */
int centres(const Tokens *x, const uint8_t *mask, const float *count, float *centre, float *rest, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim), each = size_of_rows(s->dim);
  float *whole = reserve((items + s->batch) * width + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  float *parts = take(&place, items * width), *starts = take(&place, s->batch * width);
  for (int64_t b = 0; b < s->batch; b++) {
    int64_t first = 0;
    while (mask && first < s->tokens && !mask[b * s->tokens + first]) first++;
    clear(starts + b * width, width);
    if (first < s->tokens) copy((Rows){starts + b * width, width, width}, x, b, first, 1, s->dim, s->bf16);
  }
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each;
    Rows centred = take_rows(&own, s->dim);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      about(centred, x, starts + k.b * width, mask, k, s);
      add_rows(centred, k.rows, parts + item * width, 0);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s->batch * s->dim; item++) {
      int64_t b = item / s->dim, c = item % s->dim;
      double sum = 0;
      for (int64_t k = 0; k < blocks_of(s); k++) sum += parts[(b * blocks_of(s) + k) * width + c];
      double mean = starts[b * width + c] + sum / count[b];
      centre[item] = (float)mean;
      rest[item] = (float)(mean - centre[item]);
    }
  }
  free(whole);
  return 0;
}

/* y = (x - centre) A + c, zero at masked tokens, for A (batch, dim, dim), centre and c (batch, dim). With A and c from the
   gradients of centre and moment, y is the gradient of x. */
int moments_backward(const Tokens *x, const uint8_t *mask, const float *centre, const float *a, const float *c, const Tokens *y,
                     const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), packed = size_of_packed(s->dim, s->dim), width = padded(s->dim);
  int64_t each = 2 * size_of_rows(s->dim) + width;
  float *whole = reserve(s->batch * packed + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  float *maps = take(&place, s->batch * packed);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *mean = take(&own, width);
    Rows centred = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim);
    for (int64_t b = 0; b < s->batch; b++) {
      float *map_room = maps + b * packed;
      pack(take_packed(&map_room, s->dim, s->dim), a + b * s->dim * s->dim, s->dim, 1, s->dim, c + b * s->dim);
    }
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
      Block k = block_of(s, item);
      float *map_room = maps + k.b * packed;
      Packed map = take_packed(&map_room, s->dim, s->dim);
      load_row(mean, centre + k.b * s->dim, s->dim);
      about(centred, x, mean, mask, k, s);
      Rows out = place_of(room_out, y, k.b, k.first, k.rows, s->dim, s->bf16);
      product(centred, k.rows, map, out, 0);
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
  float *whole = reserve(size_of_packed(s->out, s->dim) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, s->out, s->dim, s->pairs);
#pragma omp parallel num_threads(team_of(s))
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
      for (int64_t r = 0; r < k.rows; r++) {
        for (int64_t c = 0; c < u.width; c += LANES) {
          vec value = *at(u.at + r * u.pitch, c);
          if (rest) *(floats *)(out.at + r * out.pitch + c) = value * *rest + *(vec *)(map.bias + c);
          put_input(u.at + r * u.pitch, c, value * *at(scales, c), map.pairs);
        }
        end_input(u.at + r * u.pitch, u.width, map.pairs);
      }
      product(as_input(u, map.pairs), k.rows, map, out, rest != NULL);
      store(out, y, k.b, k.first, k.rows, s->out, s->bf16);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}

/* The gradients of x, scale, W, b and rest (one per thread), for grad (batch, tokens, out). */
int linear_scaled_backward(const Tokens *grad, const Tokens *x, const float *scale, const Linear *w, const float *rest,
                           const Tokens *grad_x, float *grad_scale, float *grad_w, float *grad_b, float *grad_rest,
                           const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), width = padded(s->dim), ends = padded(s->out);
  int64_t each = 2 * size_of_rows(s->dim) + size_of_rows(s->out) + width;
  int through = grad_x || grad_scale; /* whether gradients go through W */
  Totals t = {0};
  Gradient of_w = gradient_of(&t, grad_w, grad_b, ends, width);
  float *whole = reserve(size_of_packed(s->dim, s->out) + items * width + settle(&t, items, s) + team_of(s) * each);
  float *place = whole;
  if (!whole) return 1;
  Packed back = take_packed_for(&place, s->dim, s->out, s->pairs);
  float *totals = take_totals(&place, t, s), *parts = take(&place, items * width);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *scales = take(&own, width);
    Rows u = take_rows(&own, s->dim), dz = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    doubles of_rest = {0};
    if (through) pack_back(back, w);
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      int64_t item = item_of(&share);
      Block k = block_of(s, item);
      copy(u, x, k.b, k.first, k.rows, s->dim, s->bf16);
      load_row(scales, scale + k.b * s->dim, s->dim);
      Rows g = read_block(room_g, grad, k, s->out, s);
      if (through) product(g, k.rows, back, dz, 0);
      else clear(dz.at, k.rows * dz.pitch);
      float *part = parts + item * width;
      clear(part, width);
      for (int64_t r = 0; r < k.rows; r++) {
        vec along = {0};
        for (int64_t c = 0; c < u.width; c += LANES) {
          vec *value = at(u.at + r * u.pitch, c), *slope = at(dz.at + r * dz.pitch, c), f = *at(scales, c);
          *at(part, c) += *slope * *value;
          *slope *= f;
          if (rest) {
            vec upper = value_at(g, r, c);
            *slope += upper * *rest;
            along += upper * *value;
          }
          *value *= f;
        }
        of_rest += __builtin_convertvector(along, doubles);
      }
      add_gradient(&share, of_w, g, u, k.rows);
      if (grad_x) store(dz, grad_x, k.b, k.first, k.rows, s->dim, s->bf16);
    }
    double whole_rest = 0;
    for (int i = 0; i < LANES; i++) whole_rest += of_rest[i];
    if (grad_rest) grad_rest[omp_get_thread_num()] = (float)whole_rest;
#pragma omp barrier
    if (grad_scale) add_blocks(grad_scale, parts, 1, s->dim, s);
    write_gradient(of_w, totals, s->out, s->dim, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}
