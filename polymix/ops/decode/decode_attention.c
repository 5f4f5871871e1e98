/* Softmax attention of one query per head, as in a step of decoding: y = Σ_m p_m v_m with p = softmax(scale · q k_mᵀ). Keys and
   values are read once, in their own layout and dtype. All arithmetic is float32; q, k, v and y are all float32 or all
   bfloat16. */

#include <omp.h>

#include "functions.h"

#define MAX_WIDTH 256 /* channels of a head, as in attention.py */
#define BLOCK 128  /* tokens that are summed before they are added to the total, which keeps rounding errors small */
#define AT_ONCE 4  /* tokens whose products with the query are summed at once */

/* An array (batch, heads, tokens, channels) and its strides in elements; the channels are contiguous. */
typedef struct {
  void *data;
  int64_t batch, head, token;
} Heads;

/* As in attention.py; `mask_stride` is the distance between the rows of the mask, 0 if all sequences share one. */
typedef struct {
  int64_t batch, heads, tokens, width, mask_stride, bf16, threads;
  float scale;
} Call;

INLINE float largest(vec v) {
  UNROLL for (int half = LANES / 2; half > 0; half /= 2)
    UNROLL for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}
/* to[t] = q k_tᵀ for T tokens from element `at` on. */
INLINE void products(const float *q, const void *k, int64_t at, int64_t token, int64_t width, float *to, const int T, const int bf16) {
  vec sums[AT_ONCE];
  int64_t i = 0;
  UNROLL for (int t = 0; t < T; t++) sums[t] = (vec){0};
  for (; i + LANES <= width; i += LANES)
    UNROLL for (int t = 0; t < T; t++) sums[t] += *(const floats *)(q + i) * get(k, at + t * token + i, LANES, bf16);
  if (i < width)
    UNROLL for (int t = 0; t < T; t++) sums[t] += *(const floats *)(q + i) * get(k, at + t * token + i, width - i, bf16);
  UNROLL for (int t = 0; t < T; t++) to[t] = sum_of(sums[t]);
}

/* One head of one sequence; `p` has room for the scores of all tokens and a vector more. */
INLINE void head(Heads q, Heads k, Heads v, const uint8_t *mask, Heads y, const Call *call, int64_t b, int64_t h, float *p,
                 const int bf16) {
  const int64_t n = call->tokens, width = call->width, vectors = over(width, LANES);
  float query[MAX_WIDTH + LANES] = {0};
  for (int64_t i = 0; i < width; i += LANES) {
    vec part = get(q.data, b * q.batch + h * q.head + i, least(LANES, width - i), bf16);
    *(floats *)(query + i) = call->scale * part;
  }
  int64_t from = b * k.batch + h * k.head, m = 0;
  for (; m + AT_ONCE <= n; m += AT_ONCE) products(query, k.data, from + m * k.token, k.token, width, p + m, AT_ONCE, bf16);
  for (; m < n; m++) products(query, k.data, from + m * k.token, k.token, width, p + m, 1, bf16);
  const uint8_t *mask_stride = mask ? mask + b * call->mask_stride : NULL;
  for (m = 0; mask_stride && m < n; m++)
    if (!mask_stride[m]) p[m] = -__builtin_inff();
  for (m = n; m < padded(n); m++) p[m] = -__builtin_inff();
  vec high = all(-__builtin_inff());
  for (m = 0; m < n; m += LANES) { /* NaN is not larger than anything, but e^NaN below is NaN */
    vec s = *(const floats *)(p + m);
    high = choose((words)(s > high), s, high);
  }
  float top = largest(high);
  vec total[MAX_WIDTH / LANES + 1] = {{0}}, weight = {0};
  if (top != -__builtin_inff() || n == 0)
    for (m = 0; m < n; m += LANES) {
      vec s = *(const floats *)(p + m), e = power_of_e(s - top);
      e = choose((words)(s == -__builtin_inff()), all(0.0f), e);
      *(floats *)(p + m) = e;
      weight += e;
    }
  else /* no token is seen, or all scores are NaN */
    for (m = 0; m < n; m++) p[m] = p[m] == p[m] ? 0.0f : p[m];
  from = b * v.batch + h * v.head;
  for (int64_t first = 0; first < n; first += BLOCK) {
    vec sums[MAX_WIDTH / LANES + 1] = {{0}};
    for (m = first; m < least(n, first + BLOCK); m++) {
      int64_t at = from + m * v.token;
      for (int64_t c = 0; c < vectors; c++) sums[c] += p[m] * get(v.data, at + c * LANES, least(LANES, width - c * LANES), bf16);
    }
    for (int64_t c = 0; c < vectors; c++) total[c] += sums[c];
  }
  float sum = sum_of(weight), gain = sum > 0.0f || sum != sum ? 1.0f / sum : 1.0f;
  for (int64_t c = 0; c < vectors; c++)
    put(y.data, b * y.batch + h * y.head + c * LANES, least(LANES, width - c * LANES), bf16, gain * total[c]);
}

/* q and y (batch, heads, 1, width), k and v (batch, heads, tokens, width), mask (batch or 1, tokens) of bytes or NULL. A query
   that sees no token gets zeros. Returns 1 if there is no memory for the scores. */
int decode_attention(const Heads *q, const Heads *k, const Heads *v, const uint8_t *mask, const Heads *y, const Call *call) {
  int64_t all_heads = call->batch * call->heads, threads = most(1, least(call->threads, all_heads));
  int64_t each = padded(call->tokens) + LANES;
  float *scores = room(threads * each / LANES);
  if (!scores) return 1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < all_heads; i++) {
    float *p = scores + omp_get_thread_num() * each;
    if (call->bf16) head(*q, *k, *v, mask, *y, call, i / call->heads, i % call->heads, p, 1);
    else head(*q, *k, *v, mask, *y, call, i / call->heads, i % call->heads, p, 0);
  }
  free(scores);
  return 0;
}
