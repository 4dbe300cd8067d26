# shellcheck disable=SC2034  # other scripts use these folders
# What commands need on this machine: Debian's packages, Python environments and Go programs, installed when missing.

readonly PYTHON_ENV=build/python  # tests/conformance/CMakeLists.txt expects it here
readonly TORCH_ENV=build/python-torch
readonly TRANSFORMERS_4_ENV=build/python-transformers-4  # packages before those of TORCH_ENV
readonly PYTRITON_ENV=build/python-pytriton
readonly CUDNN_ENV=build/cudnn    # FindCUDNNFrontend.cmake expects it here

need_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian machine: install the equivalents of deploy/debian-packages.txt"
    return
  fi
  local package wanted missing=()
  mapfile -t wanted < <(grep -v '^#' deploy/debian-packages.txt)
  for package in "${wanted[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  command -v go >/dev/null || missing+=(golang-go)
  [ ${#missing[@]} = 0 ] || install_packages "${missing[@]}"
}

install_packages() {
  local root=() log=build/apt.log
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "no sudo here; as root, run: apt-get install $*"
    root=(sudo)
  fi
  say "installing $*"
  mkdir -p build
  { "${root[@]}" apt-get update -qq && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "$@"; } </dev/null >"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; die "installing packages failed; see $log"; }
}

# need_commands COMMAND:PACKAGE...: installs packages that only some tasks need.
need_commands() {
  local wanted
  for wanted in "$@"; do
    command -v "${wanted%:*}" >/dev/null || install_packages "${wanted#*:}"
  done
}

# need_python DIRECTORY REQUIREMENTS [flag of pip...]: creates a Python environment with these packages.
need_python() {
  local environment=$1 requirements=$2 stamp
  shift 2
  stamp=$environment/.made-from-$(sha256sum <"$requirements" | cut -c1-16)
  [ ! -e "$stamp" ] || return 0
  need_packages
  say "creating $environment from $requirements"
  rm -rf "$environment"
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet "$@" -r "$requirements"
  touch "$stamp"
}

# Removes cuDNN's precompiled kernels, which attention does not use. With them, cuDNN aborts the process if cuBLAS is
# missing.
need_cudnn() {
  need_python "$CUDNN_ENV" deploy/cudnn-requirements.txt --no-deps
  rm -f "$CUDNN_ENV"/lib/python3*/site-packages/nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9
}

# need_go_tool NAME MODULE VERSION: builds build/tools/NAME.
need_go_tool() {
  local name=$1 module=$2 version=$3
  local tools=$PWD/build/tools/$name-$version
  if [ ! -x "$tools/$name" ]; then
    need_packages
    say "building $name $version"
    GOBIN=$tools go install "$module@$version"
  fi
  ln -sfn "$name-$version/$name" "build/tools/$name"
}
