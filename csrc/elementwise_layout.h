// The layout of elementwise results. It is that of torch's own operators, which follow the
// operands.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>

#include "../include/elementwise.h"
#include "binding.h"

namespace my_ops {

// Dimensions in memory order, innermost first.
using Order = std::vector<size_t>;

struct Layout {
  Order order;
  Sizes strides;  // dense in that order
};

inline Sizes dense_strides(const Sizes& sizes, const Order& order) {
  // Without elements, torch multiplies sizes of 0 in too, unless the order is row-major.
  if (std::is_sorted(order.rbegin(), order.rend())) return contiguous_strides(sizes);
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (const size_t d : order) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

// Whether two layouts are the same. The stride of a dimension of size 1 does not matter.
inline bool lie_alike(const Sizes& sizes, const Sizes& a, const Sizes& b) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  }
  return true;
}

// Strides of t seen as sizes: 0 along broadcast dimensions.
inline Sizes broadcast_strides(const Tensor& t, const Sizes& sizes) {
  Sizes strides(sizes.size(), 0);
  const size_t lead = sizes.size() - t.dim();
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == sizes[lead + d]) strides[lead + d] = t.stride(d);
  }
  return strides;
}

// Sorts dimensions by the strides of the first operand that distinguishes two of them; an operand
// that is broadcast along one of them does not. The comparison is not a strict ordering, so the
// sorting method is part of the rule: insertion sort, from row-major order.
template <size_t kOperands>
Order memory_order(const Sizes& sizes, const std::array<Sizes, kOperands>& operands) {
  const auto compare = [&](size_t i, size_t j) {
    for (const Sizes& strides : operands) {
      if (strides[i] == 0 || strides[j] == 0) continue;
      if (strides[i] != strides[j]) return strides[i] < strides[j] ? -1 : 1;
      if (sizes[i] > sizes[j]) return 1;
    }
    return 0;
  };
  Order order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  for (size_t next = 1; next < order.size(); ++next) {
    for (size_t at = next, before = next; before-- > 0;) {
      const int found = compare(order[before], order[at]);
      if (found < 0) break;
      if (found == 0) continue;
      std::swap(order[before], order[at]);
      at = before;
    }
  }
  return order;
}

// The layout for operands that broadcast to sizes, unless all are contiguous and of that shape.
// my_ops/ops/_strides.py does the same for fake tensors.
template <typename... Tensors>
Layout result_layout(const Sizes& sizes, const Tensors&... tensors) {
  const std::array operands{broadcast_strides(tensors, sizes)...};
  const bool one_shape = (... && std::ranges::equal(tensors.sizes(), sizes));
  if (one_shape && sizes.size() == 4) {
    const Order channels_last{1, 3, 2, 0};
    const Sizes strides = dense_strides(sizes, channels_last);
    const auto lies_so = [&](const Sizes& own) { return lie_alike(sizes, own, strides); };
    if (std::all_of(operands.begin(), operands.end(), lies_so)) return {channels_last, strides};
  }
  const Order order = memory_order(sizes, operands);
  const Sizes strides = dense_strides(sizes, order), &own = operands[0];
  const auto lies_as_first = [&](const Sizes& other) { return other == own; };
  const bool one_layout = one_shape && lie_alike(sizes, own, strides) &&
                          std::all_of(operands.begin(), operands.end(), lies_as_first);
  return {order, one_layout ? own : strides};
}

// A copy of t, which broadcasts to the shape of like, in the layout of like.
inline Tensor copy_as(const Tensor& like, const Tensor& t) {
  Tensor copy = empty_strided(like, sizes_of(like), strides_of(like), t.scalar_type());
  return torch::stable::copy_(copy, t);
}

inline bool lies_as(const Tensor& t, const Tensor& like) {
  return lie_alike(sizes_of(t), strides_of(t), strides_of(like));
}

struct Unary {
  Tensor x, out;  // with the same dense layout: elements correspond by position in memory
};

// A tensor with another layout is copied into out, and the kernel then runs in place.
inline Unary unary(const Tensor& x) {
  const Sizes sizes = sizes_of(x);
  if (x.is_contiguous()) return {x, empty(x, sizes)};
  Tensor out = empty_strided(x, sizes, result_layout(sizes, x).strides, x.scalar_type());
  if (lies_as(x, out)) return {x, out};
  torch::stable::copy_(out, x);
  return {out, out};
}

// Two tensors with the same shape and dtype.
struct Gradient {
  Tensor grad, x, out;  // with the same dense layout
};

inline Gradient gradient(const Tensor& grad, const Tensor& x) {
  const Sizes sizes = sizes_of(x);
  if (grad.is_contiguous() && x.is_contiguous()) return {grad, x, empty(x, sizes)};
  const Tensor out =
      empty_strided(x, sizes, result_layout(sizes, grad, x).strides, x.scalar_type());
  return {lies_as(grad, out) ? grad : copy_as(out, grad), lies_as(x, out) ? x : copy_as(out, x),
          out};
}

// a and b in the same dtype, and how to walk them.
struct Binary {
  Tensor a, b, out;
  bool flat;  // both have the same dense layout: the broadcast is not needed
  Broadcast shape;
};

// Merges dimensions that are adjacent in memory and that both operands walk as one. False if more
// than kMaxDims remain.
inline bool coalesce(const Sizes& sizes, const Order& order, const Sizes& a, const Sizes& b,
                     Broadcast* shape) {
  int dims = 0;
  for (size_t at = order.size(); at-- > 0;) {
    const size_t d = order[at];
    if (sizes[d] == 1) continue;
    if (dims > 0 && shape->a_strides[dims - 1] == a[d] * sizes[d] &&
        shape->b_strides[dims - 1] == b[d] * sizes[d]) {
      --dims;
      shape->sizes[dims] *= sizes[d];
    } else {
      if (dims == Broadcast::kMaxDims) return false;
      shape->sizes[dims] = sizes[d];
    }
    shape->a_strides[dims] = a[d];
    shape->b_strides[dims] = b[d];
    ++dims;
  }
  if (dims == 0) {
    shape->sizes[0] = 1;
    shape->a_strides[0] = shape->b_strides[0] = 0;
    dims = 1;
  }
  shape->dims = dims;
  return true;
}

inline Binary binary(const Tensor& a, const Tensor& b, const Sizes& sizes, ScalarType dtype) {
  Binary plan{cast(a, dtype), cast(b, dtype), {}, true, {}};
  // On the CPU torch casts its operands first, so the layouts of the casts decide.
  const Tensor &like_a = a.is_cuda() ? a : plan.a, &like_b = b.is_cuda() ? b : plan.b;
  if (like_a.is_contiguous() && like_b.is_contiguous() &&
      std::ranges::equal(a.sizes(), b.sizes())) {
    plan.out = empty(a, sizes, dtype);
    return plan;
  }
  const Layout layout = result_layout(sizes, like_a, like_b);
  plan.out = empty_strided(a, sizes, layout.strides, dtype);
  if (coalesce(sizes, layout.order, broadcast_strides(plan.a, sizes),
               broadcast_strides(plan.b, sizes), &plan.shape)) {
    plan.flat =
        plan.shape.dims == 1 && plan.shape.a_strides[0] == 1 && plan.shape.b_strides[0] == 1;
  } else {
    plan.a = copy_as(plan.out, plan.a);
    plan.b = copy_as(plan.out, plan.b);
  }
  return plan;
}

}  // namespace my_ops
