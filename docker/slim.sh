#!/bin/sh
# Remove from the active virtual environment what only a compiler or PyTorch's own tests need. That includes Triton, which
# has to compile a launcher for each of its kernels, and two libraries of CUDA that no other library uses.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
find "$packages" -name '*.dist-info' -prune -o -type d -name include -prune -exec rm -r {} +
find "$packages" -type f \( -name '*.a' -o -name '*.bc' \) -delete
find "$packages" -type f \( -name 'libcusolverMg.so*' -o -name 'libnvrtc*.alt.so*' \) -delete
rm -rf "$packages/triton" "$packages/torch/test"
find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
