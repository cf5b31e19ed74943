// The first convolution of an encoder, from the image N 3 H W: pixel-unshuffle by PATCH (1, 2 or 4), 3x3 of 3·PATCH²
// to 64 channels, bias and activation, row by row. The result is N/stacked H/PATCH W/PATCH (stacked 64).
//
// On the image this is a convolution of 3·PATCH x 3·PATCH with stride PATCH: an output pixel reads runs of 3·PATCH
// neighboring values. So the image lies in shared memory as it is, and the left factor of the matrix instruction comes
// from there into registers in words: the order of the K values is free, the weights have the same one. Runs are filled
// up with zero weights where that makes them regular. A step of the instruction (K = 16) is for
//   PATCH 1: the three colors (and nothing for a fourth) x a run of 3 (and nothing for a fourth value);
//   PATCH 2: a color x the two rows of a patch x a run of 6 (and nothing for two values more);
//   PATCH 4: a color x the four rows of a patch x a third of a run of 12.
// The image is read once, and 64 channels of each pixel are written: bytes are the limit, except for PATCH 4.
//
// A warp takes a column of 16 pixels and goes down, a row of patches at a time. It loads its rows itself, AHEAD of
// their use, into a ring of its own, so no warp waits for another one's loads. The four columns of a warpgroup (M = 64)
// are the next four of all columns of all frames: widths that are a multiple of 16 patches waste nothing. Each
// warpgroup has an equal share of the rows of all strips of four columns. Weights stay in shared memory; their columns
// are ordered so that a thread's results are neighboring channels: it writes 16 bytes at once.
//
// Compiled behind instructions.cu, whose functions it uses; first_rows.py passes the constants. Image rows must be a
// multiple of 8 values wide, and the image must start at a multiple of 16 bytes. first_pool.cu uses the functions
// before the first #define.

__device__ __forceinline__ void wgmma_columns(float* d, const u32* a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
    : D8(0), D8(8), D8(16), D8(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
template <int OPEN> __device__ __forceinline__ void rows_wait() {  // for copies that only ordinary loads read
  asm volatile("cp.async.wait_group %0;" :: "n"(OPEN) : "memory");
}
__device__ __forceinline__ u32 read4(u32 at) {
  u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); return v;
}
__device__ __forceinline__ uint2 read8(u32 at) {
  uint2 v; asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory"); return v;
}

#ifdef FIRST_ROWS
#define RING (3 + AHEAD)                 // rows of patches; a power of two
#define CHUNKS (2 * PATCH + 2)           // of 8 values: a column, and 8 values more on both sides
#define LINES (3 * PATCH)                // [color][row of the patch]
#define LOADS ((LINES * CHUNKS + 31) / 32)  // of a lane for a row of patches
#define SLOT_BYTES (LINES * LINE_BYTES)
#define STEPS (PATCH == 1 ? 1 : PATCH == 2 ? 3 : 9)  // of the instruction for a row of patches
#define STEP_BYTES 2048                  // of weights: [8 k values][64 outputs][16 bytes], twice
#define RING_AT (3 * STEPS * STEP_BYTES)
#define HELD (PATCH == 4 ? 2 : 3)        // rows of patches whose values are in registers at the same time

struct First {
  int frames, height, width;  // in patches
  int columns;                // of 16 patches, in a frame
  int stacked;                // output frames that share a pixel's channels (1: none)
  int rows;                   // of all strips together
  int share;                  // rows of each warpgroup
  float slope;                // of the activation below zero: 0 is ReLU
};

// What a lane loads of every row of patches of a column: pieces of 16 bytes, by where they are in row 0 of the frame.
struct Pieces {
  const char* frame;
  int at[LOADS];  // in bytes; -1: outside, so zeros
};
__device__ __forceinline__ Pieces pieces_of(const char* x, const First& s, int frame, int left, int lane) {
  const int width = s.width * PATCH, height = s.height * PATCH;
  // A column behind the last frame computes something that nobody writes.
  Pieces pieces = {x + (frame < s.frames ? (i64)frame * 3 * height * width * 2 : 0)};
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int piece = i * 32 + lane, line = piece / CHUNKS, column = left * PATCH - 8 + piece % CHUNKS * 8;
    pieces.at[i] = (u32)column < (u32)width ? ((line / PATCH * height + line % PATCH) * width + column) * 2 : -1;
  }
  return pieces;
}
// Row `y` of patches into its place of the ring; rows outside the image are zeros.
__device__ __forceinline__ void load_row(u32 ring, const Pieces& pieces, const First& s, int y, int lane) {
  const u32 row = y * s.width * PATCH * PATCH * 2, slot = ring + (y + 1 & RING - 1) * SLOT_BYTES;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int piece = i * 32 + lane;
    const bool inside = pieces.at[i] >= 0 && (u32)y < (u32)s.height;
    if (piece < LINES * CHUNKS)
      copy16(slot + piece / CHUNKS * LINE_BYTES + piece % CHUNKS * 16,
             pieces.frame + (inside ? pieces.at[i] + row : 0), inside);
  }
}

// The left factor of step `step` for two pixels of the thread, `lane / 4` and + 8. `at` is where the run of the first
// one begins in the row of patches, for PATCH 4 in the line of the thread's own row, for PATCH 1 in that of its color.
__device__ __forceinline__ void read_step(u32* a, u32 at, int step, u32 shift) {
#pragma unroll
  for (int pixel = 0; pixel < 2; pixel++, at += 16 * PATCH) {
#if PATCH == 1
    const u32 first = read4(at), second = read4(at + 4);
    a[pixel] = shift ? first >> 16 | second << 16 : first;
    a[pixel + 2] = shift ? second >> 16 : second & 0xffff;
#elif PATCH == 2
    a[pixel] = read4(at + step * 2 * LINE_BYTES);
    a[pixel + 2] = read4(at + (step * 2 + 1) * LINE_BYTES);
#else
    const uint2 four = read8(at + step / 3 * 4 * LINE_BYTES + step % 3 * 8);
    a[pixel] = four.x;
    a[pixel + 2] = four.y;
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) first_rows(
    const char* x, const char* weights, const float* bias, char* out, First s) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, quarter = lane & 3;
  let_next_start();
  for (int i = thread; i < RING_AT / 16; i += THREADS) copy16(base + i * 16, weights + i * 16, true);
  copies_commit();
  copies_wait<0>();
  __syncthreads();

  const u32 ring = base + RING_AT + warp * (RING * SLOT_BYTES);
  // A line begins 8 values before its column, a run PATCH values before its pixel.
  u32 mine = ring + 16 - 2 * PATCH + (lane >> 2) * 2 * PATCH;
  const u32 shift = PATCH == 1 && mine & 2;  // a run of 3 that begins within a word
  if (PATCH == 1) mine = (mine & ~3u) + min(quarter, 2) * LINE_BYTES;
  if (PATCH == 2) mine += quarter * 4;
  if (PATCH == 4) mine += quarter * LINE_BYTES;
  float offset[16];
#pragma unroll
  for (int i = 0; i < 16; i++) offset[i] = bias[(i >> 3) * 32 + quarter * 8 + (i & 7)];
  wait_for_others();

  const int begin = (blockIdx.x * (THREADS / 128) + (warp >> 2)) * s.share, stop = min(s.rows, begin + s.share);
  for (int row = begin; row < stop;) {
    const int strip = row / s.height, top = row % s.height, end = min(s.height, top + stop - row);
    row += end - top;
    const int column = strip * 4 + (warp & 3), frame = column / s.columns, left = column % s.columns * 16;
    char* to = out + (((i64)(frame / s.stacked) * s.height + top) * s.width + left + (lane >> 2)) * s.stacked * 128 +
               frame % s.stacked * 128 + quarter * 16;
    const Pieces pieces = pieces_of(x, s, frame, left, lane);
    __syncwarp();  // every lane has read the rows of the strip before
    for (int y = top - 1; y <= top + AHEAD; y++) {
      if (y <= end) load_row(ring, pieces, s, y, lane);
      copies_commit();
    }
    for (int y = top; y < end; y++) {
      __syncwarp();  // every lane has read the row that the next one takes the place of
      if (y + 1 + AHEAD <= end) load_row(ring, pieces, s, y + 1 + AHEAD, lane);
      copies_commit();
      rows_wait<AHEAD>();
      __syncwarp();
      float acc[32];
      u32 a[HELD][STEPS][4];
#pragma unroll
      for (int dy = 0; dy < 3; dy++) {
        if (dy >= HELD) wgmma_wait<1>();
#pragma unroll
        for (int step = 0; step < STEPS; step++)
          read_step(a[dy % HELD][step], mine + (y + dy & RING - 1) * SLOT_BYTES, step, shift);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++)
          wgmma_columns(acc, a[dy % HELD][step], descriptor(base + (dy * STEPS + step) * STEP_BYTES, 1024, 128),
                        dy + step > 0);
        wgmma_commit();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int pixel = 0; pixel < 2; pixel++) {
        if (frame < s.frames && left + (lane >> 2) + pixel * 8 < s.width) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 v[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
              const int i = (half * 4 + n) * 4 + pixel * 2;
              const float lo = acc[i] + offset[half * 8 + n * 2], hi = acc[i + 1] + offset[half * 8 + n * 2 + 1];
              v[n] = pack(fmaxf(lo, s.slope * lo), fmaxf(hi, s.slope * hi));
            }
            *(uint4*)(to + pixel * 8 * s.stacked * 128 + half * 64) = make_uint4(v[0], v[1], v[2], v[3]);
          }
        }
      }
      to += (i64)s.width * s.stacked * 128;
    }
  }
}
#endif
