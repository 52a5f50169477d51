// Computes torch's own products (mm, bmm, addmm, baddbmm) with our kernels if the switch is on and
// these are faster. It is asked by the kernels that replace torch's, those of
// overrides/fast_fp32.cpp or of my_ops/_fast_fp32.py, and what it does not take goes to torch's
// own. A backend has what differs between devices:
//
//   kKey                           the dispatch key
//   on_device(tensor)              whether a tensor belongs to that key
//   run(op, product, added, matrix, place)
//                                  computes the product with what is added, in the tensor place();
//                                  returns why it did not, in which case nothing is written.
//                                  matrix: that of a complex product (fast_fp32_complex.h), or
//                                  null. The product is then the real one; place() makes its
//                                  operands
//   write(matrix, tensor)          writes that matrix into a tensor
//   Attention                      optional: computes attention (fast_fp32_attention_cuda.h)
//   Windows                        computes convolutions of windows (fast_fp32_windows_cuda.h)
//   depthwise                      computes depthwise ones (fast_fp32_depthwise.h)
//
// Once registered, those kernels stay registered: other threads may be inside them, and kernels of
// other packages may fall back to them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <variant>

#include "fast_fp32_complex.h"
#include "gemm_checks.h"
#include "overrides/fast_fp32_switch.h"

namespace my_ops::fast_fp32 {

#define MY_OPS_LEFT(F)                                                 \
  F(kOther, "of another layout or shape, or into an unsuitable out")   \
  F(kPlan, "that torch computes as fast")                              \
  F(kPrecision, "while TF32 is allowed")                               \
  F(kDropout, "of attention with dropout")                             \
  F(kHeads, "of attention with other head sizes or no positive scale") \
  F(kFailed, "where ours failed, usually for lack of memory")          \
  F(kConvolution, "while TF32 is allowed in convolutions")             \
  F(kMemory, "of convolutions that would take too much memory")

// Why a product stays torch's, in the order of the checks.
#define MY_OPS_ENUMERATOR(left, text) left,
enum class Left { MY_OPS_LEFT(MY_OPS_ENUMERATOR) };
#undef MY_OPS_ENUMERATOR
#define MY_OPS_TEXT(left, text) text,
inline constexpr const char* kLeftTexts[] = {MY_OPS_LEFT(MY_OPS_TEXT)};
#undef MY_OPS_TEXT

// A result, or why it stays torch's.
using Found = std::variant<Tensor, Left>;

// op, batch, m, n, k
using Shape = std::tuple<std::string_view, int64_t, int64_t, int64_t, int64_t>;

struct State {
  std::atomic<bool> on = false;
  std::atomic<int64_t> left[std::size(kLeftTexts)] = {};
  std::mutex mutex;  // of taken
  std::map<Shape, int64_t> taken;
};
inline State& state() {
  static State* const state = new State;  // never freed: threads may outlive main
  return *state;
}

inline void count(Left left) {
  state().left[static_cast<size_t>(left)].fetch_add(1, std::memory_order_relaxed);
}
inline void count(const Shape& shape) {
  const std::lock_guard lock(state().mutex);
  ++state().taken[shape];
}

// "taken mm 1 4096 4096 4096 12", a line for each shape, and "left 3 that torch computes as fast".
inline std::string report() {
  std::ostringstream text;
  {
    const std::lock_guard lock(state().mutex);
    for (const auto& [shape, times] : state().taken) {
      const auto& [op, batch, m, n, k] = shape;
      text << "taken " << op << ' ' << batch << ' ' << m << ' ' << n << ' ' << k << ' ' << times
           << '\n';
    }
  }
  for (size_t i = 0; i < std::size(kLeftTexts); ++i) {
    text << "left " << state().left[i].load() << ' ' << kLeftTexts[i] << '\n';
  }
  return text.str();
}

// What addmm adds to a product: a row, or an array with these strides. Null: nothing.
struct Added {
  const float* bias = nullptr;
  const float* residual = nullptr;
  int64_t batch = 0, row = 0, col = 0;
};

inline bool is_strided(const Tensor& t) {
  int32_t layout = -1;
  return aoti_torch_get_layout(t.get(), &layout) == TORCH_SUCCESS &&
         layout == aoti_torch_layout_strided();
}

// Whether its dimensions have names, as torch before 2.13 allows.
inline bool is_named(const Tensor& t) {
  using HasNames = bool (*)(const void* implementation);
  static const auto has_names =
      reinterpret_cast<HasNames>(dlsym(RTLD_DEFAULT, "_ZN2at4impl9has_namesEPKN3c1010TensorImplE"));
  return has_names && has_names(*reinterpret_cast<void* const*>(t.get()));
}

// self broadcast to sizes, or nothing if it cannot be.
inline std::optional<Added> broadcast(const Tensor& self, const Sizes& sizes) {
  const auto rank = static_cast<int64_t>(sizes.size()), missing = rank - self.dim();
  if (missing < 0) return std::nullopt;
  int64_t strides[3] = {};
  bool row = true;
  for (int64_t d = 0; d < rank; ++d) {
    const int64_t size = d < missing ? 1 : self.size(d - missing);
    if (size == 1) continue;
    if (size != sizes[d]) return std::nullopt;
    strides[d + 3 - rank] = self.stride(d - missing);
    row = row && d == rank - 1;
  }
  const auto* const values = in<float>(self);
  if (row && strides[2] == 1) return Added{.bias = values};
  return Added{.residual = values, .batch = strides[0], .row = strides[1], .col = strides[2]};
}

// As pairs of real numbers in rows of n pairs. Returns whether it can be.
inline bool make_pairs(Added* added, int64_t n) {
  if (added->residual && n != 1 && added->col != 1) return false;
  added->batch *= 2, added->row *= 2, added->col = 1;
  return true;
}

template <typename Backend>
bool is_ours(const Tensor& t, const Tensor& like, ScalarType dtype = ScalarType::Float) {
  return t.defined() && t.scalar_type() == dtype && Backend::on_device(t) &&
         t.get_device_index() == like.get_device_index() && is_strided(t) && !is_named(t) &&
         storage_bytes(t).suffices();
}

template <typename Backend>
class Products {
 public:
  // a @ b, plus self unless that is absent, for an op on tensors of this rank. Nothing if it stays
  // torch's; otherwise out or, if that is absent, a new tensor. Whoever asks has looked at the
  // switch and at the least size.
  static std::optional<Tensor> take(int64_t rank, const std::optional<Tensor>& self,
                                    const Tensor& a, const Tensor& b,
                                    const std::optional<Tensor>& out) {
    const char* const op = rank == 3 ? (self ? "baddbmm" : "bmm") : (self ? "addmm" : "mm");
    const Found found = take_as(op, rank, self, a, b, out);
    if (const Tensor* const result = std::get_if<Tensor>(&found)) return *result;
    count(std::get<Left>(found));
    return std::nullopt;
  }

  // As above, counted as a product of this op if it is taken, and not otherwise.
  static Found take_as(const char* op, int64_t rank, const std::optional<Tensor>& self,
                       const Tensor& a, const Tensor& b, const std::optional<Tensor>& out) {
    try {
      Tensor result = out.value_or(Tensor());
      const std::optional<Left> why = run(op, rank, self, a, b, &result);
      if (!why) return result;
      return *why;
    } catch (const std::exception&) {  // torch's product needs less memory, or raises its own error
      return Left::kFailed;
    }
  }

 private:
  static bool is_ours(const Tensor& t, const Tensor& like) {
    const ScalarType dtype = like.scalar_type();
    return (dtype == ScalarType::Float || dtype == ScalarType::ComplexFloat) &&
           fast_fp32::is_ours<Backend>(t, like, dtype);
  }

  // Whether torch would accept these operands.
  static bool fits(const Tensor& a, const Tensor& b, int64_t rank) {
    return is_ours(a, a) && is_ours(b, a) && a.dim() == rank && b.dim() == rank &&
           a.size(rank - 1) == b.size(rank - 2) && (rank == 2 || a.size(0) == b.size(0));
  }

  static bool takes_out(const Tensor& out, const Tensor& a, const Tensor& b,
                        const std::optional<Tensor>& self) {
    return is_ours(out, a) && sizes_of(out) == gemm_sizes(a, b) && out.is_contiguous() &&
           !overlap(out, a) && !overlap(out, b) && !(self && overlap(out, *self));
  }

  // What take does. Returns why it did not.
  static std::optional<Left> run(const char* op, int64_t rank, const std::optional<Tensor>& self,
                                 const Tensor& a, const Tensor& b, Tensor* out) {
    if (!fits(a, b, rank) || (self && !is_ours(*self, a))) return Left::kOther;
    if (out->defined() && !takes_out(*out, a, b, self)) return Left::kOther;
    const Sizes sizes = gemm_sizes(a, b);
    Product p = product(a, b, *out, contiguous_strides(sizes));
    const bool is_complex = a.scalar_type() == ScalarType::ComplexFloat;
    if (is_complex && ((self && is_conj(*self)) || (out->defined() && is_conj(*out)))) {
      return Left::kOther;
    }
    Added added;
    if (self) {
      const std::optional<Added> broadcast_self = broadcast(*self, sizes);
      if (!broadcast_self) return Left::kOther;
      added = *broadcast_self;
      const bool folded = p.batch != (rank == 3 ? sizes[0] : 1);
      if (folded && added.residual && added.batch != a.size(1) * added.row) return Left::kOther;
      if (is_complex && !make_pairs(&added, sizes[rank - 1])) return Left::kOther;
    }
    ComplexMatrix matrix;
    if (is_complex) matrix = make_real(&p);
    const auto place = [&]() -> const Tensor& {
      if (is_complex) {
        if (matrix.copied) p.a = copy(a, a.scalar_type());
        p.b = empty(b, {matrix.batch, p.k, p.n}, ScalarType::Float);
        Backend::write(matrix, p.b);
      }
      if (!p.out.defined()) p.out = empty(a, sizes);
      return p.out;
    };
    const std::optional<Left> left =
        Backend::run(op, p, added, is_complex ? &matrix : nullptr, place);
    if (left) return left;
    *out = p.out;
    count(Shape(op, rank == 3 ? sizes[0] : 1, sizes[rank - 2], sizes[rank - 1], a.size(rank - 1)));
    return std::nullopt;
  }
};

// Tensors of the kernels in C++, which keep theirs.
inline AtenTensorHandle new_handle(AtenTensorHandle handle) {
  AtenTensorHandle result = nullptr;
  check_torch(aoti_torch_new_tensor_handle(handle, &result), "fast_fp32");
  return result;
}
inline Tensor tensor(AtenTensorHandle handle) { return Tensor(new_handle(handle)); }
inline std::optional<Tensor> optional_tensor(AtenTensorHandle handle) {
  return handle ? std::optional(tensor(handle)) : std::nullopt;
}

template <typename Backend>
int take(int64_t rank, AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b,
         AtenTensorHandle* out) {
  const auto result = Products<Backend>::take(rank, optional_tensor(self), tensor(a), tensor(b),
                                              optional_tensor(*out));
  if (result && !*out) *out = new_handle(result->get());
  return result.has_value();
}

// Registers take as an op for the kernels in Python, and returns what those in C++ need.
template <typename Backend>
void convolve(const Convolution& convolution, AtenTensorHandle* result);

template <typename Backend>
Switch start() {
  using torch::stable::detail::StableLibrary;
  const auto library = [](StableLibrary::Kind kind, const char* key) -> StableLibrary& {
    // Never freed, as that would unregister its kernels.
    return *new StableLibrary(kind, "my_ops", key, "my_ops/csrc/fast_fp32.h", __LINE__);
  };
  StableLibrary& schemas = library(StableLibrary::Kind::FRAGMENT, nullptr);
  StableLibrary& kernels = library(StableLibrary::Kind::IMPL, Backend::kKey);
  schemas.def("fast_fp32(int rank, Tensor? self, Tensor a, Tensor b, Tensor(a!)? out) -> Tensor?");
  kernels.impl("fast_fp32", TORCH_BOX(&Products<Backend>::take));
  Switch result{&state().on, cuda::kTensorCoresMinWork, &take<Backend>, &convolve<Backend>};
  if constexpr (requires { typename Backend::Attention; }) {
    using Attention = typename Backend::Attention;
    schemas.def(Attention::kForward);
    schemas.def(Attention::kBackward);
    kernels.impl("fast_fp32_attention", TORCH_BOX(&Attention::forward));
    kernels.impl("fast_fp32_attention_backward", TORCH_BOX(&Attention::backward));
    result.least_attention = Attention::kMinWork;
    result.attend = &Attention::run;
    result.attend_backward = &Attention::run_backward;
  }
  return result;
}

}  // namespace my_ops::fast_fp32

// The functions that Python calls, for one backend. A module has one backend.
#define MY_OPS_FAST_FP32_EXPORT extern "C" __attribute__((visibility("default")))
#define MY_OPS_FAST_FP32(Backend)                                                     \
  MY_OPS_FAST_FP32_EXPORT const my_ops::fast_fp32::Switch* my_ops_fast_fp32_start() { \
    static const auto the_switch = my_ops::fast_fp32::start<Backend>();               \
    return &the_switch;                                                               \
  }                                                                                   \
  MY_OPS_FAST_FP32_EXPORT void my_ops_fast_fp32_set(int on) {                         \
    my_ops::fast_fp32::state().on = on;                                               \
  }                                                                                   \
  MY_OPS_FAST_FP32_EXPORT int64_t my_ops_fast_fp32_report(char* text, int64_t size) { \
    const std::string said = my_ops::fast_fp32::report();                             \
    const auto length = static_cast<int64_t>(said.size());                            \
    if (length < size) std::memcpy(text, said.c_str(), said.size() + 1);              \
    return length;                                                                    \
  }
