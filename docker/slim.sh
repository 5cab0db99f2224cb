#!/bin/sh
# Removes from the active virtual environment what only a compiler or PyTorch's own tests need. Triton is among it: each of
# its kernels starts through a launcher that it has to compile. Two libraries of CUDA go too, to which no other refers.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
find "$packages" -name '*.dist-info' -prune -o -type d -name include -prune -exec rm -r {} +
find "$packages" -type f \( -name '*.a' -o -name '*.bc' \) -delete
find "$packages" -type f \( -name 'libcusolverMg.so*' -o -name 'libnvrtc*.alt.so*' \) -delete
rm -rf "$packages/triton" "$packages/torch/test"
find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
