// Values parsed from files that may be replaced at run time, such as certificates and tokens.
#ifndef RAPT_BASE_RELOADED_H_
#define RAPT_BASE_RELOADED_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace rapt {

struct NamedFile {
  std::string flag;  // "--tls_key": the name in errors and logs, which do not expose paths
  std::string path;
};

// Detects whether files have changed. Not thread-safe.
class FileWatch {
 public:
  static constexpr int64_t kMaxBytes = 1 << 20;  // per file

  explicit FileWatch(std::vector<NamedFile> files) : files_(std::move(files)) {}

  // Reads all files. Returns true if contents() has changed since the previous call. Never
  // blocks: a file that is not regular, such as a pipe, is unreadable.
  bool HasChanged();

  // The contents in the order of the files. InvalidArgument names the flag of an unreadable file.
  const absl::StatusOr<std::vector<std::string>>& contents() const { return contents_; }

  // Returns the flags of all files: "--tls_cert --tls_key".
  std::string Flags() const;

 private:
  const std::vector<NamedFile> files_;
  absl::StatusOr<std::vector<std::string>> contents_;
};

// Logs that replaced files are in use, or why the previous contents remain in use.
void LogReload(const FileWatch& files, const absl::Status& status);

// A value parsed from files, and parsed again when they change. Unreadable or invalid files leave
// the previous value in use. Thread-safe.
template <typename T>
class Reloaded {
 public:
  // `contents` is in the order of the files. Returns InvalidArgument naming the flag.
  using Parse = absl::StatusOr<T> (*)(const std::vector<std::string>& contents);

  // Returns the error of reading or parsing. REQUIRES: `clock` outlives this.
  static absl::StatusOr<std::unique_ptr<Reloaded>> Load(std::vector<NamedFile> files, Parse parse,
                                                        const Clock& clock) {
    FileWatch watch(std::move(files));
    watch.HasChanged();
    if (!watch.contents().ok()) return watch.contents().status();
    RAPT_ASSIGN_OR_RETURN(T value, parse(*watch.contents()));
    return absl::WrapUnique(new Reloaded(std::move(watch), parse, std::move(value), clock));
  }

  // Returns a value at most a second old. The files are checked only here, by the calling thread.
  std::shared_ptr<const T> Get() {
    if (clock_.Now() >= next_check_.load() && !checking_.exchange(true)) {
      Check(/*even_if_unchanged=*/false);
      next_check_ = clock_.Now() + kInterval;
      checking_ = false;
    }
    MutexLock lock(mutex_);
    return value_;
  }

  // Reads and parses the files now, and logs the result even if they are unchanged.
  void Reload() { Check(/*even_if_unchanged=*/true); }

 private:
  static constexpr std::chrono::seconds kInterval{1};

  Reloaded(FileWatch files, Parse parse, T value, const Clock& clock)
      : clock_(clock),
        parse_(parse),
        files_(std::move(files)),
        value_(std::make_shared<const T>(std::move(value))) {}

  void Check(bool even_if_unchanged) {
    MutexLock files_lock(files_mutex_);
    if (!files_.HasChanged() && !even_if_unchanged) return;
    const auto& contents = files_.contents();
    absl::StatusOr<T> value = contents.ok() ? parse_(*contents) : contents.status();
    LogReload(files_, value.status());
    if (!value.ok()) return;
    auto changed = std::make_shared<const T>(*std::move(value));
    MutexLock lock(mutex_);
    value_.swap(changed);
  }

  const Clock& clock_;
  const Parse parse_;
  Mutex files_mutex_;
  FileWatch files_ ABSL_GUARDED_BY(files_mutex_);
  std::atomic<bool> checking_{false};  // so that only one Get() waits for the files
  std::atomic<Instant> next_check_{Instant::min()};
  Mutex mutex_;
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_BASE_RELOADED_H_
