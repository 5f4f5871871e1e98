/* Runs one call of a C kernel for another processor, under an emulator. Reads the memory blocks that the call uses, their
   addresses in the caller, the addresses inside them that must be moved, and the arguments; writes the blocks back.
   tests/ops/native/emulation.py writes the file. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t Kernel(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, int64_t);
#define KERNELS(X)                                                                                                      \
  X(linear_powers) X(linear_powers_backward) X(pom_pooled) X(pom_causal) X(linear_pairs) X(linear_pairs_backward) X(moments) X(centres) \
  X(moments_backward) X(linear_scaled) X(linear_scaled_backward) X(linear_gated) X(linear_gated_backward) X(qt_pool)    \
  X(qt_pool_backward) X(qt_spread) X(qt_spread_backward) X(qt_whole) X(qt_causal) X(depthwise) X(depthwise_weight)
#define DECLARE(name) int name();
KERNELS(DECLARE)
#define ENTER(name) {#name, (Kernel *)name},
static const struct {
  const char *name;
  Kernel *run;
} kernels[] = {KERNELS(ENTER)};

static int64_t number(FILE *file) {
  int64_t value;
  if (fread(&value, sizeof value, 1, file) != 1) exit(3);
  return value;
}

int main(int argc, char **argv) {
  FILE *file = fopen(argv[argc - 1], "r+b");
  if (!file) return 3;
  char name[64] = {0};
  if (fread(name, 1, sizeof name, file) != sizeof name) return 3;
  int64_t blocks = number(file), *size = calloc(blocks + 1, 8), arguments[16] = {0};
  char **at = calloc(blocks + 1, sizeof *at);
  for (int64_t i = 0; i < blocks; i++) size[i] = number(file);
  for (int64_t i = 0; i < 16; i++) arguments[i] = number(file);
  int64_t moves = number(file), *move = calloc(4 * moves + 1, 8);
  for (int64_t i = 0; i < 4 * moves; i++) move[i] = number(file);
  long start = ftell(file);
  for (int64_t i = 0; i < blocks; i++) {
    at[i] = aligned_alloc(64, (size[i] + 127) / 64 * 64);
    if (!at[i] || fread(at[i], 1, size[i], file) != (size_t)size[i]) return 3;
  }
  for (int64_t i = 0; i < moves; i++) { /* block, offset: the address of another block, offset. Block -1: an argument. */
    int64_t address = (int64_t)(at[move[4 * i + 2]] + move[4 * i + 3]);
    if (move[4 * i] < 0) arguments[move[4 * i + 1]] = address;
    else memcpy(at[move[4 * i]] + move[4 * i + 1], &address, 8);
  }
  for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) {
    if (strcmp(kernels[k].name, name)) continue;
    int64_t *a = arguments;
    int failed = (int)kernels[k].run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
                                     a[14], a[15]);
    fseek(file, start, SEEK_SET);
    for (int64_t i = 0; i < blocks; i++) fwrite(at[i], 1, size[i], file);
    return fclose(file) || failed;
  }
  return 4;
}
