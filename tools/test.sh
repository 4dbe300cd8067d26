# Tests and what searches for faults.
source tools/build.sh
source tools/peers.sh

run_tests() {
  local preset=$1
  shift
  # Four slots a core, as tests/CMakeLists.txt expects.
  ctest --test-dir "build/$preset" --parallel $((4 * CORES)) --output-on-failure --no-tests=error "$@"
}

dev_test() {
  local selection=()
  case ${1:-} in
    clients | torch)
      "test_$1"
      return
      ;;
    '') ;;
    --list) selection=(--show-only) ;;
    *) selection=(--tests-regex "$1") ;;
  esac
  case $#:${2:-} in
    [01]:) ;;
    3:--case) export GTEST_FILTER=$3 ;;
    *) die "test takes a regex, then --case FILTER or nothing, not '${*:2}'" ;;
  esac
  need_conformance_tools
  need_helm
  build_preset release
  run_tests release "${selection[@]}"
}

test_clients() {
  build_preset release rapt-server
  need_conformance_tools
  need_node_client
  need_java_client
  need_python "$PYTRITON_ENV" bench/peers/requirements-pytriton.txt
  RAPT_CLIENTS="grpcio aio go node java" RAPT_PATIENT=1 RAPT_TOOLS=$PWD/build/tools \
    RAPT_PYTRITON_ENV=$PWD/$PYTRITON_ENV RAPT_KSERVE_ENV=$PWD/$KSERVE_ENV RAPT_SERVER=build/release/bin/rapt-server \
    run_pytest "$PYTHON_ENV" -v tests/conformance/{clients_test,losses_test,triton_cases}.py
}

test_torch() {
  build_preset release rapt-server rapt_attention_shared
  need_python "$TORCH_ENV" tests/conformance/requirements-torch.txt
  PYTHONPATH=client/python:tests/conformance RAPT_LIBRARY=$PWD/build/release/lib/librapt_attention.so \
    RAPT_SERVER=build/release/bin/rapt-server run_pytest "$TORCH_ENV" \
    tests/client/python/{capture,torch,torch_flex}_cases.py tests/conformance/torch_remote_cases.py
  need_python "$TRANSFORMERS_4_ENV" tests/conformance/requirements-transformers-4.txt --no-deps
  local first  # in the path: transformers 5 is that of the environment
  for first in "" "$(echo "$TRANSFORMERS_4_ENV"/lib/python3*/site-packages):"; do
    PYTHONPATH=${first}client/python:tests/conformance RAPT_LIBRARY=$PWD/build/release/lib/librapt_attention.so \
      run_pytest "$TORCH_ENV" tests/conformance/transformers_cases.py
  done
  RAPT_SERVER=build/release/bin/rapt-server run_pytest "$TORCH_ENV" tests/conformance/torch{,_layer,_model}_cases.py
}

# The cluster's programs run in namespaces that end with the test; control groups are left and removed.
dev_cluster_test() {
  [ "$(id -u)" = 0 ] || die "cluster-test mounts, creates a network and starts containers: run it as root"
  need_kubernetes
  need_python "$PYTHON_ENV" tests/conformance/requirements.txt
  need_helm
  need_commands containerd:containerd runc:runc iptables:iptables
  [ -x /usr/lib/cni/bridge ] || install_packages containernetworking-plugins
  local bin=${RAPT_BIN:-} status=0
  if [ -z "$bin" ]; then
    build_preset release rapt-server rapt rapt-load retrying_load
    bin=$PWD/build/release/bin
  fi
  RAPT_BIN=$bin RAPT_HELM=$PWD/build/tools/helm RAPT_CLUSTER_TOOLS=$PWD/build/tools/kubernetes \
    RAPT_CLUSTER_FOLDER=$PWD/build/cluster unshare --mount --net --pid --fork --mount-proc --kill-child \
    bash -c '"$@"; exit $?' bash "$PYTHON_ENV/bin/python" -m pytest -p no:cacheprovider --tb=short -v \
    tests/cluster "$@" || status=$?
  find /sys/fs/cgroup -depth -type d -path '*/rapt-cluster*' -exec rmdir {} + 2>/dev/null || true
  return "$status"
}

dev_gpu_test() {
  local bin libraries properties=build/device-properties.json
  bin=$(gpu_programs attention_gpu_test)
  libraries=$(python3 -B bench/gpu/libraries.py)
  export RAPT_CUDNN_LIBRARIES=$libraries
  mkdir -p build
  RAPT_DEVICE_PROPERTIES=$properties "$bin/attention_gpu_test"
  say "cuDNN's description of this GPU is in $properties"
  grep -Eq '"deviceVer": ?900' "$properties" || return 0
  say "repeating with kernels compiled for a described device"
  RAPT_DESCRIBED_DEVICE=tests/attention/cudnn/sm90.json "$bin/attention_gpu_test"
}

dev_mutate() {
  need_packages
  need_python "$PYTHON_ENV" tests/conformance/requirements.txt
  tests/mutants/mutate.py "$@"
}

# Requires an idle machine.
dev_soak() {
  build_preset release rapt-server soak chaos_test
  build/release/bin/soak "$@"
  RAPT_CHAOS_SECONDS=60 build/release/bin/chaos_test --gtest_brief=1
}

# fuzz [seconds]: findings go to build/fuzz; the corpus in the repository is not changed.
dev_fuzz() {
  local programs program target seconds
  mapfile -t programs < <(basename --suffix .cc tests/fuzz/*_fuzz.cc)
  seconds=$((${1:-60} / ${#programs[@]}))
  build_preset fuzz "${programs[@]}"
  for program in "${programs[@]}"; do
    target=${program%_fuzz}
    say "fuzzing $target"
    mkdir -p "build/fuzz/corpus/$target"
    "build/fuzz/bin/$program" -max_total_time=$((seconds > 0 ? seconds : 1)) \
      -max_len=4096 -timeout=10 -print_final_stats=1 -artifact_prefix="build/fuzz/$target-" \
      "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target"
  done
}

dev_sanitize() {
  case ${1:-all} in
    all)
      dev_sanitize asan
      dev_sanitize tsan
      dev_sanitize thread-safety
      ;;
    asan | quick)
      build_preset asan
      local excluded=conformance
      [ "$1" = asan ] || excluded+='|exhaustive'
      UBSAN_OPTIONS=print_stacktrace=1 run_tests asan --label-exclude "$excluded"
      ;;
    tsan)
      build_preset tsan
      TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp ignore_noninstrumented_modules=1 second_deadlock_stack=1" \
        run_tests tsan --label-exclude conformance
      ;;
    thread-safety)
      build_preset clang-thread-safety
      echo "thread-safety: clean"
      ;;
    *) die "unknown sanitizer '$1'; use asan, quick, tsan or thread-safety" ;;
  esac
}
