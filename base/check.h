// RAPT_CHECK(condition, message): aborts with a message on a programming error. Never use it for
// external input; return an absl::Status instead.
#ifndef RAPT_BASE_CHECK_H_
#define RAPT_BASE_CHECK_H_

namespace rapt {

// Writes the message to stderr and aborts. If stderr stays blocked for a second, aborts without the
// message.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const char* message);

}  // namespace rapt

#define RAPT_CHECK(condition, message) \
  ((condition) ? (void)0 : ::rapt::CheckFailed(__FILE__, __LINE__, #condition, message))

#endif  // RAPT_BASE_CHECK_H_
