#!/bin/sh
# Build the image kvferry:TARGET: docker/build.sh cpu|cuda [OPTION...]
#
# Docker builds it if its daemon answers, otherwise Buildah, which needs no daemon. Buildah runs as root, without
# namespaces, so that it also works inside a container. If the registry of the base image cannot be reached, mmdebstrap
# makes a base from Debian's packages, with Debian's Python.
set -eu
cd "$(dirname "$0")/.."
target=$1
shift
if docker info >/dev/null 2>&1; then
    exec docker build -f docker/Dockerfile --target "$target" -t "kvferry:$target" "$@" .
fi
if ! command -v buildah >/dev/null; then
    echo "cannot build kvferry:$target: neither Docker's daemon nor Buildah is here; start the daemon, or run" \
        "apt-get install --no-install-recommends buildah mmdebstrap" >&2
    exit 1
fi
export STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}" BUILDAH_ISOLATION=chroot

# An empty string if the base in the Dockerfile can be used.
base=
if ! buildah pull --quiet "$(sed -n 's/^ARG PYTHON_IMAGE=//p' docker/Dockerfile)" >/dev/null 2>&1; then
    base=localhost/kvferry-base
    if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
        echo "the registry of the base image cannot be reached: making $base from Debian's packages" >&2
        mkdir -p build
        mmdebstrap --variant=minbase --include=ca-certificates,openssl,python-is-python3,python3-dev,python3-venv \
            "${DEBIAN_SUITE:-bookworm}" build/base.tar
        container=$(buildah from scratch)
        buildah add --quiet "$container" build/base.tar / >/dev/null
        buildah commit --quiet --rm "$container" "$base" >/dev/null
        rm build/base.tar
    fi
fi
# Without layers, because vfs copies all files for each.
exec buildah build -f docker/Dockerfile --ignorefile docker/Dockerfile.dockerignore --target "$target" \
    -t "kvferry:$target" --layers=false ${base:+--build-arg "PYTHON_IMAGE=$base"} "$@" .
