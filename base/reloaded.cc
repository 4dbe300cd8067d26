#include "base/reloaded.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/descriptor.h"
#include "base/invalid.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

absl::Status Unreadable(const NamedFile& file, absl::string_view reason) {
  return Invalid("cannot read the file of ", file.flag, ": ", reason);
}

absl::StatusOr<std::string> ReadFile(const NamedFile& file) {
  // O_NONBLOCK: opening a pipe would wait for its writer.
  const Descriptor descriptor(open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0) return Unreadable(file, std::strerror(errno));
  struct stat status;
  if (fstat(descriptor.get(), &status) != 0) return Unreadable(file, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) return Unreadable(file, "it is not a regular file");
  std::string bytes;
  char buffer[4096];
  ssize_t count;
  while ((count = read(descriptor.get(), buffer, sizeof(buffer))) > 0 &&
         static_cast<int64_t>(bytes.size()) <= FileWatch::kMaxBytes) {
    bytes.append(buffer, static_cast<size_t>(count));
  }
  if (count < 0) return Unreadable(file, std::strerror(errno));
  if (static_cast<int64_t>(bytes.size()) <= FileWatch::kMaxBytes) return bytes;
  return Unreadable(file, absl::StrCat("it is larger than ", FileWatch::kMaxBytes, " bytes"));
}

absl::StatusOr<std::vector<std::string>> ReadFiles(const std::vector<NamedFile>& files) {
  std::vector<std::string> contents;
  for (const NamedFile& file : files) {
    RAPT_ASSIGN_OR_RETURN(std::string bytes, ReadFile(file));
    contents.push_back(std::move(bytes));
  }
  return contents;
}

}  // namespace

bool FileWatch::HasChanged() {
  absl::StatusOr<std::vector<std::string>> contents = ReadFiles(files_);
  if (contents == contents_) return false;
  contents_ = std::move(contents);
  return true;
}

std::string FileWatch::Flags() const {
  return absl::StrJoin(files_, " ", [](std::string* out, const NamedFile& file) {
    absl::StrAppend(out, file.flag);
  });
}

void LogReload(const FileWatch& files, const absl::Status& status) {
  if (status.ok()) {
    Log(LogLevel::kInfo, "reloaded", {{"flags", files.Flags()}});
  } else {
    Log(LogLevel::kWarning, "not reloaded",
        {{"flags", files.Flags()}, {"reason", status.message()}});
  }
}

}  // namespace rapt
