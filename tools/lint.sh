# Checks of the sources.
source tools/build.sh

our_sources() { git ls-files --cached --others --exclude-standard -- "$@"; }

dev_lint() {
  need_cudnn
  configure clang-thread-safety -DRAPT_CUDNN=ON -DRAPT_BUILD_BENCH=ON
  build_preset clang-thread-safety
  our_sources 'attention/*.cc' 'base/*.cc' 'server/*.cc' 'client/*.cc' 'bench/*.cc' |
    xargs --no-run-if-empty -P "$CORES" -n 1 clang-tidy-14 -p build/clang-thread-safety --quiet
  echo "lint: clean"
}

dev_format() {
  need_packages
  local how=(-i)
  case ${1:-} in
    '') ;;
    --check) how=(--dry-run -Werror) ;;
    *) die "format takes --check or nothing, not '$1'" ;;
  esac
  our_sources '*.h' '*.cc' '*.inc' | xargs clang-format-14 "${how[@]}"
  echo "format: clean"
}
