// Values that files hold and that change when the files are replaced: certificates, tokens.
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

namespace rapt {

struct NamedFile {
  std::string flag;  // "--tls_key": what errors and logs call it, for paths are nobody's business
  std::string path;
};

// Looks whether files have changed. Not for two threads at once.
class FileWatch {
 public:
  static constexpr int64_t kMaxBytes = 1 << 20;  // of a file

  explicit FileWatch(std::vector<NamedFile> files) : files_(std::move(files)) {}

  // Reads all files. True where that came out otherwise than the last time; contents() has it.
  bool HasChanged();

  // What the files hold, in their order. InvalidArgument names the flag of one that can't be read.
  const absl::StatusOr<std::vector<std::string>>& contents() const { return contents_; }

  // Of all of them: "--tls_cert --tls_key".
  std::string Flags() const;

 private:
  const std::vector<NamedFile> files_;
  absl::StatusOr<std::vector<std::string>> contents_;
};

// A log line for files that were replaced: that the new ones count, or why the old ones still do.
void LogReload(const FileWatch& files, const absl::Status& status);

// A value made of files' contents, and made anew once they are replaced. Files that can't be read
// or that make no sense leave it as it is. Thread-safe.
template <typename T>
class Reloaded {
 public:
  // In the order of the files. InvalidArgument names the flag.
  using Parse = absl::StatusOr<T> (*)(const std::vector<std::string>& contents);

  // The error is ReadFiles()'s or the parser's. `clock` outlives this.
  static absl::StatusOr<std::unique_ptr<Reloaded>> Load(std::vector<NamedFile> files, Parse parse,
                                                        const Clock& clock) {
    FileWatch watch(std::move(files));
    watch.HasChanged();
    if (!watch.contents().ok()) return watch.contents().status();
    absl::StatusOr<T> value = parse(*watch.contents());
    if (!value.ok()) return value.status();
    return absl::WrapUnique(new Reloaded(std::move(watch), parse, *std::move(value), clock));
  }

  // As the files were at most a second ago: nobody looks at them but callers of this.
  std::shared_ptr<const T> Get() {
    if (clock_.Now() >= next_look_.load() && !looking_.exchange(true)) {
      Look();
      next_look_ = clock_.Now() + kInterval;
      looking_ = false;
    }
    MutexLock lock(mutex_);
    return value_;
  }

 private:
  static constexpr std::chrono::seconds kInterval{1};

  Reloaded(FileWatch files, Parse parse, T value, const Clock& clock)
      : clock_(clock),
        parse_(parse),
        files_(std::move(files)),
        value_(std::make_shared<const T>(std::move(value))) {}

  void Look() {
    if (!files_.HasChanged()) return;
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
  FileWatch files_;  // of the thread that looks
  std::atomic<bool> looking_{false};
  std::atomic<Instant> next_look_{Instant::min()};
  Mutex mutex_;
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_BASE_RELOADED_H_
