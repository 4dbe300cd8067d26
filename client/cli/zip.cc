#include "client/cli/zip.h"

#include <zip.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Deflate compresses to no less than 1/1032 of the size.
constexpr uint64_t kMaxDeflateRatio = 1032;

// 1 January 1980, the earliest date that ZIP can store.
constexpr uint16_t kDate1980 = 0x21;

absl::Status Damaged(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("damaged .npz archive: %s", what));
}

class Error {
 public:
  ~Error() { zip_error_fini(&error_); }
  zip_error_t* get() { return &error_; }
  const char* message() { return zip_error_strerror(&error_); }

 private:
  zip_error_t error_ = {};
};

struct CloseMember {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};

// Checks the directory entry of a member of an archive of `archive_bytes`.
absl::Status CheckMember(const zip_stat_t& member, uint64_t archive_bytes) {
  if (member.encryption_method != ZIP_EM_NONE) return Damaged("its members are encrypted");
  if (member.comp_method != ZIP_CM_STORE && member.comp_method != ZIP_CM_DEFLATE) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the .npz archive uses compression method %d; it must be stored (0) or deflate (8)",
        member.comp_method));
  }
  if (member.comp_size > archive_bytes) return Damaged("a member is larger than the file");
  const uint64_t ratio = member.comp_method == ZIP_CM_STORE ? 1 : kMaxDeflateRatio;
  if (member.size / ratio > member.comp_size) {
    return Damaged("a member states a larger size than its data can have");
  }
  return absl::OkStatus();
}

}  // namespace

void ZipReader::Discard::operator()(zip* archive) const { zip_discard(archive); }

absl::StatusOr<ZipReader> ZipReader::Open(std::string archive) {
  if (archive.empty()) return Damaged("the file is empty");
  ZipReader reader;
  reader.bytes_ = std::make_unique<const std::string>(std::move(archive));
  Error error;
  zip_source_t* const source =
      zip_source_buffer_create(reader.bytes_->data(), reader.bytes_->size(), 0, error.get());
  if (source == nullptr) return Damaged(error.message());
  reader.archive_.reset(zip_open_from_source(source, ZIP_RDONLY, error.get()));
  if (reader.archive_ == nullptr) {
    zip_source_free(source);
    return Damaged(error.message());
  }
  const zip_int64_t count = zip_get_num_entries(reader.archive_.get(), 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    const char* const name = zip_get_name(reader.archive_.get(), i, ZIP_FL_ENC_RAW);
    if (name == nullptr) return Damaged("a member has no name");
    reader.names_.emplace_back(name);
  }
  return reader;
}

absl::StatusOr<std::string> ZipReader::Read(size_t index) const {
  zip_stat_t member;
  if (zip_stat_index(archive_.get(), index, 0, &member) != 0) {
    return Damaged(zip_strerror(archive_.get()));
  }
  RAPT_RETURN_IF_ERROR(CheckMember(member, bytes_->size()));
  const std::unique_ptr<zip_file_t, CloseMember> file(zip_fopen_index(archive_.get(), index, 0));
  if (file == nullptr) return Damaged(zip_strerror(archive_.get()));
  std::string content(member.size, '\0');
  zip_int64_t read = 0;
  for (size_t done = 0; done < content.size(); done += read) {
    read = zip_fread(file.get(), content.data() + done, content.size() - done);
    if (read == 0) return Damaged("a member is smaller than it states");
    if (read < 0) return Damaged(zip_file_strerror(file.get()));
  }
  // libzip compares the checksum when a read finds the end.
  char end;
  read = zip_fread(file.get(), &end, 1);
  if (read < 0) return Damaged(zip_file_strerror(file.get()));
  if (read > 0) return Damaged("a member is larger than it states");
  return content;
}

absl::Status WriteZip(const std::string& path, absl::Span<const ZipContent> members) {
  // Resolves symbolic links, because the file is replaced.
  std::error_code ignored;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, ignored);
  const auto failed = [&path](const char* why) {
    return absl::DataLossError(absl::StrFormat("can't write %s: %s", path, why));
  };
  // libzip renames the archive to `target`, which would replace a device such as /dev/full.
  if (std::filesystem::exists(target, ignored) &&
      !std::filesystem::is_regular_file(target, ignored)) {
    return failed("not a regular file");
  }
  Error error;
  int code = 0;
  zip_t* const archive = zip_open(target.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code);
  if (archive == nullptr) {
    zip_error_init_with_code(error.get(), code);
    return failed(error.message());
  }
  bool added = true;
  for (const ZipContent& member : members) {
    zip_source_t* const source =
        zip_source_buffer(archive, member.content.data(), member.content.size(), 0);
    const zip_int64_t index = zip_file_add(archive, member.name.c_str(), source, 0);
    added = added && index >= 0 && zip_set_file_compression(archive, index, ZIP_CM_STORE, 0) == 0 &&
            zip_file_set_dostime(archive, index, 0, kDate1980, 0) == 0;
  }
  if (added && zip_close(archive) == 0) return absl::OkStatus();
  absl::Status status = failed(zip_strerror(archive));
  zip_discard(archive);
  return status;
}

}  // namespace rapt
