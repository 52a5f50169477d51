// Runs torch's own products (mm, bmm, addmm, baddbmm) on our kernels if the switch is on and these
// are faster. All others go to torch's own kernels. A backend has what differs between devices:
//
//   kKey                         the dispatch key
//   on_device(tensor)            whether a tensor belongs to that key
// run(op, product, added, out) computes the product with what is added, out.make() giving the place
//                                for it; returns why it did not, in which case nothing is written
//   mm_out, bmm_out, addmm_out, baddbmm_out
//                                torch's own, of its C interface
//   kMm, kMmOut, kBmm, kBmmOut   the C++ symbols of torch's own
//
// Once registered, the kernels stay registered: other threads may be inside them, and kernels of
// other packages may fall back to them. When switched off, they only call torch's.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>

#include "gemm_checks.h"

namespace my_ops::fast_fp32 {

#define MY_OPS_LEFT(F)                                                      \
  F(kOther, "of another dtype, layout or shape, or into an unsuitable out") \
  F(kPlan, "that torch computes as fast")                                   \
  F(kPrecision, "while TF32 is allowed")                                    \
  F(kFailed, "where ours failed, usually for lack of memory")

// Why a product stays torch's, in the order of the checks.
#define MY_OPS_ENUMERATOR(left, text) left,
enum class Left { MY_OPS_LEFT(MY_OPS_ENUMERATOR) };
#undef MY_OPS_ENUMERATOR
#define MY_OPS_TEXT(left, text) text,
inline constexpr const char* kLeftTexts[] = {MY_OPS_LEFT(MY_OPS_TEXT)};
#undef MY_OPS_TEXT

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

// A tensor as torch's C++ functions return it: an object with a destructor, in memory. Its pointer
// is passed on to a handle.
struct Returned {
  void* implementation;
  ~Returned() {}
};

// Relies on handles being addresses of torch's tensors, and on references being passed as
// addresses. Only for releases of torch that were tested: my_ops/_fast_fp32.py.
using NativeProduct = Returned (*)(AtenTensorHandle a, AtenTensorHandle b);
using NativeProductOut = void* (*)(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b);

template <typename Backend>
class Kernels {
 public:
  // native: whether to call torch's products by their C++ symbols, as the dispatcher does, which
  // keeps the class of an error. The alternative, the C interface, keeps only an error's text.
  static void start(bool native) {
    if (native) {
      find(Backend::kMm, &native_mm_);
      find(Backend::kMmOut, &native_mm_out_);
      find(Backend::kBmm, &native_bmm_);
      find(Backend::kBmmOut, &native_bmm_out_);
    }
    // The ops that go through Python: my_ops/_fast_fp32.py.
    library(StableLibrary::Kind::FRAGMENT, "my_ops", nullptr)
        .def("fast_fp32_bmm(Tensor a, Tensor b) -> Tensor")
        .def("fast_fp32_addmm(Tensor self, Tensor a, Tensor b) -> Tensor")
        .def(
            "fast_fp32_addmm.out(Tensor self, Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)")
        .def("fast_fp32_baddbmm(Tensor self, Tensor a, Tensor b) -> Tensor")
        .def(
            "fast_fp32_baddbmm.out(Tensor self, Tensor a, Tensor b, *, Tensor(a!) out) -> "
            "Tensor(a!)");
    library(StableLibrary::Kind::IMPL, "my_ops", Backend::kKey)
        .impl("fast_fp32_bmm", TORCH_BOX(&bmm))
        .impl("fast_fp32_addmm", TORCH_BOX(&addmm))
        .impl("fast_fp32_addmm.out", TORCH_BOX(&addmm_out))
        .impl("fast_fp32_baddbmm", TORCH_BOX(&baddbmm))
        .impl("fast_fp32_baddbmm.out", TORCH_BOX(&baddbmm_out));
  }

  // Overrides aten's op of that name with ours. Returns whether there is such an op.
  static bool override_op(std::string_view op) {
    const auto put = [](const char* name, auto* kernel) {
      library(StableLibrary::Kind::IMPL, "aten", Backend::kKey).impl(name, kernel);
      return true;
    };
    if (op == "mm") return put("mm", TORCH_BOX(&mm));
    if (op == "mm.out") return put("mm.out", TORCH_BOX(&mm_out));
    if (op == "bmm") return put("bmm", TORCH_BOX(&bmm));
    if (op == "bmm.out") return put("bmm.out", TORCH_BOX(&bmm_out));
    return false;
  }

 private:
  using StableLibrary = torch::stable::detail::StableLibrary;

  // Never freed, as that would unregister its kernels.
  static StableLibrary& library(StableLibrary::Kind kind, const char* space, const char* key) {
    return *new StableLibrary(kind, space, key, "my_ops/csrc/fast_fp32.h", __LINE__);
  }

  template <typename F>
  static void find(const char* symbol, F* function) {
    *function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, symbol));
  }

  static bool is_ours(const Tensor& t, const Tensor& like) {
    return t.defined() && t.scalar_type() == ScalarType::Float && Backend::on_device(t) &&
           t.get_device_index() == like.get_device_index() && is_strided(t);
  }

  // Whether torch would accept these operands.
  static bool fits(const Tensor& a, const Tensor& b, int64_t dim) {
    return is_ours(a, a) && is_ours(b, a) && a.dim() == dim && b.dim() == dim &&
           a.size(dim - 1) == b.size(dim - 2) && (dim == 2 || a.size(0) == b.size(0));
  }

  static bool takes_out(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* self) {
    return is_ours(out, a) && sizes_of(out) == gemm_sizes(a, b) && out.is_contiguous() &&
           !overlap(out, a) && !overlap(out, b) && !(self && overlap(out, *self));
  }

  // Computes a @ b, plus self, with our kernels into out, or into a new tensor if out is undefined.
  // Otherwise returns why not.
  static std::optional<Left> run(const char* op, int64_t dim, const Tensor& a, const Tensor& b,
                                 const Tensor* self, Tensor* out) {
    if (!fits(a, b, dim) || (self && !is_ours(*self, a))) return Left::kOther;
    if (a.numel() * b.size(dim - 1) < cuda::kTensorCoresMinWork) return Left::kPlan;
    if (out->defined() && !takes_out(*out, a, b, self)) return Left::kOther;
    const Sizes sizes = gemm_sizes(a, b);
    Product p = product(a, b, *out, contiguous_strides(sizes));
    Added added;
    if (self) {
      const std::optional<Added> broadcast_self = broadcast(*self, sizes);
      if (!broadcast_self) return Left::kOther;
      added = *broadcast_self;
      const bool folded = p.batch != (dim == 3 ? sizes[0] : 1);
      if (folded && added.residual && added.batch != a.size(1) * added.row) return Left::kOther;
    }
    const auto place = [&]() -> const Tensor& {
      if (!p.out.defined()) p.out = empty(a, sizes);
      return p.out;
    };
    const std::optional<Left> left = Backend::run(op, p, added, place);
    if (left) return left;
    *out = p.out;
    count(Shape(op, dim == 3 ? sizes[0] : 1, sizes[dim - 2], sizes[dim - 1], p.k));
    return std::nullopt;
  }

  static bool taken(const char* op, int64_t dim, const Tensor& a, const Tensor& b,
                    const Tensor* self, Tensor* out) {
    if (!state().on.load(std::memory_order_relaxed)) return false;
    std::optional<Left> left;
    try {
      left = run(op, dim, a, b, self, out);
    } catch (const std::exception&) {  // torch's product needs less memory, or raises its own error
      left = Left::kFailed;
    }
    if (left) count(*left);
    return !left;
  }

  static Tensor torchs(NativeProduct native, decltype(Backend::mm_out)* shim, const char* op,
                       const Tensor& a, const Tensor& b) {
    if (!native) {
      const Tensor out = room(a, b);
      check_torch(shim(out.get(), a.get(), b.get()), op);
      return out;
    }
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch_new_uninitialized_tensor(&handle), op);
    Tensor result(handle);
    *reinterpret_cast<void**>(handle) = native(a.get(), b.get()).implementation;
    return result;
  }

  static void torchs_out(NativeProductOut native, decltype(Backend::mm_out)* shim, const char* op,
                         const Tensor& a, const Tensor& b, const Tensor& out) {
    if (native) {
      native(out.get(), a.get(), b.get());
    } else {
      check_torch(shim(out.get(), a.get(), b.get()), op);
    }
  }

  // A tensor for the result of torch's product. If shapes do not fit it is empty, and torch raises.
  static Tensor room(const Tensor& a, const Tensor& b) {
    if (a.dim() == 2 && b.dim() == 2) return empty(a, {a.size(0), b.size(1)});
    if (a.dim() == 3 && b.dim() == 3) return empty(a, {a.size(0), a.size(1), b.size(2)});
    return empty(a, {0});
  }

  static Tensor mm(const Tensor& a, const Tensor& b) {
    Tensor out;
    if (taken("mm", 2, a, b, nullptr, &out)) return out;
    return torchs(native_mm_, &Backend::mm_out, "aten::mm", a, b);
  }
  static Tensor mm_out(const Tensor& a, const Tensor& b, Tensor out) {
    if (!taken("mm", 2, a, b, nullptr, &out)) {
      torchs_out(native_mm_out_, &Backend::mm_out, "aten::mm", a, b, out);
    }
    return out;
  }
  static Tensor bmm(const Tensor& a, const Tensor& b) {
    Tensor out;
    if (taken("bmm", 3, a, b, nullptr, &out)) return out;
    return torchs(native_bmm_, &Backend::bmm_out, "aten::bmm", a, b);
  }
  static Tensor bmm_out(const Tensor& a, const Tensor& b, Tensor out) {
    if (!taken("bmm", 3, a, b, nullptr, &out)) {
      torchs_out(native_bmm_out_, &Backend::bmm_out, "aten::bmm", a, b, out);
    }
    return out;
  }

  // addmm of matrices and baddbmm of batches, with beta = alpha = 1. After an error, Python calls
  // torch's product, which raises its own.
  template <int64_t kDim>
  static Tensor add_product(const Tensor& self, const Tensor& a, const Tensor& b, Tensor out) {
    constexpr bool kBatched = kDim == 3;
    constexpr const char* kOp = kBatched ? "baddbmm" : "addmm";
    if (taken(kOp, kDim, a, b, &self, &out)) return out;
    if (!out.defined()) out = room(a, b);
    const auto shim = kBatched ? &Backend::baddbmm_out : &Backend::addmm_out;
    check_torch(shim(out.get(), self.get(), a.get(), b.get()), kOp);
    return out;
  }
  static Tensor addmm(const Tensor& self, const Tensor& a, const Tensor& b) {
    return add_product<2>(self, a, b, Tensor());
  }
  static Tensor addmm_out(const Tensor& self, const Tensor& a, const Tensor& b, Tensor out) {
    return add_product<2>(self, a, b, out);
  }
  static Tensor baddbmm(const Tensor& self, const Tensor& a, const Tensor& b) {
    return add_product<3>(self, a, b, Tensor());
  }
  static Tensor baddbmm_out(const Tensor& self, const Tensor& a, const Tensor& b, Tensor out) {
    return add_product<3>(self, a, b, out);
  }

  inline static NativeProduct native_mm_ = nullptr, native_bmm_ = nullptr;
  inline static NativeProductOut native_mm_out_ = nullptr, native_bmm_out_ = nullptr;
};

}  // namespace my_ops::fast_fp32

// The functions that Python calls, for one backend. A module has one backend.
#define MY_OPS_FAST_FP32_EXPORT extern "C" __attribute__((visibility("default")))
#define MY_OPS_FAST_FP32(Backend)                                                     \
  MY_OPS_FAST_FP32_EXPORT int64_t my_ops_fast_fp32_start(int native) {                \
    my_ops::fast_fp32::Kernels<Backend>::start(native);                               \
    return my_ops::cuda::kTensorCoresMinWork;                                         \
  }                                                                                   \
  MY_OPS_FAST_FP32_EXPORT int my_ops_fast_fp32_override(const char* op) {             \
    return my_ops::fast_fp32::Kernels<Backend>::override_op(op);                      \
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
