// A progress bar for terminals.
#ifndef RAPT_CLIENT_CLI_PROGRESS_BAR_H_
#define RAPT_CLIENT_CLI_PROGRESS_BAR_H_

#include <cstdint>

namespace rapt {

// One line on stderr, redrawn in place and erased by the destructor. Prints nothing if stderr is
// not a terminal.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Show(int64_t done_bytes, int64_t bytes);

 private:
  const bool is_shown_;
  int64_t percent_ = -1;  // as drawn
};

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_PROGRESS_BAR_H_
