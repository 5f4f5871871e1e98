/* Gradients of weights, which are sums over all blocks of tokens.

   Each group of threads sums in one accumulator. Every thread is a group, unless so many accumulators would take more than
   BUDGET bytes; then the threads of a group take turns. Turns go by panels of an accumulator, so that several threads can work
   on it, and in a fixed order, so that results are reproducible.

   Sums have three levels: the tokens of a block, MANY blocks, and all of those. Longer sums in float32 would lose digits. */

#pragma once
#include <sched.h>

#include "blocks.h"

#define MANY 64            /* blocks that are summed before their sum is added to the older ones */
#ifndef BUDGET             /* tests set a smaller one */
#define BUDGET (32 << 20) /* bytes of accumulators; a single one may take more */
#endif

/* The accumulators of a call: `size` floats each, in `units` parts that threads take turns at. Where maps multiply in pairs, each
   thread packs up to `high` and `wide` columns for their gradients. */
typedef struct {
  int64_t size, units, levels, groups, high, wide;
} Totals;
/* The blocks [from, to), counted over all samples. */
typedef struct {
  int64_t from, to;
} Run;
/* A thread's share in the sums of its group: member `member` of `members`. `count` blocks have been added before. */
typedef struct {
  Run run;
  int64_t group, member, members, turn, count, unit;
  float *sums, *older, *turned, *packed;
  int64_t *turns;
} Share;
/* The gradients of a linear map's weight and bias, either NULL if nobody asks for it, and where they are in an accumulator. */
typedef struct {
  float *weight, *bias;
  int64_t out, in, of_weight, of_bias;
} Gradient;

/* ---- before the threads start ---- */

/* Add room for the gradients of a map to the accumulators; out and in are padded. */
static Gradient gradient_of(Totals *t, float *weight, float *bias, int64_t out, int64_t in) {
  Gradient g = {weight, bias, out, in, t->size, t->size + (weight ? out * in : 0)};
  t->size = g.of_bias + (bias ? out : 0);
  t->units += (weight ? over(in, PANEL) : 0) + (bias ? 1 : 0);
  t->high = most(t->high, out), t->wide = most(t->wide, in);
  return g;
}
/* The words that a thread packs columns in. */
INLINE int64_t size_of_turned(Totals t) { return t.high * TURNED; }
INLINE int64_t size_of_columns(Totals t, const Sizes *s) { return s->pairs ? size_of_turned(t) + ROWS / 2 * t.wide : 0; }
/* Choose the number of accumulators. Returns the floats that all this takes. */
static int64_t settle(Totals *t, int64_t blocks, const Sizes *s) {
  t->levels = blocks > MANY ? 2 : 1;
  t->groups = most(1, least(team_of(s), BUDGET / most(1, (int64_t)sizeof(float) * t->levels * t->size)));
  return t->groups * t->levels * t->size + padded(2 * t->groups * t->units) + team_of(s) * size_of_columns(*t, s);
}
/* Take the accumulators from a larger buffer. The turns lie after them, then the packed columns. */
static float *take_totals(float **room, Totals t, const Sizes *s) {
  float *sums = take(room, t.groups * t.levels * t.size);
  int64_t turns = 2 * t.groups * t.units; /* two floats each */
  clear(take(room, turns), turns);
  take(room, team_of(s) * size_of_columns(t, s));
  return sums;
}

/* ---- the share of a thread ---- */

INLINE int64_t groups_of(Totals t) { return least(t.groups, omp_get_num_threads()); }
INLINE int64_t first_member(int64_t group, Totals t) { return over(group * omp_get_num_threads(), groups_of(t)); }
INLINE Run run_of_group(int64_t group, Totals t, const Sizes *s) {
  int64_t items = s->batch * blocks_of(s), groups = groups_of(t);
  return (Run){items * group / groups, items * (group + 1) / groups};
}
/* The place of thread `thread` in its group; its first turn is that of its number. */
static Share place_of_thread(int64_t thread, Totals t, const Sizes *s) {
  int64_t group = thread * groups_of(t) / omp_get_num_threads(), first = first_member(group, t), member = thread - first;
  return (Share){.run = run_of_group(group, t, s), .group = group, .member = member,
                 .members = first_member(group + 1, t) - first, .turn = member, .count = member};
}
static Share share_of(int64_t thread, float *sums, Totals t, const Sizes *s) {
  Share h = place_of_thread(thread, t, s);
  h.sums = sums + h.group * t.levels * t.size;
  h.older = t.levels == 2 ? h.sums + t.size : NULL;
  float *turns = sums + t.groups * t.levels * t.size;
  if (h.members > 1) h.turns = (int64_t *)turns + h.group * t.units;
  if (s->pairs) {
    begin_tiles();
    h.turned = turns + padded(2 * t.groups * t.units) + thread * size_of_columns(t, s);
    h.packed = h.turned + size_of_turned(t);
  }
  return h;
}
/* The members of a group take its blocks in turn. */
INLINE int64_t item_of(const Share *h) { return h->run.from + h->turn; }
INLINE void next_turn(Share *h) { h->turn += h->members, h->count = h->turn, h->unit = 0; }

/* Wait for this thread's turn at the next part. A waiting thread yields the processor, in case there are more threads than
   processors. */
static void begin_part(Share *h) {
  if (!h->turns) return;
  for (int tries = 0; __atomic_load_n(h->turns + h->unit, __ATOMIC_ACQUIRE) != h->turn; tries++)
    if (tries > 1000) sched_yield();
}
static void end_part(Share *h) {
  if (h->turns) __atomic_store_n(h->turns + h->unit++, h->turn + 1, __ATOMIC_RELEASE);
}
/* Whether the accumulator holds something that the next block is added to; else it is overwritten. */
INLINE int holds(const Share *h) { return h->count % MANY != 0; }
/* Add `n` sums to the older ones if they are complete. */
static void keep(Share *h, int64_t at, int64_t n) {
  if (!h->older || (h->count + 1) % MANY) return;
  for (int64_t c = at; c < at + n; c += LANES) {
    vec *to = (vec *)(h->older + c), sum = *(const vec *)(h->sums + c);
    *to = h->count < MANY ? sum : *to + sum;
  }
}

/* Add columns [first, first + PANEL) of Σ_r x[r] ⊗ y[r] to the sums at `place`, for the first `high` of their rows. */
static void add_panel(Share *h, Rows x, Rows y, int64_t rows, int64_t place, int64_t first, int64_t high) {
  begin_part(h);
  if (h->packed) outer_pairs(h->turned, x.width, h->packed, y.width, rows, h->sums + place, first, high, holds(h));
  else outer_panel(x, y, rows, h->sums + place, first, high, holds(h));
  for (int64_t row = 0; row < high; row++) keep(h, place + row * y.width + first, least(PANEL, y.width - first));
  end_part(h);
}
/* Add the gradients of a map's weight and bias, for gradients du of its outputs. */
static void add_gradient(Share *h, Gradient g, Rows du, Rows in, int64_t rows) {
  if (h->packed && g.weight) {
    pack_turned(h->turned, du, rows);
    pack_rows(h->packed, in, rows);
  }
  for (int64_t first = 0; g.weight && first < g.in; first += PANEL) add_panel(h, du, in, rows, g.of_weight, first, g.out);
  if (!g.bias) return;
  begin_part(h);
  add_rows(du, rows, h->sums + g.of_bias, holds(h));
  keep(h, g.of_bias, g.out);
  end_part(h);
}

/* ---- after a barrier ---- */

/* The sum over the groups, of which each has added up `count` blocks; `from` is the place in the first accumulator. */
INLINE doubles add_levels(doubles sum, const float *from, int64_t count, Totals t) {
  if (t.levels == 1 ? count > 0 : count % MANY) sum += __builtin_convertvector(*(const vec *)from, doubles);
  if (t.levels == 2 && count >= MANY) sum += __builtin_convertvector(*(const vec *)(from + t.size), doubles);
  return sum;
}
static vec sum_of_groups(const float *from, Totals t, const Sizes *s) {
  doubles sum = {0};
  for (int64_t g = 0; g < groups_of(t); g++, from += t.levels * t.size) {
    Run run = run_of_group(g, t, s);
    sum = add_levels(sum, from, run.to - run.from, t);
  }
  return __builtin_convertvector(sum, vec);
}
/* to (rows, width) = the sums at `from`, with rows of padded width. All threads of the team must call this. */
static void write_sums_of_groups(float *to, const float *from, int64_t rows, int64_t width, Totals t, const Sizes *s) {
  if (!to) return;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t c = 0; c < width; c += LANES)
      put(to, row * width + c, least(LANES, width - c), 0, sum_of_groups(from + row * padded(width) + c, t, s));
}
/* Write the gradients of a map (out, in). All threads of the team must call this. */
static void write_gradient(Gradient g, const float *sums, int64_t out, int64_t in, Totals t, const Sizes *s) {
  write_sums_of_groups(g.weight, sums + g.of_weight, out, in, t, s);
  write_sums_of_groups(g.bias, sums + g.of_bias, 1, out, t, s);
}
