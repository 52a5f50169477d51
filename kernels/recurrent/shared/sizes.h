// Sizes that plans and kernels of several families share.
#pragma once

#include <algorithm>

namespace my_ops::cuda {

constexpr int kRecurrentThreads = 256;
constexpr int kRecurrentWarps = kRecurrentThreads / 32;

constexpr int kSlots = 64;       // of the exchange through L2: see exchange.cuh
constexpr int kChunkBytes = 64;  // of one row: 16 bytes per lane of the four in an mma column

// Chunks of a warp's weights that stay in registers, 8 for each of a slab's 16-row tiles. They take
// 96 to 144 of a thread's 255 registers, which also hold the sums.
constexpr int resident_chunks(int width, int tiles, int row_tiles, int chunks) {
  const int room = width == 4 ? 96 : row_tiles == 1 ? 144 : tiles == 4 ? 128 : 96;
  return std::min(chunks, room / (8 * tiles));
}

// Shared memory for the other weights, at least one chunk, and for two sets of partial sums.
constexpr int slab_shared_bytes(int width, int tiles, int row_tiles, int chunks) {
  const int spilled = std::max(chunks - resident_chunks(width, tiles, row_tiles, chunks), 1);
  return spilled * tiles * 2 * kRecurrentThreads * 16 +
         2 * kRecurrentWarps * tiles * row_tiles * 32 * 16;
}

}  // namespace my_ops::cuda
