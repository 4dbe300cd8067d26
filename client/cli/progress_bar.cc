#include "client/cli/progress_bar.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/strings/str_format.h"
#include "client/console/text.h"

namespace rapt {
namespace {

constexpr int64_t kCells = 30;
constexpr char kEraseLine[] = "\r\033[K";

}  // namespace

ProgressBar::ProgressBar() : is_shown_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (percent_ >= 0) std::fputs(kEraseLine, stderr);
}

void ProgressBar::Show(int64_t done_bytes, int64_t bytes) {
  const int64_t percent = bytes == 0 ? 100
                                     : static_cast<int64_t>(100 * (static_cast<double>(done_bytes) /
                                                                   static_cast<double>(bytes)));
  if (!is_shown_ || percent == percent_) return;
  percent_ = percent;
  const int64_t cells = percent * kCells / 100;
  const std::string bar = std::string(cells, '#') + std::string(kCells - cells, '.');
  absl::FPrintF(stderr, "\r%s %3d %% of %s", bar, percent, HumanBytes(bytes));
}

}  // namespace rapt
