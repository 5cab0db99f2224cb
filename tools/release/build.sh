#!/usr/bin/env bash
# Build and check what a release publishes, in dist/: an sdist, and one manylinux wheel per machine type.
#   tools/release/build.sh                  the wheel for this machine, with its own compiler
#   tools/release/build.sh x86_64 aarch64   wheels for these machine types, in manylinux containers (needs Docker or Podman,
#                                           and QEMU for machine types other than this machine's)
# Beside them come a list of components (CycloneDX) and SHA256SUMS, which SIGNING_KEY, a key of gpg, signs.
# PYTHON (python3) must be 3.11 or later.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=build/release
mkdir -p "$build"
tools="$PWD/$build/tools"
"${PYTHON:-python3}" -m venv "$tools"
export PATH="$tools/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip install --quiet -r requirements/release.txt

rm -rf dist "$build/raw"
if [ $# = 0 ]; then
	python -m build --outdir "$build/raw" .
	mkdir dist
	mv "$build"/raw/*.tar.gz dist/
	auditwheel repair --wheel-dir dist "$build"/raw/*.whl
else
	# From the sdist, because cibuildwheel copies the whole folder that it is given into each container.
	python -m build --sdist --outdir dist .
	archs=$(IFS=,; echo "$*")
	cibuildwheel --platform linux --archs "$archs" --output-dir dist dist/kvferry-*.tar.gz
fi

twine check --strict dist/*
abi3audit --strict --summary dist/*.whl
for wheel in dist/*.whl; do
	auditwheel show "$wheel" | grep -A1 'consistent with'
done

# Into an empty venv, with the dependencies that the index has today.
for wheel in dist/*"_$(uname -m).whl"; do
	rm -rf "$build/empty"
	python -m venv "$build/empty"
	version=${wheel#dist/kvferry-}
	version=${version%%-*}
	# By its name, so that the list of components has no path of this machine; without an index, so that no other package of
	# that name is taken. The second command finds it installed, and installs its dependencies.
	"$build/empty/bin/python" -m pip install --quiet --no-index --no-deps --find-links dist "kvferry==$version"
	"$build/empty/bin/python" -m pip install --quiet "kvferry==$version"
	"$build/empty/bin/python" tools/release/check_install.py
done

# What an installation of it consists of, from the venv above, and what every file is.
cyclonedx-py environment --output-reproducible --of JSON -o "dist/kvferry-$version.cdx.json" "$build/empty/bin/python"
(cd dist && sha256sum -- * > SHA256SUMS)
if [ -n "${SIGNING_KEY:-}" ]; then
	gpg --local-user "$SIGNING_KEY" --armor --detach-sign dist/SHA256SUMS
else
	echo "dist/SHA256SUMS is not signed: set SIGNING_KEY to the key that signs the tag" >&2
fi

if grep -q '^[A-Z][a-z]* = "https://kvferry\.example' pyproject.toml; then
	echo "dist/ is complete but must not be published: [project.urls] in pyproject.toml has no real address; set it" >&2
	exit 1
fi
ls -l dist
