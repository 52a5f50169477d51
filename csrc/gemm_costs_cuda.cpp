// The GPU whose costs `python -m my_ops tune` measures.
#include <cstring>

#include "gemm_costs.h"

MY_OPS_EXPLAIN my_ops_gemm_costs_gpu(my_ops::AskedDevice* gpu, char* name, int64_t size,
                                     int* clock_khz) {
  using namespace my_ops;
  cuda::DeviceFacts facts;
  if (auto err = cuda::current_device(&facts); err != cudaSuccess) return err;
  *gpu = {facts.major,    facts.minor, facts.sm_count,   facts.shared_bytes,
          facts.l2_bytes, facts.code,  facts.hopper_code};
  char whole[256];
  if (auto err = cuda::current_name(whole, clock_khz); err != cudaSuccess) return err;
  give_answer(whole, name, size);
  return cudaSuccess;
}
