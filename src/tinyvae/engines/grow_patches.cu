// The last growing layer and the image convolution behind it in one kernel, for images in patches: 64 channels on the
// small grid -> 3 PATCH x PATCH channels on the doubled grid, pixel-shuffled. What lies between them, 64 channels at
// full size, stays in shared memory.
//
// grow_cells.cu says what cells, phases, quads and strips are. In grow_image.cu one warpgroup does both products; with
// patches the second one's weights would fill the shared memory there. Here each product has its own warpgroup, and a
// block takes one strip at a time. The growing warpgroup multiplies 64 cells in two halves: the pixel rows 2y-1 and 2y
// of a row of cells. While the second half is on its way it rounds the first one and writes it to shared memory, as
// [8-channel chunk][columns 2x-1, columns 2x][cell][16 bytes]. The image warpgroup takes these pixel rows one by one, as
// conv_rows.cu does: a pixel row adds to the output rows above it, beside it and below it. So a product has three times
// the image's channels as columns, K is three horizontal taps of 64 channels, and then the output row above is complete.
// Its 64 rows are every second output column, the even ones or the odd ones: a tap is then a start address. With 12
// channels the even and the odd ones are TOGETHER in one product, so that less is read from shared memory: of its four
// taps each output column reads three, and the other weights are zeros.
//
// A thread has three lines (a color and a row of the patch) of PATCH neighboring image pixels each.
//
// A block makes one of the frames that an input frame grows into; all weights stay in shared memory.
// Compiled behind instructions.cu and grow_cells.cu, whose functions it uses; grow_image.py passes the constants.

#define COLUMNS (12 * PATCH)                 // of one output row: 12 lines of a patch
#define OWN (COLUMNS / 2)                    // the thread's of them, of two cells
#define IMAGE_CHUNK (3 * COLUMNS * 16)       // weights: [horizontal tap][8-channel chunk][3 output rows][16 bytes]
#define PIXELS_PLANE (2 * (CELLS + 1) * 16)  // 8 channels of a pixel row: even and odd columns, without bank conflicts
#define PIXELS_BYTES (8 * PIXELS_PLANE)
#define PIXELS_AT (RING_AT + RING * ROW_BYTES)
#define BARRIERS_AT (PIXELS_AT + PIXEL_ROWS * PIXELS_BYTES)
#define BIAS_AT (BARRIERS_AT + BARRIER_BYTES)
// The barriers of the pixel rows lie behind those of the ring.
#define PIXELS_FULL(number) (bars + 128 + 8 * ((number) % PIXEL_ROWS))
#define PIXELS_EMPTY(number) (PIXELS_FULL(number) + 8 * PIXEL_ROWS)

#if PATCH == 2
#define IMAGE_NAMES \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
#define IMAGE_DATA D8(0), D8(8), D8(16), D8(24), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define IMAGE_SHAPE "m64n72k16"
#define IMAGE_FACTORS "%36, %37"
#define IMAGE_ADD "%38"
#elif PATCH == 4
#define IMAGE_NAMES NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define IMAGE_DATA DATA_64, D8(64)
#define IMAGE_SHAPE "m64n144k16"
#define IMAGE_FACTORS "%72, %73"
#define IMAGE_ADD "%74"
#endif
__device__ __forceinline__ void wgmma_image(float* d, u64 a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " IMAGE_ADD ", 0; "
    "wgmma.mma_async.sync.aligned." IMAGE_SHAPE ".f32." ELEMENT "." ELEMENT " "
    "{" IMAGE_NAMES "}, " IMAGE_FACTORS ", p, 1, 1, 0, 0; }"
    : IMAGE_DATA : "l"(a), "l"(b), "r"(add));
}
// With the 56 of the loading warpgroup all that a block has.
template <int COUNT> __device__ __forceinline__ void registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
// Ties the sums of a product to this place, so that nothing reads them before the wait above it.
__device__ __forceinline__ void tie_half(float* d) { asm volatile("" : DATA :: "memory"); }
// What was written to shared memory may be read by matrix instructions behind the next barrier.
__device__ __forceinline__ void writes_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store(u16* to, const u32 (&v)[1]) { *(u32*)to = v[0]; }
__device__ __forceinline__ void store(u16* to, const u32 (&v)[2]) { *(uint2*)to = make_uint2(v[0], v[1]); }

// One of the two pixel rows that the sums of 64 cells hold, [column 2x, 2x-1][64 channels], to shared memory.
__device__ __forceinline__ void write_pixels(
    char* pixels, const float* sums, bool row_exists, const int (&columns)[2], int width) {
  const int lane = threadIdx.x & 31, quarter = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int cell = quarter * 16 + (lane >> 2) + side * 8;
      const bool exists = row_exists && (j ? columns[side] > 0 : columns[side] < width);
#pragma unroll
      for (int half = 0; half < 2; half++) {  // a thread has 8 neighboring channels of each half
        u32 v[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float* two = sums + ((j * 2 + half) * 4 + n) * 4 + side * 2;
          v[n] = exists ? pack_activated(two[0], two[1]) : 0;
        }
        *(uint4*)(pixels + (half * 4 + (lane & 3)) * PIXELS_PLANE + ((1 - j) * (CELLS + 1) + cell) * 16) =
            make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
}

// x: frames, height, width, 64. weights: of each frame made of one. bias: of the image's channels. out:
// frames · grown, 3, 2 height · PATCH, 2 width · PATCH. All strips together have `rows` rows of quads; each block takes
// `share` of them.
extern "C" __global__ void __launch_bounds__(THREADS, 1) grow_patches(
    const char* x, const char* weights, const float* bias, u16* out, int frames, int height, int width, int grown,
    int rows, int share) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared), bars = base + BARRIERS_AT;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int made = blockIdx.x % grown;  // which of the frames
  const int first = blockIdx.x / grown * share, stop = min(rows, first + share);
  let_next_start();
  if (thread == 0) {
    for (int i = 0; i < PIXEL_ROWS; i++) { barrier_init(PIXELS_FULL(i), 128); barrier_init(PIXELS_EMPTY(i), 4); }
    rings_init(bars);
  }
  if (thread < 3 * PATCH * PATCH) ((float*)(shared + BIAS_AT))[thread] = bias[thread];
  __syncthreads();

  if (thread < 128) {
    fewer_registers();
    if (thread == 0) load_all_weights(base, bars, weights, made);
    wait_for_others();
    if (thread < 64) load_rows(x, base + RING_AT, bars, 0, first, stop, frames, height, width);
    return;
  }

  int number = 0;      // of the pixel row
  if (thread < 256) {  // the growing warpgroup
    registers<208>();
    barrier_wait(WEIGHTS_FULL, 0);
    int turn = 0;
    for (int row = first; row < stop;) {
      const Part part = part_at(row, stop, height);
      row += part.count;
      const int at = part.start + (warp & 3) * 16 + (lane >> 2);  // of the thread's cells: this one and + 8
      const int columns[2] = {place_at(at, width).column, place_at(at + 8, width).column};
      barrier_wait(FULL(0, turn), (turn / RING) & 1);
      for (int y = part.top; y <= part.top + part.count; y++, turn++) {
        barrier_wait(FULL(0, turn + 1), ((turn + 1) / RING) & 1);
        float sums[2][64];  // of the pixel rows 2y-1 and 2y: [column 2x, 2x-1][64 channels] of two cells
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int tap = 0; tap < 4; tap++) {
            const u32 pixels = base + RING_AT + (turn + (tap >> 1)) % RING * ROW_BYTES + (tap & 1) * 16;
#pragma unroll
            for (int k = 0; k < 4; k++)
              wgmma_tile(sums[half], descriptor(pixels + k * 2 * PLANE, PLANE, 128),
                         descriptor(base + tap * GROW_TAP + (1 - half) * 2048 + k * 8192, 4096, 128), tap + k > 0);
          }
          wgmma_commit();
        }
#pragma unroll
        for (int half = 0; half < 2; half++, number++) {
          if (half == 0) wgmma_wait<1>(); else wgmma_wait<0>();
          tie_half(sums[half]);
          if (half == 1 && lane == 0) {
            barrier_arrive(EMPTY(0, turn));
            if (y == part.top + part.count) barrier_arrive(EMPTY(0, turn + 1));
          }
          barrier_wait(PIXELS_EMPTY(number), ((number / PIXEL_ROWS) & 1) ^ 1);
          write_pixels(shared + PIXELS_AT + number % PIXEL_ROWS * PIXELS_BYTES, sums[half],
                       half ? y < height : y > 0, columns, width);
          writes_ready();
          barrier_arrive(PIXELS_FULL(number));
        }
      }
      turn++;
    }
    return;
  }

  // The image warpgroup. A thread has the lines `lane % 4`, + 4 and + 8 of the cells `lane / 4` and + 8; with even and
  // odd columns together they alternate: a line of the even one, the same line of the odd one.
  registers<240>();
  wait_for_others();  // the growing warpgroup touches nothing but shared memory
  barrier_wait(WEIGHTS_FULL, 0);
  const float* offset = (const float*)(shared + BIAS_AT) + (lane & 3) / TOGETHER * PATCH;
  float kept[2 / TOGETHER][2][OWN] = {};  // of the pixel rows before: [even, odd column][output row above, beside]
  const i64 line_pixels = (i64)2 * width * PATCH;
  for (int row = first; row < stop;) {
    const Part part = part_at(row, stop, height);
    row += part.count;
    u16* to[2];
    bool exists[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int cell = (warp & 3) * 16 + (lane >> 2) + side * 8;
      const Place place = place_at(part.start + cell, width);
      exists[side] = cell < CELLS - 1 && place.column < width && place.frame < frames;
      to[side] = out + (((i64)place.frame * grown + made) * 6 * height + 2 * part.top) * PATCH * line_pixels +
                 (place.column * 2 + (lane & 3) % TOGETHER) * PATCH;
    }
    for (int p = 0; p < 2 * part.count + 2; p++, number++) {  // pixel row 2 top - 1 + p
      barrier_wait(PIXELS_FULL(number), (number / PIXEL_ROWS) & 1);
#pragma unroll
      for (int odd = 0; odd < 2; odd += TOGETHER) {
        float acc[3 * OWN];  // [output row above, beside, below]
        wgmma_fence();
#pragma unroll
        for (int tap = 0; tap < TOGETHER + 2; tap++) {
          const int column = odd + tap;  // from 2x-1 on: its place in the pixel row
          const u32 pixels = base + PIXELS_AT + number % PIXEL_ROWS * PIXELS_BYTES +
                             ((column & 1) * (CELLS + 1) + (column >> 1)) * 16;
#pragma unroll
          for (int k = 0; k < 4; k++)
            wgmma_image(acc, descriptor(pixels + k * 2 * PIXELS_PLANE, PIXELS_PLANE, 128),
                        descriptor(base + IMAGE_AT + (tap * 8 + k * 2) * IMAGE_CHUNK, IMAGE_CHUNK, 128), tap + k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (odd + TOGETHER == 2 && lane == 0) barrier_arrive(PIXELS_EMPTY(number));
        float* above = kept[odd / TOGETHER][0];
        float* beside = kept[odd / TOGETHER][1];
#pragma unroll
        for (int i = 0; i < 3; i++) {
          const int line = (i * 4 + (lane & 3)) / TOGETHER, color = line / PATCH;
          const i64 at = (color * 2 * height * PATCH + line % PATCH) * line_pixels + odd * PATCH;
          u32 words[2][PATCH / 2];  // of the output row above
#pragma unroll
          for (int j = 0; j < PATCH; j += 2) {
            const float2 start = *(const float2*)(offset + i * 4 / TOGETHER * PATCH + j);
#pragma unroll
            for (int side = 0; side < 2; side++) {
              const int n = (i * PATCH + j) * 2 + side * 2;
              words[side][j / 2] = pack(above[n] + acc[n], above[n + 1] + acc[n + 1]);
              above[n] = beside[n] + acc[OWN + n];
              above[n + 1] = beside[n + 1] + acc[OWN + n + 1];
              beside[n] = start.x + acc[2 * OWN + n];
              beside[n + 1] = start.y + acc[2 * OWN + n + 1];
            }
          }
#pragma unroll
          for (int side = 0; side < 2; side++)  // at first the row above belongs to another part
            if (p >= 2 && exists[side]) store(to[side] + at, words[side]);
        }
      }
      if (p < 2) continue;
      for (int side = 0; side < 2; side++) to[side] += PATCH * line_pixels;
    }
  }
}
