#!/usr/bin/env bash
# Everything that needs a GPU, in one go: make gpu-check [WHEEL=dist/....whl]
#
#   1. installs WHEEL, or builds one here if none is given; nothing is downloaded
#   2. the whole test suite, from outside the source tree
#   3. compute-sanitizer's four tools over calls of every kernel family, into
#      benchmarks/results/sanitizer-<gpu>.json
#   4. the programs of examples/
#   5. the benchmarks, into benchmarks/results/<gpu>.json
#
# STEPS="test sanitizer examples bench" picks some of them; RESULTS names another folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
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
gpu=$(python3 -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
for step in $steps; do
  case $step in
    test)
      "${pytest[@]}" --durations=5 ;;
    sanitizer)
      python3 "$root/tools/testing/sanitize.py" --output "$results/sanitizer-$gpu.json" ;;
    examples)
      python3 -m pytest "$root/examples" "${options[@]}" ;;
    bench)
      python3 "$root/benchmarks/bench.py" --output "$results/$gpu.json" ;;
    *) echo "gpu-check: no step $step" >&2; exit 2 ;;
  esac
done
