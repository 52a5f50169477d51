// The exchange of a vector among the blocks of a group through L2, once per round: h in forward,
// the gradients of the gates in backward.
//
// The vector of a round is divided into chunks of 64 bytes per row: [slot][chunk][row][64 B]. Words
// are self-validating: an unwritten word is kEmpty, which no producer writes, so a consumer simply
// reads until nothing is empty. There are no flags, and no fences between store and load.
//
// The slots are a ring, whose words are emptied before they are filled again. Once a block holds
// all of vector n, every member has published it, and so has finished reading vector n - 1. So at
// every n that is a multiple of kPeriod, each producer empties its own words of the kPeriod vectors
// before n, and the whole block fences. This one fence is a producer's release and a consumer's
// acquire. Release: the barrier before it orders the block's emptying before it, and the words of
// vectors from n + 2 on are published after it. Acquire: a consumer has read the words of vector n
// + kPeriod when it fences there, and afterwards reads the emptied slots, those of vectors from n +
// kSlots - kPeriod on (reading a vector starts one step ahead). So every reader of a slot finds it
// empty or newly filled. No fence is needed to ensure that a member's reads are done before another
// member empties the words: what that member has published since was computed from them.
#pragma once

#include "common/numeric.cuh"
#include "ptx/memory.cuh"
#include "recurrent/shared/sizes.h"

namespace my_ops::cuda {

constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr int kPeriod = (kSlots - 2) / 2;  // a fence takes about a step, so it should be rare
static_assert(kSlots - kPeriod >= kPeriod + 2);

template <typename T>
constexpr int kChunkUnits = kChunkBytes / static_cast<int>(sizeof(T));

// A word in the form in which it is published: any NaN except the empty pattern.
__device__ __forceinline__ uint32_t publishable(uint32_t word) {
  return word == kEmpty ? 0x7FFFFFFFu : word;
}

__device__ __forceinline__ bool any_empty(const uint4& v) {
  return v.x == kEmpty || v.y == kEmpty || v.z == kEmpty || v.w == kEmpty;
}

// Whether this lane writes the word that it shares with others.
template <typename T>
__device__ __forceinline__ bool writes_word() {
  return sizeof(T) == 4 || threadIdx.x % 2 == 0;
}

// Publishes one value per lane; lanes 2i and 2i + 1 hold adjacent units of a row. Must be called by
// the whole warp. p: the lane's word, which for 16-bit types is shared by the pair.
template <typename T>
__device__ __forceinline__ void publish(uint32_t* p, float v, bool active) {
  if constexpr (sizeof(T) == 4) {
    if (active) ptx::st_relaxed(p, publishable(bits(v)));
  } else {
    const T mine = store<T>(v);
    const uint32_t other = __shfl_down_sync(0xFFFFFFFFu, bits(mine), 1);
    if (active && writes_word<T>()) {
      ptx::st_relaxed(p, publishable(bits(mine) | (other << 16)));
    }
  }
}

// Called when vector `received` is complete. If it is time, the block empties its own words of the
// vectors before. base: of the exchange, at the block's first row and unit. A row of the block has
// `quads` of 16 bytes in each of `vectors` vectors, `vector_words` apart. Must be called by the
// whole block, after vector received + 1 has been published and its reading started.
__device__ __forceinline__ void empty_slots(uint32_t* base, int64_t received, int64_t slot_words,
                                            int vectors, int64_t vector_words, int rows,
                                            int quads) {
  // 32 bits are enough: more steps would not fit in memory.
  const auto n = static_cast<uint32_t>(received);
  if (received <= 0 || n % kPeriod != 0) return;
  const int per_slot = vectors * rows * quads;
#pragma unroll 1
  for (int i = threadIdx.x; i < kPeriod * per_slot; i += kRecurrentThreads) {
    const int quad = i % quads, row = i / quads % rows;
    const int vector = i / (quads * rows) % vectors, slot = (n - 1 - i / per_slot) % kSlots;
    ptx::st_relaxed(reinterpret_cast<uint4*>(base + slot * slot_words + vector * vector_words +
                                             row * (kChunkBytes / 4) + quad * 4),
                    uint4{kEmpty, kEmpty, kEmpty, kEmpty});
  }
  __syncthreads();
  __threadfence();
}

}  // namespace my_ops::cuda
