// Loaded before the C library: makes allocation number n of torch's CPU allocator fail. Allocations
// of libraries inside torch do not fail, because oneDNN would write to memory it did not get.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {
long left = 0;    // allocations before the one that fails; 0: none does
long failed = 0;  // since fail_at

// What torch's allocator holds. A table of its own, because free() may not allocate.
constexpr size_t kSlots = size_t{1} << 20;
void* const kFreed = reinterpret_cast<void*>(1);
void* held[kSlots];
long count = 0;
std::atomic_flag busy;

struct Lock {
  Lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Lock() { busy.clear(std::memory_order_release); }
};

// The slot of an address, or the first that is free for it.
void** slot_of(void* memory, bool insert) {
  size_t i = reinterpret_cast<uintptr_t>(memory) / 64 % kSlots;
  while (held[i] && held[i] != memory && !(insert && held[i] == kFreed)) i = (i + 1) % kSlots;
  return &held[i];
}

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
extern "C" long live() { return count; }

extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
  using Function = int (*)(void**, size_t, size_t);
  static const Function real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  const bool torchs = of_torchs_allocator(__builtin_return_address(0));
  if (torchs && left > 0 && --left == 0) {
    ++failed;
    return ENOMEM;
  }
  const int error = real(memory, alignment, size);
  if (torchs && error == 0) {
    const Lock lock;
    *slot_of(*memory, true) = *memory;
    ++count;
  }
  return error;
}

extern "C" void __libc_free(void* memory);

extern "C" void free(void* memory) noexcept {
  if (memory) {
    const Lock lock;
    if (void** const slot = slot_of(memory, false); *slot == memory) {
      *slot = kFreed;
      --count;
    }
  }
  __libc_free(memory);
}
