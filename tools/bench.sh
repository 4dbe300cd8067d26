# Benchmarks.
source tools/build.sh

readonly CACHE_BENCH_ENV=build/python-cache-bench

# prepare_bench NAME: builds what a bench needs, and sets the caller's `program` to the command that runs it.
prepare_bench() {
  local name=${1:-}
  program=$(echo "bench/${name}"_bench.*)
  [ -n "$name" ] && [ -f "$program" ] ||
    die "bench takes one of: $(cd bench && printf '%s ' *_bench.* | sed -E 's/_bench\.(cc|py)//g')"
  if [ "$name" = gpu ]; then
    program="${RAPT_BENCH_PYTHON:-python3} -B $program --bin=$(gpu_programs gpu_bench)"
    return
  fi
  configure release -DRAPT_BUILD_BENCH=ON
  build_preset release "${name}_bench"
  case $program in
    *callers_bench.py)
      program="python3 -B $program"
      ;;
    *cache_bench.py)
      need_python "$CACHE_BENCH_ENV" bench/peers/requirements-cache.txt
      program="$CACHE_BENCH_ENV/bin/python $program"
      ;;
    *.py)
      export PYTHONPATH=$PWD/client/python RAPT_LIBRARY=$PWD/build/release/lib/librapt_attention.so
      need_python "$TORCH_ENV" tests/conformance/requirements-torch.txt
      [ "$name" != service ] || need_python "$PYTRITON_ENV" bench/peers/requirements-pytriton.txt
      program="$TORCH_ENV/bin/python $program"
      ;;
    *)
      need_python "$PYTHON_ENV" tests/conformance/requirements.txt
      export RAPT_BENCH_PYTHON=$PYTHON_ENV/bin/python
      program=build/release/bin/${name}_bench
      ;;
  esac
}

# bench NAME [argument...]: prints the results and replaces NAME's section of bench/RESULTS.md, with machine and commit.
# With arguments that select a part of the cases it only prints.
dev_bench() {
  local name=${1:-} program results argument
  if [ "$name" = check ]; then
    shift
    check_bench "$@"
    return
  fi
  prepare_bench "$name"
  shift
  for argument in "$@"; do
    [[ $argument == --json=* ]] || { $program "$@"; return; }
  done
  results=build/$name.md
  {
    printf '<!-- %s -->\n## %s\n\nCommit %s, %s, %s, %s cores.\n\n' "$name" "$name" \
      "$(commit)" "$(date --utc +%F)" \
      "$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs)" "$CORES"
    $program "$@"
    printf '<!-- end of %s -->\n' "$name"
  } | tee "$results"
  sed -i "/^<!-- $name -->$/,/^<!-- end of $name -->$/d" bench/RESULTS.md
  cat "$results" >>bench/RESULTS.md
}

# Runs a bench and compares its ratios with the recorded ones.
check_bench() {
  local name=${1:-} program measured whole=(--whole)
  prepare_bench "$name"
  shift
  [ $# = 0 ] || whole=()
  measured=build/$name-check.md
  $program "$@" | tee "$measured"
  python3 -B bench/check.py "$name" bench/RESULTS.md "$measured" "${whole[@]}"
}
