// Loaded before the C library: makes allocation number n of torch's CPU allocator fail. Allocations
// of libraries inside torch do not fail, because oneDNN would write to memory it did not get.
#include <dlfcn.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace {
long left = 0;    // allocations before the one that fails; 0: none does
long failed = 0;  // since fail_at

bool of_torchs_allocator(const void* caller) {
  Dl_info from;
  return dladdr(caller, &from) && from.dli_fname && std::strstr(from.dli_fname, "libc10.so");
}
}  // namespace

extern "C" void fail_at(long n) {
  left = n;
  failed = 0;
}
extern "C" long failures() { return failed; }

extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
  using Function = int (*)(void**, size_t, size_t);
  static const Function real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  if (left > 0 && of_torchs_allocator(__builtin_return_address(0)) && --left == 0) {
    ++failed;
    return ENOMEM;
  }
  return real(memory, alignment, size);
}
