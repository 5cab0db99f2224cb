#!/bin/sh
# Removes from the active virtual environment what PyTorch brings for its own tests and for compiling against it.
set -eu
torch=$(python -c 'import importlib.util; print(*importlib.util.find_spec("torch").submodule_search_locations)')
rm -r "$torch/include" "$torch/test"
find "$torch/bin" -type f ! -name torch_shm_manager -delete
