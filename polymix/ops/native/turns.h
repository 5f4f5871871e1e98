/* Sums that the blocks of a sample hand on to one another, for causal kernels.

   Threads take blocks of tokens in order. A thread computes the sums of its block, waits for its turn, takes the sums of the
   earlier blocks of the sample, passes them on with its own added, and finishes its block. Finishing is the larger part of the
   work, so threads rarely wait, and a single long sequence keeps all threads busy. Sums are float32 within a block and double
   over the blocks, in a fixed order, so they do not depend on the number of threads. */

#pragma once
#include <sched.h>

#include "blocks.h"

/* Replace the totals of block `item` by the sums of its sample before the block. `edge` holds the sums before the first token of
   the sample if the block is the first, and gets those after its last token if the block is the last. A waiting thread yields the
   processor, in case there are more threads than processors. A sample of one block does not wait. */
static void take_turn(int64_t *turn, int64_t item, double *so_far, float *totals, float *edge, int64_t size, const Sizes *s) {
  int64_t number = blocks_of(s), place = item % number;
  for (int tries = 0; number > 1 && __atomic_load_n(turn, __ATOMIC_ACQUIRE) != item; tries++)
    if (tries > 1000) sched_yield();
  for (int64_t c = 0; c < size; c++) {
    double before = place ? so_far[c] : edge[c], after = before + totals[c];
    if (place + 1 < number) so_far[c] = after;
    else edge[c] = (float)after;
    totals[c] = (float)before;
  }
  if (number > 1) __atomic_store_n(turn, item + 1, __ATOMIC_RELEASE);
}
