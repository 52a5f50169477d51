// Loaded before torch: its parallel_for, by threads of which ThreadSanitizer sees start and end. It
// does not see those of torch's OpenMP, which is not compiled for it.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*f)(int64_t, int64_t, void*), void* context) {
  constexpr int64_t kThreads = 4;
  const int64_t share = std::max((end - begin + kThreads - 1) / kThreads, grain);
  std::vector<std::thread> threads;
  for (; begin < end; begin += share) {
    threads.emplace_back(f, begin, std::min(begin + share, end), context);
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
