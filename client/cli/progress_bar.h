// How far something has come, for a person who waits at a terminal.
#ifndef RAPT_CLIENT_CLI_PROGRESS_BAR_H_
#define RAPT_CLIENT_CLI_PROGRESS_BAR_H_

#include <cstdint>

namespace rapt {

// One line on stderr that is drawn anew, and gone when this is destroyed. Nothing where stderr is
// no terminal.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Show(int64_t done_bytes, int64_t bytes);

 private:
  const bool is_shown_;
  int64_t percent_ = -1;  // that is drawn
};

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_PROGRESS_BAR_H_
