/* QT's compact form including its linear maps, forward and backward: the moments Σ_j [1, k, k²] ⊗ [v, 1], where k and v are
   maps of the tokens, and [1, q, q²] times such moments.

   Each thread takes a run of blocks of tokens through all steps, head by head. It sums in float32, and the sums of the threads
   are added in a fixed order; the gradients of weights are summed as gradients.h says. Heads are padded with zeros to whole
   vectors. */

#include <math.h>

#include "functions.h"
#include "moments.h"

/* The blocks of a thread. They are contiguous, so the thread shares only its first and its last sample with other threads. The
   first members of a group have one more, so that its members take turns until the last block. */
INLINE Run run_of(int64_t thread, Totals t, const Sizes *s) {
  Share h = place_of_thread(thread, t, s);
  int64_t each = (h.run.to - h.run.from) / h.members, longer = (h.run.to - h.run.from) % h.members;
  int64_t from = h.run.from + h.member * each + least(h.member, longer);
  return (Run){from, from + each + (h.member < longer)};
}
INLINE int begins_earlier(int64_t b, Run run, const Sizes *s) { return b * blocks_of(s) < run.from; }
INLINE int lies_in(int64_t b, Run run, const Sizes *s) {
  return !begins_earlier(b, run, s) && (b + 1) * blocks_of(s) <= run.to;
}
/* Where a thread keeps the sums of sample b. It has three buffers: one for a sample that another thread has begun, one for the
   samples that it begins itself, and one for the older blocks of the current sample. */
INLINE float *buffer_of(float *buffers, int64_t b, Run run, Heads g, const Sizes *s) {
  return buffers + (begins_earlier(b, run, s) ? 0 : g.number * size_of_sums(g));
}
static float *begin_sums(float *buffers, int64_t item, Run run, Heads g, const Sizes *s) {
  Block k = block_of(s, item);
  float *sample_sums = buffer_of(buffers, k.b, run, g, s);
  if (item == run.from || !k.first) clear(sample_sums, g.number * size_of_sums(g));
  return sample_sums;
}
static void add_all(float *to, const float *from, int64_t size) {
  for (int64_t c = 0; c < size; c += LANES) *at(to, c) += *(const vec *)(from + c);
}
/* Finish a block. Adding up sums of MANY blocks is more precise than one long sum. */
static void end_sums(float *to, float *buffers, int64_t item, Run run, Heads g, const Sizes *s) {
  int64_t b = item / blocks_of(s), size = g.number * size_of_sums(g);
  int64_t blocks = item + 1 - most(run.from, b * blocks_of(s));
  float *sample_sums = buffer_of(buffers, b, run, g, s), *older = buffers + 2 * size;
  int last = (item + 1) % blocks_of(s) == 0;
  if (blocks == MANY) clear(older, size);
  if (blocks % MANY == 0) {
    add_all(older, sample_sums, size);
    clear(sample_sums, size);
  }
  if (blocks >= MANY && (last || item + 1 == run.to)) add_all(sample_sums, older, size);
  if (!last || !lies_in(b, run, s)) return;
  for (int64_t h = 0; h < g.number; h++) write_sums(sums_of_head(to, b, h, g), sample_sums + h * size_of_sums(g), g);
}
/* Add up the sums of the samples that several threads share; their buffers lie `step` apart. All threads of the team must call
   this. */
static void end_shared(float *to, float *buffers, int64_t step, Heads g, Totals totals, const Sizes *s) {
#pragma omp barrier
#pragma omp for schedule(static)
  for (int64_t item = 0; item < s->batch * g.number; item++) {
    int64_t b = item / g.number, h = item % g.number, size = size_of_sums(g);
    float *sum = NULL, *place = sums_of_head(to, b, h, g);
    int done = 0;
    for (int64_t t = 0; t < omp_get_num_threads() && !done; t++) {
      Run run = run_of(t, totals, s);
      if (run.from == run.to || run.to <= b * blocks_of(s) || run.from >= (b + 1) * blocks_of(s)) continue;
      done = lies_in(b, run, s);
      float *sample_sums = buffer_of(buffers + t * step, b, run, g, s) + h * size;
      if (sum) add_all(sum, sample_sums, size);
      else sum = sample_sums;
    }
    if (!sum) clear(place, (1 + g.order * g.each) * (g.each + 1)); /* no tokens */
    else if (!done) write_sums(place, sum, g);
  }
}

/* Load the moments of all heads of sample b. */
static void take_sample(MomentMaps *m, float *room, float *from, int64_t b, int with_back, const Sizes *s, Heads g) {
  for (int64_t h = 0; h < g.number; h++) m[h] = take_moment_maps(&room, sums_of_head(from, b, h, g), with_back, s->pairs, g);
}

/* ---- pool: Σ_j [1, k, k²] ⊗ [v, 1]; W holds W_k, then W_v ---- */

/* sums (batch, heads, 1 + order · each, each + 1). Returns 0, or 1 if memory cannot be allocated, like all functions here. */
int qt_pool(const Tokens *x, const Linear *w, const uint8_t *mask, float *sums, const Sizes *s) {
  Heads g = heads_of(s);
  int64_t width = 2 * g.number * g.stride, size = size_of_sums(g), buffers = 3 * g.number * size;
  int64_t columns_size = s->pairs ? (TURNED + ROWS / 2) * g.stride : 0;
  int64_t each = buffers + size_of_rows(s->dim) + size_of_rows(width) + size_of_rows(g.stride) + ROWS + columns_size;
  float *whole = reserve(size_of_packed(width, s->dim) + size_to(2 * g.number, s->dim, g) + team_of(s) * each);
  float *place = whole;
  if (!whole) return 1;
  Totals t = {.groups = team_of(s)}; /* every thread sums for itself */
  Packed map = take_packed_for(&place, width, s->dim, s->pairs);
  float *room_map = take(&place, size_to(2 * g.number, s->dim, g));
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *own_buffers = take(&own, buffers);
    Rows room_in = take_rows(&own, s->dim), u = take_rows(&own, width), squares = take_rows(&own, g.stride);
    float *b = take(&own, ROWS), *turned = take(&own, columns_size);
    Columns columns = {turned, s->pairs ? turned + TURNED * g.stride : NULL};
    Linear kv = map_to(room_map, w, 2 * g.number, g, s->pairs);
    pack_linear(map, &kv);
    Run run = run_of(omp_get_thread_num(), t, s);
    for (int64_t item = run.from; item < run.to; item++) {
      Block k = block_of(s, item);
      product(read_block(room_in, x, k, s->dim, s), k.rows, map, u, 0);
      hide(u, k, mask, b, s);
      float *sample_sums = begin_sums(own_buffers, item, run, g, s);
      for (int64_t h = 0; h < g.number; h++) {
        Rows keys = head_of(u, h, g);
        square_rows(keys, squares, k.rows, g);
        add_sums(sums_at(sample_sums + h * size, g), keys, squares, head_of(u, g.number + h, g), b, k.rows, columns, g);
      }
      end_sums(sums, own_buffers, item, run, g, s);
    }
    end_shared(sums, place, each, g, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}

/* The gradients of x, W and b; grad has the shape of sums. Each may be NULL if nobody asks for it, as in all backward
   functions. */
int qt_pool_backward(float *grad, const Tokens *x, const Linear *w, const uint8_t *mask, const Tokens *grad_x,
                     float *grad_w, float *grad_b, const Sizes *s) {
  Heads g = heads_of(s);
  int64_t width = 2 * g.number * g.stride, maps_size = g.number * size_of_moment_maps(g, s->pairs);
  int64_t rows = 2 * size_of_rows(s->dim) + size_of_rows(width) + size_of_rows(g.stride) + size_of_rows(g.order * g.stride);
  rows += size_of_features(g, s->pairs);
  int64_t each = maps_size + size_of_list(g) + rows + ROWS;
  Totals t = {0};
  Gradient of_w = gradient_of(&t, grad_w, grad_b, width, padded(s->dim));
  int64_t packed = size_of_packed(width, s->dim) + (grad_x ? size_of_packed(s->dim, width) : 0) + size_to(2 * g.number, s->dim, g);
  float *whole = reserve(packed + settle(&t, s->batch * blocks_of(s), s) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, width, s->dim, s->pairs), back = {0};
  if (grad_x) back = take_packed_for(&place, s->dim, width, s->pairs);
  float *room_map = take(&place, size_to(2 * g.number, s->dim, g)), *totals = take_totals(&place, t, s);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *room_m = take(&own, maps_size);
    MomentMaps *m = (MomentMaps *)take(&own, size_of_list(g));
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), u = take_rows(&own, width);
    Rows squares = take_rows(&own, g.stride), both = take_rows(&own, g.order * g.stride);
    Rows features = take_features(&own, g, s->pairs);
    float *b = take(&own, ROWS);
    Linear kv = map_to(room_map, w, 2 * g.number, g, s->pairs);
    pack_linear(map, &kv);
    if (grad_x) pack_back(back, &kv);
    int64_t sample = -1;
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    for (; item_of(&share) < share.run.to; next_turn(&share)) {
      Block k = block_of(s, item_of(&share));
      if (k.b != sample) take_sample(m, room_m, grad, sample = k.b, 1, s, g);
      Rows in = read_block(room_in, x, k, s->dim, s);
      product(in, k.rows, map, u, 0);
      hide(u, k, mask, b, s);
      for (int64_t h = 0; h < g.number; h++) {
        Rows keys = head_of(u, h, g), values = head_of(u, g.number + h, g);
        square_rows(keys, squares, k.rows, g);
        product(round_input(values, k.rows, s->pairs), k.rows, m[h].back, both, 0);
        query(m + h, keys, squares, k.rows, features, values, g);
        slopes(m + h, keys, both, b, k.rows, g);
      }
      hide(u, k, mask, b, s);
      add_gradient(&share, of_w, u, in, k.rows);
      if (grad_x) write_product(round_input(u, k.rows, s->pairs), back, room_out, grad_x, k, s->dim, s);
    }
#pragma omp barrier
    write_to_heads(of_w, totals, 2 * g.number, g, s->dim, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}

/* ---- spread: W_o (numerator / denominator) + b_o, both [1, q, q²] · moments with q = W x + b ---- */

/* y (batch, tokens, out) for moments (batch, heads, 1 + order · each, each + 1) and bounds (batch) of the denominators. */
int qt_spread(const Tokens *x, const Linear *w, float *moments, const float *bounds, const Linear *last, const Tokens *y,
              const Sizes *s) {
  Heads g = heads_of(s);
  int64_t width = g.number * g.stride, maps_size = g.number * size_of_moment_maps(g, s->pairs);
  int64_t rows = size_of_rows(s->dim) + 2 * size_of_rows(width) + size_of_rows(g.stride) + size_of_rows(s->out);
  int64_t each = maps_size + size_of_list(g) + rows + size_of_features(g, s->pairs) + ROWS;
  int64_t packed = size_of_packed(width, s->dim) + size_of_packed(s->out, width);
  float *whole = reserve(packed + size_to(g.number, s->dim, g) + size_from(s->out, g) + team_of(s) * each);
  float *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, width, s->dim, s->pairs);
  Packed end = take_packed_for(&place, s->out, width, s->pairs);
  float *room_map = take(&place, size_to(g.number, s->dim, g)), *room_last = take(&place, size_from(s->out, g));
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *room_m = take(&own, maps_size), *below = take(&own, ROWS);
    MomentMaps *m = (MomentMaps *)take(&own, size_of_list(g));
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->out), q = take_rows(&own, width);
    Rows z = take_rows(&own, width), squares = take_rows(&own, g.stride), features = take_features(&own, g, s->pairs);
    Linear to_heads = map_to(room_map, w, g.number, g, s->pairs), from_heads = map_from(room_last, last, g, s->pairs);
    pack_linear(map, &to_heads);
    pack_linear(end, &from_heads);
    int64_t sample = -1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s->batch * blocks_of(s); item++) {
      Block k = block_of(s, item);
      if (k.b != sample) take_sample(m, room_m, moments, sample = k.b, 0, s, g);
      product(read_block(room_in, x, k, s->dim, s), k.rows, map, q, 0);
      for (int64_t h = 0; h < g.number; h++)
        divide(m + h, head_of(q, h, g), squares, k.rows, bounds[k.b], below, features, head_of(z, h, g), g);
      write_product(round_input(z, k.rows, end.pairs), end, room_out, y, k, s->out, s);
    }
    end_team(s);
  }
  free(whole);
  return 0;
}

/* ---- without gradients: both in one call ---- */

/* W holds W_q, W_k and W_v; the moments are multiplied by γ², β² (4/d)^½ and α² of their powers, for scale (3, heads): α, β, γ. */
int qt_whole(const Tokens *x, const Linear *w, const float *scale, const uint8_t *mask, const float *bounds, const Linear *last,
             const Tokens *y, const Sizes *s) {
  Heads g = heads_of(s);
  int64_t rows = 1 + g.order * g.each, size = rows * (g.each + 1);
  float *moments = reserve(s->batch * g.number * size);
  int64_t own = scratch_bytes;
  if (!moments) return 1;
  Linear of_queries = {w->weight, w->bias, s->dim, w->in}, rest = {.out = 2 * s->dim, .in = w->in};
  rest.weight = weight_at(w, s->dim * w->in, s->pairs), rest.bias = w->bias ? w->bias + s->dim : NULL;
  int failed = qt_pool(x, &rest, mask, moments, s);
  own += scratch_bytes;
  for (int64_t item = 0; item < s->batch * g.number && !failed; item++) {
    const float *of_head = scale + item % g.number;
    float alpha = of_head[0], beta = of_head[g.number], gamma = of_head[2 * g.number], root = 2.0f / sqrtf(g.each);
    float by[] = {gamma * gamma, root * (beta * beta), alpha * alpha}, *to = moments + item * size;
    for (int64_t r = 0; r < rows; r++, to += g.each + 1)
      for (int64_t c = 0; c <= g.each; c++) to[c] *= by[r ? 1 + (r - 1) / g.each : 0];
  }
  failed = failed || qt_spread(x, &of_queries, moments, bounds, last, y, s);
  scratch_bytes = most(own, scratch_bytes);
  free(moments);
  return failed;
}

/* The gradients of x, W, b, moments, W_o and b_o for grad (batch, tokens, out). That of the moments must not be NULL. */
int qt_spread_backward(const Tokens *grad, const Tokens *x, const Linear *w, float *moments, const float *bounds,
                       const Linear *last, const Tokens *grad_x, float *grad_w, float *grad_b, float *grad_m,
                       float *grad_last, float *grad_last_b, const Sizes *s) {
  Heads g = heads_of(s);
  int64_t width = g.number * g.stride, size = size_of_sums(g), buffers = 3 * g.number * size;
  int64_t maps_size = g.number * size_of_moment_maps(g, s->pairs);
  int64_t rows = 2 * size_of_rows(s->dim) + size_of_rows(s->out) + 3 * size_of_rows(width) + size_of_rows(g.stride);
  int64_t each = buffers + maps_size + size_of_list(g) + rows + size_of_rows(g.order * g.stride) + ROWS;
  each += size_of_features(g, s->pairs);
  Totals t = {0};
  Gradient of_w = gradient_of(&t, grad_w, grad_b, width, padded(s->dim));
  Gradient of_last = gradient_of(&t, grad_last, grad_last_b, padded(s->out), width);
  int64_t packed = size_of_packed(width, s->dim) + (grad_x ? size_of_packed(s->dim, width) : 0) + size_of_packed(width, s->out);
  packed += size_to(g.number, s->dim, g) + size_from(s->out, g);
  float *whole = reserve(packed + settle(&t, s->batch * blocks_of(s), s) + team_of(s) * each), *place = whole;
  if (!whole) return 1;
  Packed map = take_packed_for(&place, width, s->dim, s->pairs), back = {0};
  Packed end_back = take_packed_for(&place, width, s->out, s->pairs);
  if (grad_x) back = take_packed_for(&place, s->dim, width, s->pairs);
  float *room_map = take(&place, size_to(g.number, s->dim, g)), *room_last = take(&place, size_from(s->out, g));
  float *totals = take_totals(&place, t, s);
#pragma omp parallel num_threads(team_of(s))
  {
    float *own = place + omp_get_thread_num() * each, *own_buffers = take(&own, buffers), *room_m = take(&own, maps_size);
    float *below = take(&own, ROWS);
    MomentMaps *m = (MomentMaps *)take(&own, size_of_list(g));
    Rows room_in = take_rows(&own, s->dim), room_out = take_rows(&own, s->dim), room_g = take_rows(&own, s->out);
    Rows q = take_rows(&own, width), z = take_rows(&own, width), dz = take_rows(&own, width);
    Rows squares = take_rows(&own, g.stride), both = take_rows(&own, g.order * g.stride);
    Rows features = take_features(&own, g, s->pairs);
    Linear to_heads = map_to(room_map, w, g.number, g, s->pairs), from_heads = map_from(room_last, last, g, s->pairs);
    pack_linear(map, &to_heads);
    if (grad_x) pack_back(back, &to_heads);
    pack_back(end_back, &from_heads);
    int64_t sample = -1;
    Share share = share_of(omp_get_thread_num(), totals, t, s);
    Run run = run_of(omp_get_thread_num(), t, s);
    for (int64_t item = run.from; item < run.to; item++, next_turn(&share)) {
      Block k = block_of(s, item);
      float *sample_sums = begin_sums(own_buffers, item, run, g, s);
      if (k.b != sample) take_sample(m, room_m, moments, sample = k.b, 1, s, g);
      Rows in = read_block(room_in, x, k, s->dim, s);
      Rows dy = read_block(room_g, grad, k, s->out, s);
      product(in, k.rows, map, q, 0);
      product(dy, k.rows, end_back, dz, 0);
      for (int64_t h = 0; h < g.number; h++) {
        Rows queries = head_of(q, h, g), quotients = head_of(z, h, g), slope = head_of(dz, h, g);
        divide(m + h, queries, squares, k.rows, bounds[k.b], below, features, quotients, g);
        divide_back(quotients, slope, below, bounds[k.b], k.rows, g);
        add_sums(sums_at(sample_sums + h * size, g), queries, squares, slope, below, k.rows, (Columns){share.turned, share.packed}, g);
        product(round_input(slope, k.rows, s->pairs), k.rows, m[h].back, both, 0);
        slopes(m + h, queries, both, below, k.rows, g);
      }
      end_sums(grad_m, own_buffers, item, run, g, s);
      add_gradient(&share, of_last, dy, z, k.rows);
      add_gradient(&share, of_w, q, in, k.rows);
      if (grad_x) write_product(round_input(q, k.rows, s->pairs), back, room_out, grad_x, k, s->dim, s);
    }
    end_shared(grad_m, place, each, g, t, s);
    write_to_heads(of_w, totals, g.number, g, s->dim, t, s);
    write_spaced(of_last.weight, s->out, 1, 1, g.number * g.each, g.each, g.stride, totals + of_last.of_weight, width, t, s);
    write_sums_of_groups(of_last.bias, totals + of_last.of_bias, 1, s->out, t, s);
    end_team(s);
  }
  free(whole);
  return 0;
}
