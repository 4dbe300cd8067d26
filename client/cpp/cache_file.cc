#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/invalid.h"
#include "client/cpp/kv_messages.h"
#include "google/protobuf/io/zero_copy_stream_impl.h"
#include "google/protobuf/util/delimited_message_util.h"
#include "rapt/cache_transfer.h"

namespace rapt::client {
namespace {

using google::protobuf::io::FileInputStream;
using google::protobuf::io::FileOutputStream;
using google::protobuf::util::ParseDelimitedFromZeroCopyStream;
using google::protobuf::util::SerializeDelimitedToZeroCopyStream;

absl::Status FileError(const std::string& path, absl::string_view why) {
  return Invalid(path, ": ", why);
}

absl::Status SystemError(const std::string& path, int error) {
  return FileError(path, std::strerror(error));
}

class FileReader final : public KvMessageReader {
 public:
  explicit FileReader(std::string path) : path_(std::move(path)) {}

 private:
  absl::Status Open() override {
    stream_.reset();
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return SystemError(path_, errno);
    stream_ = std::make_unique<FileInputStream>(file);
    stream_->SetCloseOnDelete(true);
    return absl::OkStatus();
  }

  absl::Status Read(v1::KvChunk& message) override {
    bool is_at_end = false;
    if (ParseDelimitedFromZeroCopyStream(&message, stream_.get(), &is_at_end)) {
      return absl::OkStatus();
    }
    if (stream_->GetErrno() != 0) return SystemError(path_, stream_->GetErrno());
    return Malformed(is_at_end ? "the file ends without an end" : "the file is cut or damaged");
  }

  absl::Status Malformed(absl::string_view why) const override { return FileError(path_, why); }

  const std::string path_;
  std::unique_ptr<FileInputStream> stream_;
};

// Pipes and devices can't be replaced.
bool IsReplaceable(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode);
}

enum class Durability { kNone, kOnDisk };

// Writes the messages to `path`.
absl::Status Write(CacheReader& from, const std::string& path, Durability durability) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return SystemError(path, errno);
  FileOutputStream stream(file);
  bool is_written = true;
  const auto write = [&](const v1::KvChunk& message) {
    is_written = SerializeDelimitedToZeroCopyStream(message, &stream) && stream.Flush();
    return is_written;
  };
  absl::Status status = WriteKvMessages(
      from, [](CacheHeader&) {}, write);
  int error = stream.GetErrno();
  const bool syncs = durability == Durability::kOnDisk && status.ok() && is_written;
  if (syncs && fsync(file) != 0) error = errno;
  if (!stream.Close() && error == 0) error = stream.GetErrno();
  if (!status.ok()) return status;
  if (error != 0) return SystemError(path, error);
  return is_written ? absl::OkStatus() : FileError(path, "a message has more than 2 GiB");
}

}  // namespace

absl::Status WriteCacheFile(CacheReader& from, const std::string& path) {
  if (!IsReplaceable(path)) return Write(from, path, Durability::kNone);
  const std::string part = path + ".part";
  absl::Status status = Write(from, part, Durability::kOnDisk);
  if (status.ok() && std::rename(part.c_str(), path.c_str()) != 0) {
    status = SystemError(path, errno);
  }
  if (!status.ok()) std::remove(part.c_str());
  return status;
}

std::unique_ptr<CacheReader> ReadCacheFile(std::string path) {
  return std::make_unique<FileReader>(std::move(path));
}

}  // namespace rapt::client
