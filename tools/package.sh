# What others install: portable programs, the container image, the Debian package, the wheel.
source tools/build.sh

readonly WHEEL_ENV=build/python-wheel

# Programs for machines without build tools, used there with RAPT_BIN.
dev_portable() {
  need_cudnn
  build_preset portable rapt-server rapt-load gpu_probe attention_gpu_test
  commit >build/portable/bin/commit
  tests/gpu/portable_test build/portable/bin
}

# Requires Debian's docker.io and debootstrap; starts a Docker engine if none is running.
dev_docker_test() {
  local target=${1:-cpu}
  need_python "$PYTHON_ENV" tests/conformance/requirements.txt
  need_commands docker:docker.io dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap
  tests/deploy/base_image build/docker
  say "building the image"
  docker build --quiet --network=host --target "$target" --tag rapt:test --build-arg VERSION="$(version)" \
    --build-arg REVISION="$(git rev-parse HEAD)" . >&2
  say "the image has $(docker image inspect --format '{{.Size}}' rapt:test) bytes"
  RAPT_IMAGE=rapt:test run_pytest "$PYTHON_ENV" tests/deploy/{docker,compose}_test.py
}

dev_package() {
  case ${1:-deb} in
    deb) package_deb ;;
    python) package_python ;;
    *) die "package takes python or nothing, not '$1'" ;;
  esac
}

package_python() {
  need_python "$WHEEL_ENV" client/python/requirements-wheel.txt
  local work=$PWD/build/python-package
  rm -rf "$work"/{unrepaired,*.whl}
  say "building the wheel"
  PATH=$PWD/$WHEEL_ENV/bin:$PATH pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings=build-dir="$PWD/build/wheel" --wheel-dir "$work/unrepaired" client/python >&2
  PATH=$PWD/$WHEEL_ENV/bin:$PATH auditwheel repair --plat manylinux_2_34_x86_64 --wheel-dir "$work" \
    "$work"/unrepaired/*.whl >&2
  python3 -B tests/client/python/wheel_test.py "$work"/*.whl "$work/test"
}

package_deb() {
  build_preset release rapt-server rapt rapt-load
  need_commands debootstrap:debootstrap
  (cd build/release && cpack) >&2
  tests/deploy/package_test "build/release/rapt-server_$(version)_amd64.deb" build/package
}
