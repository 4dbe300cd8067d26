# Builds what users run and link. The other scripts build with these functions, too.
source tools/prerequisites.sh

# configure PRESET [setting...]
configure() {
  need_packages
  cmake --preset "$@" >&2
}

# build_preset PRESET [target...]
build_preset() {
  local preset=$1
  shift
  need_packages
  [ -f "build/$preset/build.ninja" ] || cmake --preset "$preset" >&2
  cmake --build "build/$preset" --parallel "$CORES" ${1:+--target "$@"} >&2
}

# What users run and link; the tests are built by `./dev test`.
dev_build() {
  case ${1:-} in
    '') ;;
    --cudnn)
      need_cudnn
      configure release -DRAPT_CUDNN=ON
      ;;
    *) die "build takes --cudnn or nothing, not '$1'" ;;
  esac
  build_preset release rapt-server rapt rapt-load rapt_attention_shared
}

# Stops the server with SIGTERM at the end and checks that it exits cleanly.
dev_run() {
  build_preset release rapt-server rapt
  mkdir -p build/run
  local ready server status=0
  exec {ready}< <(exec build/release/bin/rapt-server --grpc_address=127.0.0.1:0 \
    --metrics_address=127.0.0.1:0 --http_address=127.0.0.1:0 2>build/run/server.log)
  server=$!
  # shellcheck disable=SC2064  # expand the process id now
  trap "kill $server 2>/dev/null" EXIT
  local line
  read -r line <&"$ready" || { cat build/run/server.log >&2; die "rapt-server did not start"; }
  echo "$line"
  [[ $line =~ grpc=([^ ]+) ]] || die "the ready line of rapt-server has no grpc= address"
  build/release/bin/rapt demo --address="${BASH_REMATCH[1]}"
  trap - EXIT
  kill -TERM "$server"
  wait "$server" || status=$?
  [ "$status" = 0 ] || { cat build/run/server.log >&2; die "rapt-server exited with status $status"; }
  echo "rapt-server stopped cleanly"
}

# run_pytest ENVIRONMENT [argument...]
run_pytest() { "$1/bin/python" -m pytest -p no:cacheprovider "${@:2}"; }

# gpu_programs TARGET: prints the directory of the programs, RAPT_BIN or the built ones.
gpu_programs() {
  if [ -n "${RAPT_BIN:-}" ]; then
    echo "$RAPT_BIN"
    return
  fi
  need_cudnn
  configure release -DRAPT_CUDNN=ON -DRAPT_BUILD_BENCH=ON
  build_preset release "$1"
  echo build/release/bin
}

# Also works outside a repository, with prebuilt programs.
commit() { git describe --always --dirty --exclude '*' 2>/dev/null || cat "${RAPT_BIN:-}/commit"; }

version() { sed -n 's/^project(rapt VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt; }
