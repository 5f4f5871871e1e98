/* Activations and gates with their derivatives, on vectors. They agree with polymix/ops/shared/activations.py up to rounding
   in float32. */

#pragma once
#include "vectors.h"

enum { IDENTITY, GELU, RELU, CLAMPED_LEAKY_RELU, SIGMOID, HARDSIGMOID }; /* as in native/arrays.py */

INLINE vec choose(words where, vec a, vec b) { return (vec)(((words)a & where) | ((words)b & ~where)); }
INLINE vec bound(vec a, float low, float high) { /* NaN stays NaN */
  a = choose((words)(a < low), all(low), a);
  return choose((words)(a > high), all(high), a);
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
  inside = choose((words)(z > 5.6f), all(1.0f), inside);
  return choose((words)(z < -5.6f), all(0.0f), inside);
}

INLINE vec act(vec z, const int kind) {
  switch (kind) {
    case GELU: return z * normal(z);
    case RELU: return choose((words)(z < 0.0f), all(0.0f), z);
    case CLAMPED_LEAKY_RELU: return bound(choose((words)(z < 0.0f), 0.01f * z, z), -0.1f, 6.0f);
    case SIGMOID: return inverse(1.0f + power_of_e(-z));
    case HARDSIGMOID: return bound(z + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
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
    case SIGMOID: return y * (1.0f - y);
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
    default: BODY(IDENTITY);                                 \
  }
