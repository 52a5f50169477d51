// An allocator for torch.cuda.memory.CUDAPluggableAllocator that throws at allocation number n.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace {
long left = 0;    // allocations before the one that fails; 0: none does
long failed = 0;  // since fail_at
std::atomic<long> count;

template <typename... Args>
void driver(const char* name, Args... args) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto call = reinterpret_cast<int (*)(Args...)>(dlsym(library, name));
  if (call(args...) != 0) throw std::runtime_error(name);
}

// Makes the first caller's context current: the thread of backward may have none yet.
void set_context() {
  static void* const context = [] {
    void* current = nullptr;
    driver("cuCtxGetCurrent", &current);
    return current;
  }();
  driver("cuCtxSetCurrent", context);
}
}  // namespace

extern "C" void fail_at(long n) {
  left = n;
  failed = 0;
}
extern "C" long failures() { return failed; }
extern "C" long live() { return count; }

extern "C" void* allocate(size_t size, int /*device*/, void* /*stream*/) {
  if (left > 0 && --left == 0) {
    ++failed;
    throw std::runtime_error("CUDA out of memory, on purpose");
  }
  set_context();
  uint64_t address = 0;
  if (size > 0) {
    driver("cuMemAlloc_v2", &address, size);
    ++count;
  }
  return reinterpret_cast<void*>(address);
}

extern "C" void release(void* memory, size_t /*size*/, int /*device*/, void* /*stream*/) {
  set_context();
  if (!memory) return;
  driver("cuMemFree_v2", reinterpret_cast<uint64_t>(memory));
  --count;
}
