// What the kernels share that join the last growing layer and the image convolution (grow_image.cu, grow_patches.cu).
//
// Cells. Cell (y, x) holds the four pixels of the rows 2y-1, 2y and the columns 2x-1, 2x of the doubled grid: phase
// (i, j) is pixel (2y-i, 2x-j). All four read the same 2x2 small pixels (y-1..y, x-1..x), so a growing layer is one
// product: 64 cells x K = 4 taps of 64 channels x N = 4 phases of 64 channels. There is one row and one column of cells
// more than small pixels. Pixels outside the image are zeros for the 3x3, so the outer cells lose two of their phases.
// Quad (y, x) is the pixels 2y..2y+1, 2x..2x+1 of the result; its 3x3 needs the cells y..y+1, x..x+1.
//
// A strip is 64 cells wide and goes down row by row. A step reads one new row of 65 small pixels, so a strip computes
// 64 cells for 63 quads, and one row of cells more for each part of a strip. Strips do not end with a frame: the rows of
// all frames lie side by side in a line, each with one place more than it has pixels, because it has that many cells.
// As a pixel this place is the zero between two frames. So no width wastes more than a part of the last strip.
//
// Compiled between instructions.cu and the file of the kernel.

#define PLANE ((CELLS + 1) * 16)  // 8 channels of a row; 65 pixels: the eight chunks of a pixel fall on different banks
#define ROW_BYTES (PLANE * 8)
#define GROW_TAP 32768           // bytes of one tap: [8-channel chunk][4 phases of 64 outputs][16 bytes]
#define IMAGE_AT (4 * GROW_TAP)  // where the image convolution's weights start
#define RING_AT (WEIGHT_TILES * WEIGHT_TILE)

__device__ __forceinline__ u32 pack_activated(float lo, float hi) {
  if (SLOPE != 0) return pack(activate(lo), activate(hi));
  u32 r; asm("cvt.rn.relu." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}

struct Part {  // of a strip: the quads of `count` rows from row `top`; `start` is the strip's place in the line
  int start, top, count;
};
__device__ __forceinline__ Part part_at(int row, int stop, int height) {
  return {row / height * (CELLS - 1), row % height, min(height - row % height, stop - row)};
}
struct Place {  // in the line: a column of a frame. Column `width` has a cell, but no pixel and no quad.
  int frame, column;
};
__device__ __forceinline__ Place place_at(int at, int width) { return {at / (width + 1), at % (width + 1)}; }

// By one thread: all weights of the frame `made` of those that an input frame grows into.
__device__ __forceinline__ void load_all_weights(u32 base, u32 bars, const char* weights, int made) {
  barrier_expect(WEIGHTS_FULL, RING_AT);
  for (int i = 0; i < WEIGHT_TILES; i++)
    load_weights(base + i * WEIGHT_TILE, weights + (made * WEIGHT_TILES + i) * WEIGHT_TILE, WEIGHTS_FULL);
}

// By two warps: the rows of small pixels that the rows `first` to `stop` of quads need, into the ring of a member.
// Eight threads read a pixel's 128 bytes.
__device__ __forceinline__ void load_rows(
    const char* x, u32 rings, u32 bars, int member, int first, int stop, int frames, int height, int width) {
  const int lead = (threadIdx.x >> 3) & 7, chunk = threadIdx.x & 7;
  int turn = 0;
  for (int row = first; row < stop;) {
    const Part part = part_at(row, stop, height);
    int pixels[CELLS / 8 + 1];  // the thread's: every eighth of the row, in the first row of its frame; -1: zeros
#pragma unroll
    for (int i = 0; i <= CELLS / 8; i++) {
      const int at = part.start - 1 + lead + i * 8;
      const Place place = place_at(at, width);
      const bool exists = at >= 0 && place.column < width && place.frame < frames;
      pixels[i] = exists ? place.frame * height * width + place.column : -1;
    }
    for (int y = part.top - 1; y <= part.top + part.count; y++, turn++) {
      const u32 to = rings + (member * RING + turn % RING) * ROW_BYTES + chunk * PLANE + lead * 16;
      const char* from = x + (i64)y * width * 128 + chunk * 16;
      barrier_wait(EMPTY(member, turn), ((turn / RING) & 1) ^ 1);
#pragma unroll
      for (int i = 0; i <= CELLS / 8; i++) {
        const bool inside = (u32)y < (u32)height && pixels[i] >= 0;
        if (lead + i * 8 <= CELLS) copy16(to + i * 128, inside ? from + (i64)pixels[i] * 128 : x, inside);
      }
      copies_commit();
      copies_wait<0>();
      barrier_arrive(FULL(member, turn));
    }
    row += part.count;
  }
}
