// The two convolution kernels of whole tiles that FusedTAEHV runs on Hopper GPUs (compute capability 9.0).
//
// Why own kernels: with 64 channels a 3x3 convolution reads each pixel nine times through the L2 cache, and a tile of
// 256 pixels x 64 channels does 51 operations per byte it loads, so the L2 (about 5.5 TB/s) holds a library's implicit
// product near 280 TFLOP/s. These kernels load each pixel with its halo into shared memory once, for all nine taps, and
// finish bias, residual and activation in registers, so a frame is read once and written once.
//
// conv_tiles, the workhorse: output channels are the rows of the matrix instruction (M = 64), pixels its columns
// (N = 8 wide x TILE_H tall). The halo tile lies in shared memory as [8-channel chunk][pixel][16 bytes] without
// swizzle: a tap is then a shifted start address in the instruction's descriptor. One weight-loading warp, three
// halo-loading warps, two computing warpgroups which share either the weights (two pixel tiles) or the pixels (two
// blocks of 64 channels). It serves 3x3 convolutions over one or two frames or over groups of 64 channels, and the 2x2
// phase convolutions.
// image_conv: the last convolution, 64 channels to the image, pixel-shuffle included.
//
// Compiled behind instructions.cu, one kernel at a time: hopper_kernels.py names it (-DCONV_TILES or -DIMAGE_CONV)
// and passes every constant that it also uses itself. Frames are NTHWC.

#ifdef CONV_TILES
#define TILE_H (PRODUCT_N / 8)
#define HALO_H (TILE_H + 2)
#define PLANE ((HALO_W * HALO_H + 1) * 16)  // one more pixel: the eight chunks of a pixel fall on different banks
#define HALO_BYTES (PLANE * 8)

struct Shape {
  int frames_per_video, frames, height, width;  // of the input
  int channels_in, channels_out;                // channels_out: of one output frame
  int sources;                                  // 1: x_t; 2: x_t and x_{t-1}
  int blocks;                                   // blocks of 64 output channels (all phases and frames)
  int taps;                                     // 9: 3x3; 4: 2x2 phases
  int grown;                                    // output frames per input frame
  int stacked;                                  // output frames that share a pixel's channels (1: none)
  int split_pixels;                             // 1: the warpgroups share weights, 0: they share pixels
  int weight_stages, tiles_x, tiles_y, tiles;   // tiles: over all frames
  int relu;
  int grouped;                                  // 1: a block of outputs sees the 64 inputs at its own place only
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_tiles(
    const char* x, const char* past, const char* weights, const float* bias, const char* residual, char* out,
    char* last, Shape s) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared);
  const int halos = s.split_pixels ? 2 : 1, weight_sets = s.split_pixels ? 1 : 2;
  const u32 halo_at = base + STAGING_BYTES + BARRIER_BYTES, weight_at = halo_at + 2 * halos * HALO_BYTES;
  const u32 bars = base + STAGING_BYTES;  // full_w[8], empty_w[8], full_h[2][2], empty_h[2][2]
#define FULL_W(i) (bars + 8 * (i))
#define EMPTY_W(i) (bars + 64 + 8 * (i))
#define FULL_H(h, i) (bars + 128 + 8 * ((h) * 2 + (i)))
#define EMPTY_H(h, i) (bars + 160 + 8 * ((h) * 2 + (i)))
  const int thread = threadIdx.x, group = thread >> 7, warp = thread >> 5, lane = thread & 31;
  let_next_start();
  if (thread == 0) {
    for (int i = 0; i < 8; i++) { barrier_init(FULL_W(i), 1); barrier_init(EMPTY_W(i), 8); }
    for (int i = 0; i < 4; i++) { barrier_init(FULL_H(0, i), 96); barrier_init(EMPTY_H(0, i), s.split_pixels ? 4 : 8); }
    barriers_ready();
  }
  __syncthreads();
  const int slices_per_frame = s.grouped ? 1 : s.channels_in >> 6, slices = slices_per_frame * s.sources;
  const int items_per_tile = s.split_pixels ? s.blocks : s.blocks >> 1;  // jobs over the same pixels
  const int pixel_groups = s.split_pixels ? (s.tiles + 1) >> 1 : s.tiles;
  const int jobs = pixel_groups * items_per_tile;
  const i64 frame_bytes = (i64)s.height * s.width * s.channels_in * 2;
  const int tiles_per_frame = s.tiles_x * s.tiles_y;

  if (group == 0) {
    fewer_registers();
    if (warp == 0) {  // weights
      if (lane == 0) {
        int stage = 0; u32 phase = 1;
        for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
          const int block = (job % items_per_tile) * weight_sets;
          for (int step = 0; step < slices * s.taps; step++) {
            barrier_wait(EMPTY_W(stage), phase);
            barrier_expect(FULL_W(stage), WEIGHT_TILE * weight_sets);
            for (int set = 0; set < weight_sets; set++)
              load_weights(weight_at + (stage * weight_sets + set) * WEIGHT_TILE,
                           weights + ((i64)(block + set) * slices * s.taps + step) * WEIGHT_TILE, FULL_W(stage));
            if (++stage == s.weight_stages) { stage = 0; phase ^= 1; }
          }
        }
      }
    } else {  // halo tiles
      wait_for_others();
      // Eight threads read a pixel's 128 bytes; ten such groups go down the ten columns of the halo, row by row.
      const int place = (thread - 32) >> 3, chunk = thread & 7;
      const i64 row_bytes = (i64)s.width * s.channels_in * 2;
      int turn = 0;
      for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int pixel_group = job / items_per_tile, group_of_64 = s.grouped ? job % items_per_tile : 0;
        for (int slice = 0; slice < slices; slice++, turn++) {
          const int buffer = turn & 1;
          for (int h = 0; h < halos; h++) {
            const int tile = pixel_group * halos + h;
            const int frame = tile / tiles_per_frame, in_frame = tile % tiles_per_frame;
            const int y0 = in_frame / s.tiles_x * TILE_H - 1, xx = in_frame % s.tiles_x * 8 - 1 + place;
            bool exists = tile < s.tiles && xx >= 0 && xx < s.width;
            const char* from = x + (exists ? frame : 0) * frame_bytes;
            if (slice >= slices_per_frame && exists) {
              if (frame % s.frames_per_video) from -= frame_bytes;
              else if (past) from = past + frame / s.frames_per_video * frame_bytes;
              else exists = false;
            }
            from += y0 * row_bytes + (i64)xx * s.channels_in * 2 + chunk * 16 +
                    (group_of_64 + slice % slices_per_frame) * 128;
            const u32 to = halo_at + (h * 2 + buffer) * HALO_BYTES + chunk * PLANE + place * 16;
            barrier_wait(EMPTY_H(h, buffer), ((turn >> 1) & 1) ^ 1);
            if (place < HALO_W) {
#pragma unroll 8
              for (int row = 0; row < HALO_H; row++) {
                const bool inside = exists && (u32)(y0 + row) < (u32)s.height;
                copy16(to + row * HALO_W * 16, inside ? from : x, inside);
                from += row_bytes;
              }
            }
            copies_commit();
          }
          if (halos == 2) {
            copies_wait<1>();
            barrier_arrive(FULL_H(0, buffer));
          }
          copies_wait<0>();
          barrier_arrive(FULL_H(halos - 1, buffer));
        }
      }
    }
    return;
  }

  more_registers();
  const int member = group - 1, quarter = warp & 3;
  const int h = s.split_pixels ? member : 0;
  char* staging = shared + (warp - 4) * 1024;
  const u32 staging_address = smem_address(staging);
  const int lead = min(s.weight_stages, slices * s.taps) - 1;
  int stage = 0, turn = 0; u32 phase = 0;
  wait_for_others();
  if (last)  // while the first tiles are on their way
    keep_last(last, residual ? residual : x, s.frames / s.frames_per_video, s.frames_per_video, frame_bytes,
              blockIdx.x * 256 + thread - 128, gridDim.x * 256);
  float acc[TILE_H * 4];
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int block = (job % items_per_tile) * weight_sets + (s.split_pixels ? 0 : member);
    const int tile = job / items_per_tile * halos + h;
    const int blocks_out = s.channels_out >> 6;
    const int place = block / blocks_out;  // phases: ((row * 2 + column) * grown + frame)
    const int phase_y = s.taps == 4 ? place / s.grown >> 1 : 0, phase_x = s.taps == 4 ? place / s.grown & 1 : 0;
    // Where this job's results go, and the residual, which is fetched while the last slice is computed.
    const bool exists = tile < s.tiles;
    const int frame = tile / tiles_per_frame, in_frame = tile % tiles_per_frame;
    const int y0 = in_frame / s.tiles_x * TILE_H + (lane >> 4), xx = in_frame % s.tiles_x * 8 + ((lane >> 1) & 7);
    const int channel = (block % blocks_out) * 64 + quarter * 16, in_pixel = (channel + (lane & 1) * 8) * 2;
    const bool column_exists = exists && xx < s.width;
    const float bias_low = bias ? bias[channel + (lane >> 2)] : 0.f;
    const float bias_high = bias ? bias[channel + (lane >> 2) + 8] : 0.f;
    uint4 kept[TILE_H / 2];
    u32 add = 0; int previous = -1, previous_turn = -1, count = 0;
    if (member == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
    for (int slice = 0; slice < slices; slice++, turn++) {
      barrier_wait(FULL_H(h, turn & 1), (turn >> 1) & 1);
      const u32 halo = halo_at + (h * 2 + (turn & 1)) * HALO_BYTES;
      if (residual && slice == slices - 1) {
        const char* from = residual + (((i64)frame * s.height + y0) * s.width + xx) * s.channels_out * 2 + in_pixel;
        const i64 two_rows = (i64)s.width * s.channels_out * 4;
#pragma unroll
        for (int i = 0; i < TILE_H / 2; i++, from += two_rows)  // in this order, so that no address is kept
          asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                       : "=r"(kept[i].x), "=r"(kept[i].y), "=r"(kept[i].z), "=r"(kept[i].w)
                       : "l"(from), "r"((u32)(column_exists && y0 + i * 2 < s.height)));
      }
      for (int tap = 0; tap < s.taps; tap++) {
        const int dy = s.taps == 9 ? tap / 3 : phase_y + (tap >> 1), dx = s.taps == 9 ? tap % 3 : phase_x + (tap & 1);
        barrier_wait(FULL_W(stage), phase);
        const u32 a = weight_at + (stage * weight_sets + (s.split_pixels ? 0 : member)) * WEIGHT_TILE;
        const u32 b = halo + (dy * HALO_W + dx) * 16;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
          wgmma_tile(acc, descriptor(a + k * 2048, 1024, 128), descriptor(b + k * 2 * PLANE, PLANE, HALO_W * 16), add);
          add = 1;
        }
        wgmma_commit();
        // The first warpgroup runs ahead by a few steps, so that one computes while the other writes its results.
        if (member == 0 && ++count == lead) asm volatile("bar.arrive 1, 256;" ::: "memory");
        wgmma_wait<1>();
        // The step before this one has been computed: its weights, and perhaps its halo, may be written over.
        if (lane == 0 && previous >= 0) barrier_arrive(EMPTY_W(previous));
        if (lane == 0 && previous_turn >= 0) barrier_arrive(EMPTY_H(h, previous_turn & 1));
        previous = stage; previous_turn = tap == s.taps - 1 ? turn : -1;
        if (++stage == s.weight_stages) { stage = 0; phase ^= 1; }
      }
    }
    wgmma_wait<0>();
    if (lane == 0) { barrier_arrive(EMPTY_W(previous)); barrier_arrive(EMPTY_H(h, previous_turn & 1)); }

    // The way out: a warp holds 16 channels of all pixels; transposed through shared memory, 32 bytes of a pixel each.
    const int step = s.taps == 4 ? 2 : 1, out_frame = frame * s.grown + place % s.grown;
    const i64 pixel_bytes = (i64)s.channels_out * s.stacked * 2, row_bytes = pixel_bytes * s.width * step;
    char* to = out + (out_frame / s.stacked * (i64)(s.height * step) + y0 * step + phase_y) * row_bytes +
               pixel_bytes * (xx * step + phase_x) + out_frame % s.stacked * s.channels_out * 2 + in_pixel;
    const i64 two_out_rows = row_bytes * 2 * step;
    const bool relu_now = s.relu && !residual;
#pragma unroll
    for (int i = 0; i < TILE_H / 2; i++) {
        u32 packed[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float* d = acc + (i * 2 + half) * 4;
          float v0 = d[0] + bias_low, v1 = d[1] + bias_low, v2 = d[2] + bias_high, v3 = d[3] + bias_high;
          if (relu_now) { v0 = activate(v0); v1 = activate(v1); v2 = activate(v2); v3 = activate(v3); }
          packed[half * 2] = pack(v0, v1); packed[half * 2 + 1] = pack(v2, v3);
        }
        const int buffer = (i & 1) * 512;  // two in turn: the next write waits for the sync in between
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(staging_address + buffer + ((lane >> 4) * 8 + (lane & 7)) * 32 + ((lane >> 3) & 1) * 16),
                        "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3]) : "memory");
        __syncwarp();
        uint4 v = *(const uint4*)(staging + buffer + lane * 16);
        if (residual) {
          u32* p = (u32*)&v; u32* q = (u32*)&kept[i];
#pragma unroll
          for (int w = 0; w < 4; w++) {
            float lo = low(p[w]) + low(q[w]), hi = high(p[w]) + high(q[w]);
            if (s.relu) { lo = activate(lo); hi = activate(hi); }
            p[w] = pack(lo, hi);
          }
        }
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%4], {%0, %1, %2, %3}; }"
                     :: "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(to),
                        "r"((u32)(column_exists && y0 + i * 2 < s.height)) : "memory");
        to += two_out_rows;
    }
  }
}
#endif

#ifdef IMAGE_CONV
// 64 channels NHWC -> OUT channels of the image, pixel-shuffled by PATCH into N 3 (H·PATCH) (W·PATCH).
#define TILES_N ((OUT + 7) / 8)
#define NEIGHBORS (PATCH > 1 ? 2 : 1)  // a thread's two neighboring channels are neighboring pixels of a patch
extern "C" __global__ void __launch_bounds__(THREADS) image_conv(
    const char* x, const uint2* weights, const float* bias, u16* out, int height, int width, int tiles_x, int tiles_y) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared);
  uint2* kept = (uint2*)(shared + SIDE * SIDE * 128);  // weight fragments: [tap·4 + k][n tile][lane]
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int tiles = tiles_x * tiles_y, frame = blockIdx.x / tiles, in_frame = blockIdx.x % tiles;
  const int y0 = in_frame / tiles_x * 16, x0 = in_frame % tiles_x * 16;
  const char* from = x + (i64)frame * height * width * 128;
  const int chunk = thread & 7;
  let_next_start();
  wait_for_others();
  // Sixteen groups of eight threads go down sixteen columns, then over the last two columns.
  for (int row = 0; row < SIDE; row++) {
    const int y = y0 - 1 + row, xx = x0 - 1 + (thread >> 3), pixel = row * SIDE + (thread >> 3);
    const bool inside = (u32)y < (u32)height && (u32)xx < (u32)width;
    copy16(base + pixel * 128 + ((chunk ^ (pixel & 7)) << 4),
           from + (inside ? (i64)(y * width + xx) * 128 + chunk * 16 : 0), inside);
  }
  for (int i = thread >> 3; i < 2 * SIDE; i += 16) {
    const int y = y0 - 1 + (i >> 1), xx = x0 + 15 + (i & 1), pixel = (i >> 1) * SIDE + 16 + (i & 1);
    const bool inside = (u32)y < (u32)height && (u32)xx < (u32)width;
    copy16(base + pixel * 128 + ((chunk ^ (pixel & 7)) << 4),
           from + (inside ? (i64)(y * width + xx) * 128 + chunk * 16 : 0), inside);
  }
  for (int i = thread; i < 36 * TILES_N * 32; i += 128) kept[i] = weights[i];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  float acc[4][TILES_N][4];
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int r = 0; r < 4; r++) acc[m][n][r] = 0.f;
  const int row = (lane & 7) + ((lane >> 3) & 1) * 8, half = lane >> 4;
  // A row of 16 pixels, once in registers, serves the three output rows around it.
#pragma unroll 1
  for (int step = 0; step < 12; step++) {
    const int dx = step >> 2, k = step & 3;
    uint2 b[3][TILES_N];
#pragma unroll
    for (int dy = 0; dy < 3; dy++)
#pragma unroll
      for (int n = 0; n < TILES_N; n++) b[dy][n] = kept[(((dy * 3 + dx) * 4 + k) * TILES_N + n) * 32 + lane];
#pragma unroll
    for (int line = 0; line < 6; line++) {
      const int pixel = (warp * 4 + line) * SIDE + dx + row;
      const u32 at = base + pixel * 128 + (((k * 2 + half) ^ (pixel & 7)) << 4);
      u32 a[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
#pragma unroll
      for (int dy = 0; dy < 3; dy++)
        if (line - dy >= 0 && line - dy < 4)
#pragma unroll
          for (int n = 0; n < TILES_N; n++) mma(acc[line - dy][n], a, b[dy][n].x, b[dy][n].y);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int r = 0; r < 4; r += NEIGHBORS) {
        const int channel = n * 8 + (lane & 3) * 2 + (r & 1);
        const int y = y0 + warp * 4 + m, xx = x0 + (lane >> 2) + (r >> 1) * 8;
        if (channel >= OUT || y >= height || xx >= width) continue;
        const int colour = channel / (PATCH * PATCH), i = channel / PATCH % PATCH, j = channel % PATCH;
        const i64 at = (((i64)frame * 3 + colour) * height * PATCH + y * PATCH + i) * (width * PATCH) + xx * PATCH + j;
        const float value = acc[m][n][r] + bias[channel];
        if (NEIGHBORS == 2) *(u32*)(out + at) = pack(value, acc[m][n][r | 1] + bias[channel + 1]);
        else out[at] = (u16)pack(value, 0.f);
      }
}
#endif
