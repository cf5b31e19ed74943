// What follows a convolution, in one pass over its result and in place: bias, residual, ReLU or LeakyReLU.
//
// Compiled by NVRTC for the card at hand (see nvrtc.py), for one precision (-DBITS=16 or 32, -DBFLOAT) and one SLOPE,
// with instructions that every card has for which NVRTC compiles; behind instructions.cu.

#define VALUES (128 / BITS)  // of a word of 16 bytes

__device__ __forceinline__ void unpack(uint4 word, float* v) {
  const u32 parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
#if BITS == 32
    v[i] = __uint_as_float(parts[i]);
#elif BFLOAT
    v[i] = __uint_as_float(i & 1 ? parts[i / 2] & 0xffff0000u : parts[i / 2] << 16);
#else
    const u16 bits = (u16)(i & 1 ? parts[i / 2] >> 16 : parts[i / 2]);
    asm("cvt.f32.f16 %0, %1;" : "=f"(v[i]) : "h"(bits));
#endif
  }
}

__device__ __forceinline__ u32 bits_of(float v) {  // rounded to the nearest, to even between two
#if BITS == 32
  return __float_as_uint(v);
#elif BFLOAT
  const u32 bits = __float_as_uint(v);
  return v == v ? (bits + 0x7fffu + (bits >> 16 & 1)) >> 16 : 0x7fffu;
#else
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
#endif
}

__device__ __forceinline__ uint4 pack(const float* v) {
  u32 parts[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if BITS == 32
    parts[i] = bits_of(v[i]);
#else
    parts[i] = bits_of(v[2 * i]) | bits_of(v[2 * i + 1]) << 16;
#endif
  }
  return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// All threads together go forward by whole pixels, so that each keeps its channels and reads their bias once.
extern "C" __global__ void __launch_bounds__(THREADS) pointwise(
    uint4* x, const uint4* bias, const uint4* residual, u32 words, u32 words_per_pixel) {
  const u32 first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  float offset[VALUES];
  let_next_start();
  wait_for_others();  // before the bias too, which is a few bytes
  unpack(bias[first % words_per_pixel], offset);
  for (u32 at = first; at < words; at += step) {  // words + step stays below 2^32, see pointwise.py
    float v[VALUES], more[VALUES];
    unpack(x[at], v);
    if (residual) unpack(residual[at], more);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      v[i] += offset[i];
      if (residual) v[i] += more[i];
      v[i] = SLOPE == 0 ? fmaxf(v[i], 0.f) : fmaxf(v[i], (float)SLOPE * v[i]);
    }
    x[at] = pack(v);
  }
}
