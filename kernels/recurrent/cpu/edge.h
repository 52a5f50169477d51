// Where a step reads or writes a tensor of the layer on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "convert.h"

namespace my_ops::cpu {

// `count` elements in a row: in place, or, of a 16-bit type, in a part of the workspace, where they
// are float and stay in the cache. Null stays null.
template <typename T, typename Acc>
class Edge {
 public:
  Edge(int64_t count, Acc*& workspace) : count_(count), buffer_(workspace) {
    if (kConverts) workspace += count;
  }

  const Acc* read(const T* from) const {
    if constexpr (kConverts) {
      if (from) convert(from, count_, buffer_);
      return from ? buffer_ : nullptr;
    } else {
      return from;
    }
  }
  // Where to write what belongs to `to`; written(to) follows.
  Acc* place(T* to) const {
    if constexpr (kConverts) {
      return to ? buffer_ : nullptr;
    } else {
      return to;
    }
  }
  void written(T* to) const {
    if constexpr (kConverts) {
      if (to) convert(buffer_, count_, to);
    }
  }
  // The place of `to`, with the values of `from`, or zeros for null.
  Acc* start(const T* from, T* to) const {
    Acc* const into = place(to);
    if (!from) {
      std::fill_n(into, count_, Acc(0));
    } else if constexpr (kConverts) {
      convert(from, count_, into);
    } else {
      std::copy_n(from, count_, into);
    }
    return into;
  }
  // Copies what was read or placed to where it ends.
  void finish(const Acc* values, T* to) const {
    if constexpr (kConverts) {
      written(to);
    } else if (values != to) {
      std::copy_n(values, count_, to);
    }
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<T, Acc>;

  int64_t count_;
  Acc* buffer_;
};

// From `place` on, or null.
template <typename T>
T* at(T* array, int64_t place) {
  return array ? array + place : nullptr;
}

}  // namespace my_ops::cpu
