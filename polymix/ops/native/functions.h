/* Activations and gates with their derivatives, on vectors. They agree with polymix/ops/shared/activations.py up to rounding
   in float32. */

#pragma once
#include "vectors.h"

enum { IDENTITY, GELU, RELU, CLAMPED_LEAKY_RELU, SIGMOID, HARDSIGMOID, QUICK_GELU, QUICK_SIGMOID }; /* first as in native/arrays.py */
/* What replaces a function where products are in bfloat16: an approximation with an error of 1e-5, a hundredth of the rounding. */
INLINE int quickly(int kind, int pairs) { return !pairs ? kind : kind == GELU ? QUICK_GELU : kind == SIGMOID ? QUICK_SIGMOID : kind; }

INLINE vec choose(words where, vec a, vec b) { return (vec)(((words)a & where) | ((words)b & ~where)); }
/* a < b ? then : other. Of the comparison in `choose`, gcc makes a register of ones by an instruction that waits for what was in it:
   for the previous round of a loop. */
INLINE vec where_less(vec a, vec b, vec then, vec other) {
#ifdef __AVX512F__
  return (vec)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ), (__m512)other, (__m512)then);
#else
  return choose((words)(a < b), then, other);
#endif
}
INLINE vec bound(vec a, float low, float high) { /* NaN stays NaN */
  a = where_less(a, all(low), all(low), a);
  return where_less(all(high), a, all(high), a);
}

INLINE float sum_of(vec v) { /* the sum of its lanes */
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#endif
  UNROLL for (int half = LANES / 2; half > 0; half /= 2)
    UNROLL for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

INLINE vec inverse(vec q) { /* 1 / q. With AVX-512 it takes a third of a division's time and is off by one or two roundings. */
#ifdef __AVX512F__
  vec r = (vec)_mm512_rcp14_ps((__m512)q);
  return r * (2.0f - q * r);
#else
  return 1.0f / q;
#endif
}

/* Σ_i terms[n - 1 - i] x^i */
INLINE vec series(vec x, const float *terms, const int n) {
  vec sum = all(terms[0]);
  UNROLL for (int i = 1; i < n; i++) sum = sum * x + terms[i];
  return sum;
}

INLINE vec power_of_e(vec x) { /* e^x = 2^n e^r with |r| ≤ ln 2 / 2; the error is 3e-9 before rounding */
  typedef int32_t whole __attribute__((vector_size(4 * LANES)));
  vec inside = bound(x, -87.0f, 88.0f);
  vec n = (inside * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
  vec r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  static const float terms[] = {1.394110846934711e-3f, 8.375126398416404e-3f, 4.1666352896198126e-2f, 1.6666415514649002e-1f,
                                5.000000047117972e-1f, 1.0000000377162153f,   1.0f};
  return series(r, terms, 7) * (vec)((__builtin_convertvector(n, whole) + 127) << 23);
}

INLINE vec normal(vec z) { /* Φ(z) = 1/2 + z P(z²) / Q(z²), fitted on |z| ≤ 5.6; the error is 1e-8 before rounding */
  vec t = z * z;
  static const float above[] = {2.2145265738023317e-8f, 6.356493480617171e-6f,  1.7384902481620666e-4f,
                                4.707249008260276e-3f,  3.4375969785348535e-2f, 3.9894222157435977e-1f};
  static const float below[] = {1.1802076959636285e-6f, 7.510123026236638e-5f, 1.9129687998949991e-3f,
                                2.8940003991211386e-2f, 2.528334910946558e-1f, 1.0f};
  vec inside = 0.5f + z * (series(t, above, 6) * inverse(series(t, below, 6)));
  inside = where_less(all(5.6f), z, all(1.0f), inside);
  return where_less(z, all(-5.6f), all(0.0f), inside);
}

#ifdef __AVX512F__
/* Cubic polynomials on 16 intervals of [0, 5], highest power first: a Φ(-a), and the slope of GELU minus 1/2. */
static const float gelu_tail[4][16] = {
    {-4.25138291e-16f, 2.64779651e-3f, 4.17019369e-3f, 4.12765070e-3f, 2.92105055e-3f, 1.37594168e-3f, 1.76423946e-4f, -4.26477608e-4f,
     -5.45470580e-4f, -4.23723775e-4f, -2.54286269e-4f, -1.26219625e-4f, -5.33861533e-5f, -1.95507972e-5f, -6.25957562e-6f, -1.76338386e-6f},
    {-4.13338660e-2f, -3.72183816e-2f, -2.66510546e-2f, -1.38673340e-2f, -3.12036012e-3f, 3.30888528e-3f, 5.51229653e-3f, 5.00510011e-3f,
     3.46506621e-3f, 1.98306543e-3f, 9.69455373e-4f, 4.11673568e-4f, 1.53341908e-4f, 5.04159188e-5f, 1.46934962e-5f, 3.80765603e-6f},
    {1.61290323e-1f, 8.10778376e-2f, 1.62548796e-2f, -2.42349035e-2f, -4.04645044e-2f, -3.93071098e-2f, -2.97351705e-2f, -1.88415915e-2f,
     -1.02982243e-2f, -4.92706079e-3f, -2.08081311e-3f, -7.79762774e-4f, -2.60182872e-4f, -7.74869185e-5f, -2.06333334e-5f, -4.91889807e-6f},
    {-5.60284565e-6f, 1.20481577e-1f, 1.67360712e-1f, 1.61214337e-1f, 1.27060185e-1f, 8.61040795e-2f, 5.12252654e-2f, 2.70315105e-2f,
     1.27245473e-2f, 5.36105926e-3f, 2.02579677e-3f, 6.87480944e-4f, 2.09717196e-4f, 5.75417029e-5f, 1.42067055e-5f, 3.15717690e-6f},
};
static const float gelu_rise[4][16] = {
    {-8.87551217e-3f, -6.91925178e-3f, -2.28431881e-3f, 2.31566408e-3f, 4.70584124e-3f, 4.50480918e-3f, 2.80795440e-3f, 1.00213305e-3f,
     -1.28931008e-4f, -5.23845856e-4f, -4.82696369e-4f, -3.06719889e-4f, -1.54657248e-4f, -6.50316779e-5f, -2.33586826e-5f, -7.26636351e-6f},
    {9.06493304e-17f, -2.45321886e-2f, -3.86553691e-2f, -3.82939963e-2f, -2.71407776e-2f, -1.28262750e-2f, -1.68953256e-3f, 3.92794836e-3f,
     5.05468197e-3f, 3.93769843e-3f, 2.36857447e-3f, 1.17830207e-3f, 4.99510152e-4f, 1.83362363e-4f, 5.88539826e-5f, 1.66235543e-5f},
    {2.57380490e-1f, 2.31619607e-1f, 1.65522054e-1f, 8.56873908e-2f, 1.87572915e-2f, -2.10785847e-2f, -3.45272447e-2f, -3.11566937e-2f,
     -2.14670944e-2f, -1.22294122e-2f, -5.95025491e-3f, -2.51404518e-3f, -9.31405031e-4f, -3.04462304e-4f, -8.81862877e-5f, -2.27018020e-5f},
    {-3.11794814e-17f, 2.48652928e-1f, 4.49601902e-1f, 5.75122375e-1f, 6.25438403e-1f, 6.21853920e-1f, 5.92182081e-1f, 5.58411328e-1f,
     5.31925632e-1f, 5.15274071e-1f, 5.06450288e-1f, 5.02416986e-1f, 5.00806378e-1f, 5.00240113e-1f, 5.00063923e-1f, 5.00015235e-1f},
};
INLINE vec look_up(const float (*table)[16], vec z) { /* of |z| */
  __m512 place = _mm512_min_ps(_mm512_set1_ps(15.49f), _mm512_mul_ps(_mm512_abs_ps((__m512)z), _mm512_set1_ps(3.1f))); /* NaN stays NaN */
  __m512 near = _mm512_add_ps(place, _mm512_set1_ps(12582912.0f)); /* whose last bits are the nearest integer */
  __m512 rest = _mm512_sub_ps(place, _mm512_sub_ps(near, _mm512_set1_ps(12582912.0f)));
  __m512 sum = _mm512_permutexvar_ps((__m512i)near, _mm512_loadu_ps(table[0]));
  UNROLL for (int i = 1; i < 4; i++)
    sum = _mm512_fmadd_ps(sum, rest, _mm512_permutexvar_ps((__m512i)near, _mm512_loadu_ps(table[i])));
  return (vec)sum;
}
INLINE vec quick_gelu(vec z) { return (vec)_mm512_max_ps(_mm512_setzero_ps(), (__m512)z) - look_up(gelu_tail, z); }
INLINE vec quick_gelu_slope(vec z) {
  words sign = (words)z & 0x80000000;
  return 0.5f + (vec)((words)look_up(gelu_rise, z) ^ sign);
}
INLINE vec quick_sigmoid(vec z) {
  __m512 t = _mm512_mul_ps((__m512)z, _mm512_set1_ps(-1.44269504f));
  __m512 n = _mm512_roundscale_ps(t, 0);
  static const float terms[] = {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  __m512 power = _mm512_scalef_ps((__m512)series((vec)_mm512_sub_ps(t, n), terms, 5), n);
  return (vec)_mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), power));
}
#else
INLINE vec quick_gelu(vec z) { return z * normal(z); }
INLINE vec quick_gelu_slope(vec z) { return normal(z) + z * 0.3989422804f * power_of_e(-0.5f * z * z); }
INLINE vec quick_sigmoid(vec z) { return inverse(1.0f + power_of_e(-z)); }
#endif

INLINE vec act(vec z, const int kind) {
  switch (kind) {
    case GELU: return z * normal(z);
    case RELU: return where_less(z, all(0.0f), all(0.0f), z);
    case CLAMPED_LEAKY_RELU: return bound(where_less(z, all(0.0f), 0.01f * z, z), -0.1f, 6.0f);
    case SIGMOID: return inverse(1.0f + power_of_e(-z));
    case HARDSIGMOID: return bound(z + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
    case QUICK_GELU: return quick_gelu(z);
    case QUICK_SIGMOID: return quick_sigmoid(z);
    default: return z;
  }
}

/* act'(z), where y = act(z); at kinks the same choice as PyTorch */
INLINE vec slope(vec z, vec y, const int kind) {
  vec one = all(1.0f), none = all(0.0f);
  switch (kind) {
    case GELU: return normal(z) + z * 0.3989422804f * power_of_e(-0.5f * z * z);
    case RELU: return choose((words)(z > 0.0f), one, none);
    case CLAMPED_LEAKY_RELU: return choose((words)(z >= -10.0f) & (words)(z <= 6.0f), choose((words)(z > 0.0f), one, all(0.01f)), none);
    case QUICK_GELU: return quick_gelu_slope(z);
    case SIGMOID: case QUICK_SIGMOID: return y * (1.0f - y);
    case HARDSIGMOID: return choose((words)(z > -3.0f) & (words)(z < 3.0f), all(1.0f / 6.0f), none);
    default: return one;
  }
}

/* Expands BODY once for each activation or gate, so that the compiler knows which one it is. */
#define OF_KIND(kind, BODY)                                  \
  switch (kind) {                                            \
    case GELU: BODY(GELU); break;                            \
    case RELU: BODY(RELU); break;                            \
    case CLAMPED_LEAKY_RELU: BODY(CLAMPED_LEAKY_RELU); break; \
    case SIGMOID: BODY(SIGMOID); break;                      \
    case HARDSIGMOID: BODY(HARDSIGMOID); break;              \
    case QUICK_GELU: BODY(QUICK_GELU); break;                \
    case QUICK_SIGMOID: BODY(QUICK_SIGMOID); break;          \
    default: BODY(IDENTITY);                                 \
  }
