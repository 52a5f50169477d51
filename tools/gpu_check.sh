#!/usr/bin/env bash
# Everything that needs a GPU, in one go: make gpu-check [WHEEL=dist/....whl]
#
#   1. installs WHEEL, or builds one here if none is given; nothing is downloaded
#   2. the whole test suite, from outside the source tree
#   3. compute-sanitizer's memcheck, racecheck and synccheck, over small tests of every kernel family
#   4. the programs of examples/
#   5. the benchmarks, into benchmarks/results/<gpu>.json
#
# STEPS="test sanitizer examples bench" picks some of them; RESULTS names another folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
steps=${STEPS:-test sanitizer examples bench}
results=${RESULTS:-$root/benchmarks/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  { echo "gpu-check: torch sees no GPU here" >&2; exit 1; }

wheel=${WHEEL:-}
if [ -z "$wheel" ]; then
  (cd "$root" && python3 -m pip wheel -q --no-build-isolation --no-deps -w "$work" .)
  wheel=$(ls "$work"/*.whl)
fi
echo "gpu-check: $(basename "$wheel"), $(python3 -c 'import platform, torch
print("Python", platform.python_version(), "torch", torch.__version__, torch.cuda.get_device_name())')"
python3 -m pip install -q --no-index --no-deps --target "$work/site" "$wheel"
export PYTHONPATH=$work/site
cd "$work"

options=(-c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -q)
pytest=(python3 -m pytest "$root/tests" "${options[@]}")
for step in $steps; do
  case $step in
    test)
      "${pytest[@]}" --durations=5 ;;
    sanitizer)
      small='test_unary_values and 1000 and float32 or test_gemm_values and 257 and float32'
      small+=' or test_gemm_float32_layouts and False-False'
      small+=' or test_sequence_values and 7 and (float32 or bfloat16)'
      small+=' or test_every_variant and (49 or 129 or 516) and (float32 or bfloat16)'
      small+=' or test_inference_of_many_rows'
      small+=' or test_gemm_half_layouts and 513 and bfloat16'
      small+=' or test_linear_half_epilogues and bfloat16 and silu and (320 or 808)'
      small+=' or test_linear_half_epilogue_warps and bfloat16'
      small+=' or test_linear_float32_epilogues and silu and 643'
      small+=' or test_gemm_float32_few_rows_layouts and False-False and (2563 or 4099)'
      small+=' or test_linear_of_small_outputs_of_extreme_range and 300 and NN'
      small+=' or test_gemm_small_layouts and contiguous-transposed and (161 or 13)'
      small+=' or test_gemm_fp32_sm80 and normal-257'
      small+=' or test_highest_of_other_operands'
      small+=' or test_ragged_in_every_type and (float32 or bfloat16)'
      small+=' or test_gemm_float32_high_repeats_bit_for_bit'
      # Too slow for racecheck. Without k = 2048, for which cuBLAS's bf16 product hangs under synccheck.
      large='test_linear_half_epilogues and bfloat16 and silu and not 2048'
      for tool in memcheck racecheck synccheck; do
        if [ "$tool" = racecheck ]; then chosen=$small; else chosen="$small or $large"; fi
        # racecheck reports cuBLAS's own kernels, because it does not see how they wait for TMA, and
        # crashes in some of them: in products of 16 bits whose rows are whole 16-byte vectors.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
          --kernel-name-exclude kernel_substring=nvjet --target-processes all \
          "${pytest[@]}" -x -k "cuda and ($chosen)"
      done ;;
    examples)
      python3 -m pytest "$root/examples" "${options[@]}" ;;
    bench)
      gpu=$(python3 -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
      python3 "$root/benchmarks/bench.py" --output "$results/$gpu.json" ;;
    *) echo "gpu-check: no step $step" >&2; exit 2 ;;
  esac
done
