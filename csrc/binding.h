// What every binding needs: checks, typed pointers, dtype dispatch, calls of ATen.
//
// A binding function checks, makes contiguous, allocates and launches, in this order. Checks throw
// before any work, with a message that names op, argument, rule and value; torch turns it into a
// RuntimeError.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static_assert(TORCH_FEATURE_VERSION == TORCH_VERSION_2_10_0,
              "one wheel serves torch >= 2.10: build with TORCH_TARGET_VERSION=0x020a000000000000 "
              "and headers of torch >= 2.10");

namespace my_ops {

// A string argument of an op. The conversion to std::string in torch's headers before 2.14 leaks.
struct Name : std::string {
  Name(const char* data, size_t size) : std::string(data, size) {}
};

}  // namespace my_ops

template <>
struct torch::stable::detail::ToImpl<my_ops::Name> {
  static my_ops::Name call(StableIValue value, uint64_t, bool) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    const bool read = torch_string_length(handle, &length) == TORCH_SUCCESS &&
                      torch_string_c_str(handle, &data) == TORCH_SUCCESS;
    my_ops::Name name(read ? data : "", read ? length : 0);
    torch_delete_string(handle);
    return name;
  }
};

namespace my_ops {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

// ---------------------------------------------------------------------------------------- checks

template <typename... Parts>
void check(bool rule, const Parts&... parts) {
  if (rule) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// libtorch's C interface returns an error as a status. The text is available since 2.13, with a
// function that older releases lack; the class of the exception is lost.
inline void check_torch(int32_t status, const char* call) {
  if (status == TORCH_SUCCESS) return;
  using Text = const char* (*)();
  const auto text =
      reinterpret_cast<Text>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  check(false, "my_ops: ", call, " failed", text ? ": " : "", text ? text() : "");
}

// What messages show of a tensor. The text is made only for an error: it would take longer than the
// checks.
struct ShownSizes {
  IntHeaderOnlyArrayRef sizes;
};
// "(2, 3)", the way torch prints a size.
inline std::ostream& operator<<(std::ostream& text, const ShownSizes& shown) {
  text << '(';
  for (size_t d = 0; d < shown.sizes.size(); ++d) text << (d ? ", " : "") << shown.sizes[d];
  return text << (shown.sizes.size() == 1 ? ",)" : ")");
}
inline ShownSizes show(IntHeaderOnlyArrayRef sizes) { return {sizes}; }
inline ShownSizes show(const Tensor& t) { return {t.sizes()}; }

// "float32", the way Python names a dtype.
inline std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:  // "BFloat16", "Float8_e5m2": the same in lower case
      std::string name = torch::headeronly::toString(dtype);
      for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      return name;
  }
}

struct ShownDtype {
  ScalarType dtype;
};
inline std::ostream& operator<<(std::ostream& text, const ShownDtype& shown) {
  return text << name_of(shown.dtype);
}
inline ShownDtype show(ScalarType dtype) { return {dtype}; }

inline Sizes sizes_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

inline Sizes strides_of(const Tensor& t) { return {t.strides().begin(), t.strides().end()}; }

struct ShownDevice {
  const Tensor& t;
};
// "cuda:0", the way torch prints a device.
inline std::ostream& operator<<(std::ostream& text, const ShownDevice& shown) {
  return shown.t.is_cuda() ? text << "cuda:" << shown.t.get_device_index() : text << "cpu";
}
inline ShownDevice device_of(const Tensor& t) { return {t}; }

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

// The bytes of a tensor's storage, and how many of them it needs. Programs may free or shorten a
// storage that tensors still use: untyped_storage().resize_(0).
struct StorageBytes {
  int64_t given, needed;
  bool suffices() const { return needed <= given; }
};
inline StorageBytes storage_bytes(const Tensor& t) {
  int64_t given = 0, offset = 0, dims = 0, *sizes = nullptr, *strides = nullptr;
  check_torch(aoti_torch_get_storage_size(t.get(), &given), "storage size");
  check_torch(aoti_torch_get_storage_offset(t.get(), &offset), "storage offset");
  check_torch(aoti_torch_get_dim(t.get(), &dims), "dim");
  check_torch(aoti_torch_get_sizes(t.get(), &sizes), "sizes");
  check_torch(aoti_torch_get_strides(t.get(), &strides), "strides");
  int64_t last = offset;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] == 0) return {given, 0};
    last += (sizes[d] - 1) * strides[d];
  }
  return {given, (last + 1) * static_cast<int64_t>(t.element_size())};
}

// Every tensor that an op takes. Python may give None for any of them.
inline void check_given(const Tensor& t, const char* op, const char* name) {
  check(t.defined(), op, ": ", name, " must be a tensor, got None");
  const StorageBytes bytes = storage_bytes(t);
  check(bytes.suffices(), op, ": ", name, " must have a storage that holds its ", bytes.needed,
        " bytes, got one of ", bytes.given);
}

inline void check_floating(const Tensor& t, const char* op, const char* name) {
  check_given(t, op, name);
  check(is_floating(t.scalar_type()), op, ": ", name,
        " must be of dtype float64, float32, float16 or bfloat16, got ", show(t.scalar_type()));
}

inline void check_same_device(const Tensor& t, const char* name, const Tensor& other,
                              const char* other_name, const char* op) {
  check_given(t, op, name);
  check(t.is_cuda() == other.is_cuda() && t.get_device_index() == other.get_device_index(), op,
        ": ", name, " must be on the device of ", other_name, ", got ", device_of(t), " and ",
        device_of(other));
}

inline void check_same_dtype(const Tensor& t, const char* name, const Tensor& other,
                             const char* other_name, const char* op) {
  check(t.scalar_type() == other.scalar_type(), op, ": ", name, " must have the dtype of ",
        other_name, ", got ", show(t.scalar_type()), " and ", show(other.scalar_type()));
}

inline void check_same_shape(const Tensor& t, const char* name, const Tensor& other,
                             const char* other_name, const char* op) {
  check(std::ranges::equal(t.sizes(), other.sizes()), op, ": ", name, " must have the shape of ",
        other_name, ", got ", show(t), " and ", show(other));
}

template <typename Rule>
void check_shape(const Tensor& t, const char* name, IntHeaderOnlyArrayRef want, const Rule& rule,
                 const char* op) {
  check(std::ranges::equal(t.sizes(), want), op, ": ", name, " must be ", rule, " = ", show(want),
        ", got ", show(t));
}

// For a tensor that an op writes.
inline void check_one_address_each(const Tensor& t, const char* name, const char* op) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;  // elements spanned by the dimensions with smaller strides
  for (const auto& [stride, size] : dims) {
    check(stride >= reach || t.numel() == 0, op, ": ", name,
          " must not hold two elements at one address, got strides ", show(t.strides()),
          " for shape ", show(t));
    reach = (size - 1) * stride + reach;
  }
}

// -------------------------------------------------------------------------------- dtype dispatch

// Calls f.operator()<T>() with the storage type. Types names the backend's two 16-bit types.
template <typename Types, typename F>
void dispatch_floating(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f.template operator()<float>();
    case ScalarType::Double:
      return f.template operator()<double>();
    case ScalarType::Half:
      return f.template operator()<typename Types::Half>();
    case ScalarType::BFloat16:
      return f.template operator()<typename Types::BFloat16>();
    default:
      check(false, "unreachable: dtype ", show(dtype), " was not checked");
  }
}

// As above, with integers too. Two's complement arithmetic does not need the sign.
template <typename Types, typename F>
void dispatch_real(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Byte:
    case ScalarType::Char:
      return f.template operator()<uint8_t>();
    case ScalarType::Short:
    case ScalarType::UInt16:
      return f.template operator()<uint16_t>();
    case ScalarType::Int:
    case ScalarType::UInt32:
      return f.template operator()<uint32_t>();
    case ScalarType::Long:
    case ScalarType::UInt64:
      return f.template operator()<uint64_t>();
    default:
      return dispatch_floating<Types>(dtype, f);
  }
}

// ------------------------------------------------------------------------------ calls of libtorch

// Calls the ATen op "aten::name" with all of its arguments, and returns its first result.
template <typename... Args>
Tensor aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  check_torch(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct SizeTypes {  // for dispatch_real, where only sizes matter
  using Half = uint16_t;
  using BFloat16 = uint16_t;
};

// Throws libtorch's error about a tensor that it could not make. The words added here let Python
// raise the right class of error: my_ops/_errors.py.
template <typename Device>
[[noreturn]] void fail_allocation(const std::exception& error, IntHeaderOnlyArrayRef sizes,
                                  ScalarType dtype, const Device& device) {
  int64_t bytes = 1;  // for bool, which no kernel computes with
  if (dtype != ScalarType::Bool) {
    dispatch_real<SizeTypes>(dtype, [&]<typename T>() { bytes = sizeof(T); });
  }
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) bytes = std::numeric_limits<int64_t>::max();
  }
  std::ostringstream message;
  message << error.what() << " (" << bytes << " bytes on " << device << ")";
  throw std::runtime_error(message.str());
}

// Calls make(), which makes a tensor of the given sizes on the device of like.
template <typename F>
Tensor allocated(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype, const F& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    fail_allocation(error, sizes, dtype, device_of(like));
  }
}

// --------------------------------------------------------------------------------------- tensors

template <typename T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* out(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}
template <typename T>
const T* in(const std::optional<Tensor>& t) {
  return t ? in<T>(*t) : nullptr;
}
template <typename T>
T* out(const std::optional<Tensor>& t) {
  return t ? out<T>(*t) : nullptr;
}

inline Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    if (sizes[d] > 1) stride *= sizes[d];
  }
  return strides;
}

// A new tensor on the device of like. torch::stable::new_empty takes three times as long: it looks
// up aten::new_empty by name and boxes its arguments.
inline Tensor empty_strided(const Tensor& like, const Sizes& sizes, const Sizes& strides,
                            ScalarType dtype) {
  return allocated(like, sizes, dtype, [&] {
    AtenTensorHandle result = nullptr;
    check_torch(aoti_torch_empty_strided(
                    static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                    torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                    like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
                    like.get_device_index(), &result),
                "empty");
    return Tensor(result);
  });
}
// A new contiguous tensor.
inline Tensor empty(const Tensor& like, const Sizes& sizes, ScalarType dtype) {
  return empty_strided(like, sizes, contiguous_strides(sizes), dtype);
}
inline Tensor empty(const Tensor& like, const Sizes& sizes) {
  return empty(like, sizes, like.scalar_type());
}

inline Tensor zeros(const Tensor& like, const Sizes& sizes, ScalarType dtype) {
  Tensor result = empty(like, sizes, dtype);
  return torch::stable::zero_(result);
}

// A contiguous tensor on the CPU in another dtype; one of the two is float32, the other 16 bits.
Tensor converted_on_cpu(const Tensor& t, ScalarType dtype);

inline bool is_16_bits(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

inline Tensor cast(const Tensor& t, ScalarType dtype) {
  const ScalarType given = t.scalar_type();
  if (given == dtype) return t;
  const bool is_float = given == ScalarType::Float || dtype == ScalarType::Float;
  if (is_float && (is_16_bits(given) || is_16_bits(dtype)) && t.is_cpu() && t.is_contiguous()) {
    return converted_on_cpu(t, dtype);  // aten::to takes microseconds for one element
  }
  return allocated(t, t.sizes(), dtype,
                   [&] { return aten("aten::to", "dtype", t, dtype, false, false, std::nullopt); });
}

// A new contiguous tensor with t's values. (clone and to would keep the strides of empty tensors.)
inline Tensor copy(const Tensor& t, ScalarType dtype) {
  Tensor result = empty(t, sizes_of(t), dtype);
  torch::stable::copy_(result, t);
  return result;
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : copy(t, t.scalar_type());
}
inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& t) {
  return t ? std::optional(as_contiguous(*t)) : std::nullopt;
}

// The type of the arithmetic, and of LLTM's cell state.
inline ScalarType compute_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? dtype : ScalarType::Float;
}

// A view of t's storage; offset is in elements from t's first element.
inline Tensor as_strided(const Tensor& t, const Sizes& sizes, const Sizes& strides,
                         int64_t offset = 0) {
  AtenTensorHandle view = nullptr;
  check_torch(aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(sizes.size()),
                                             sizes.data(), strides.data(), offset, &view),
              "as_strided");
  return Tensor(view);
}

}  // namespace my_ops
