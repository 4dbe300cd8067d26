#include "client/cli/tensor_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr std::string_view kNpySuffix = ".npy";
constexpr std::string_view kNpzSuffix = ".npz";

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FileHandle = std::unique_ptr<std::FILE, CloseFile>;

absl::Status Annotate(std::string_view where, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrFormat("%s: %s", where, status.message()));
}

std::string WithoutSuffix(std::string_view name) {
  if (name.ends_with(kNpySuffix)) name.remove_suffix(kNpySuffix.size());
  return std::string(name);
}

// The archive that a reference names, with a member or without. Empty: none.
std::string ArchiveOf(const std::string& reference) {
  const size_t colon = reference.rfind(".npz:");
  if (colon != std::string::npos) return reference.substr(0, colon + kNpzSuffix.size());
  return IsNpz(reference) ? reference : "";
}

void AppendUtf8(uint32_t point, std::string* text) {
  if (point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) point = 0xfffd;
  if (point < 0x80) {
    text->push_back(static_cast<char>(point));
    return;
  }
  const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;  // bytes after the first
  text->push_back(static_cast<char>(0xff << (7 - more) | point >> (6 * more)));
  for (int n = more; n-- > 0;) text->push_back(static_cast<char>(0x80 | (point >> (6 * n) & 0x3f)));
}

// The text of one element, which zeros may follow.
std::string TextOf(const std::byte* element, int bytes) {
  std::string text;
  for (int at = 0; at < bytes; at += 4) {
    uint32_t point = 0;
    std::memcpy(&point, element + at, sizeof(point));
    if (point == 0) break;
    AppendUtf8(point, &text);
  }
  return text;
}

std::string MemberList(const NpzArchive& archive) {
  const std::vector<std::string> names = archive.names();
  return names.empty() ? "nothing" : absl::StrJoin(names, ", ");
}

}  // namespace

bool IsNpz(std::string_view path) { return path.ends_with(kNpzSuffix); }

absl::Status ValidateDTypeFlag(const std::string& dtype) {
  if (dtype.empty() || dtype == "bf16") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--dtype is '%s'; it takes bf16, for files of bfloat16 (V2). Other types need no flag",
      dtype));
}

absl::StatusOr<DType> FloatTypeOf(const NpyArray& array, const std::string& reference,
                                  const std::string& dtype) {
  if (array.type == NpyType{'f', 2}) return DType::kFloat16;
  if (array.type == NpyType{'f', 4}) return DType::kFloat32;
  if (array.type == NpyType{'f', 8}) return DType::kFloat64;
  if (array.type == NpyType{'V', 2}) {
    if (dtype == "bf16") return DType::kBFloat16;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has type V2, two bytes of unknown meaning; if they are bfloat16, set --dtype bf16",
        reference));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has type %s; it must be float16, float32, float64 or bfloat16", reference,
                      ToString(array.type)));
}

NpyType NpyTypeOf(DType type) {
  switch (type) {
    case DType::kFloat32:
      return {'f', 4};
    case DType::kFloat16:
      return {'f', 2};
    case DType::kBFloat16:
      return {'V', 2};
    case DType::kFloat64:
      return {'f', 8};
    case DType::kBool:
      return {'b', 1};
    case DType::kInt64:
      return {'i', 8};
    case DType::kInt32:
      return {'i', 4};
    case DType::kInt8:
      return {'i', 1};
    case DType::kUint8:
      return {'u', 1};
  }
  RAPT_CHECK(false, "unknown DType");
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const FileHandle file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrFormat("can't open %s: %s", path, std::strerror(errno)));
  }
  // Reads until the end instead of by size, so that pipes work.
  constexpr size_t kFirstStep = size_t{1} << 16;
  std::string content;
  size_t used = 0;
  for (;;) {
    content.resize(std::max(kFirstStep, content.size() * 2));
    used += std::fread(content.data() + used, 1, content.size() - used, file.get());
    if (used < content.size()) break;
  }
  if (std::ferror(file.get())) {
    return absl::DataLossError(absl::StrFormat("can't read %s: %s", path, std::strerror(errno)));
  }
  content.resize(used);
  return content;
}

absl::Status WriteFile(const std::string& path, std::string_view content) {
  FileHandle file(std::fopen(path.c_str(), "wb"));
  const bool written =
      file != nullptr &&
      std::fwrite(content.data(), 1, content.size(), file.get()) == content.size() &&
      std::fclose(file.release()) == 0;
  if (written) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("can't write %s: %s", path, std::strerror(errno)));
}

absl::StatusOr<NpzArchive> NpzArchive::Open(const std::string& path) {
  RAPT_ASSIGN_OR_RETURN(std::string bytes, ReadFile(path));
  absl::StatusOr<ZipReader> zip = ZipReader::Open(std::move(bytes));
  if (!zip.ok()) return Annotate(path, zip.status());
  return NpzArchive(path, *std::move(zip));
}

std::vector<std::string> NpzArchive::names() const {
  std::vector<std::string> names;
  for (const std::string& name : zip_.names()) names.push_back(WithoutSuffix(name));
  return names;
}

std::optional<size_t> NpzArchive::Find(std::string_view name) const {
  const std::vector<std::string> all = names();
  const auto found = std::find(all.begin(), all.end(), name);
  return found == all.end() ? std::nullopt : std::optional<size_t>(found - all.begin());
}

absl::StatusOr<NpyArray> NpzArchive::Read(std::string_view name) const {
  const std::optional<size_t> index = Find(name);
  if (!index) {
    return absl::NotFoundError(
        absl::StrFormat("%s has no member '%s'; it holds %s", path_, name, MemberList(*this)));
  }
  const std::string where = absl::StrCat(path_, ":", zip_.names()[*index]);
  absl::StatusOr<std::string> content = zip_.Read(*index);
  if (!content.ok()) return Annotate(where, content.status());
  absl::StatusOr<NpyArray> array = ParseNpy(*std::move(content));
  if (!array.ok()) return Annotate(where, array.status());
  return array;
}

absl::StatusOr<NpyArray> LoadArray(const std::string& reference, std::string_view usual_name) {
  const std::string path = ArchiveOf(reference);
  if (path.empty()) {
    absl::StatusOr<NpyArray> array;
    if (auto file = MappedFile::Open(reference)) {
      array = ParseNpy(std::move(file));
    } else {
      RAPT_ASSIGN_OR_RETURN(std::string content, ReadFile(reference));
      array = ParseNpy(std::move(content));
    }
    if (!array.ok()) return Annotate(reference, array.status());
    return array;
  }
  RAPT_ASSIGN_OR_RETURN(const NpzArchive archive, NpzArchive::Open(path));
  if (path != reference) return archive.Read(reference.substr(path.size() + 1));
  if (archive.Has(usual_name)) return archive.Read(usual_name);
  const std::vector<std::string> names = archive.names();
  if (names.size() == 1) return archive.Read(names.front());
  return absl::InvalidArgumentError(absl::StrFormat("%s holds %s; name one, such as %s:%s", path,
                                                    MemberList(archive), path, usual_name));
}

absl::StatusOr<std::vector<std::string>> LoadTexts(const std::string& reference,
                                                   std::string_view member) {
  std::vector<std::string> texts;
  const std::string path = ArchiveOf(reference);
  if (path.empty()) return texts;
  RAPT_ASSIGN_OR_RETURN(const NpzArchive archive, NpzArchive::Open(path));
  if (!archive.Has(member)) return texts;
  RAPT_ASSIGN_OR_RETURN(const NpyArray array, archive.Read(member));
  if (array.type.kind != 'U') return texts;
  for (int64_t n = 0; n < array.size(); ++n) {
    texts.push_back(TextOf(array.bytes().data() + n * array.type.bytes, array.type.bytes));
  }
  return texts;
}

void ArrayWriter::Add(const std::string& path, std::string_view member, NpyType type,
                      const Shape& shape, absl::Span<const std::byte> elements) {
  ZipContent array{std::string(member) + std::string(kNpySuffix), FormatNpy(type, shape, elements)};
  for (File& file : files_) {
    if (file.path == path && IsNpz(path)) {
      file.arrays.push_back(std::move(array));
      return;
    }
  }
  files_.push_back({path, {std::move(array)}});
}

absl::Status ArrayWriter::Write() const {
  for (const File& file : files_) {
    RAPT_RETURN_IF_ERROR(IsNpz(file.path) ? WriteZip(file.path, file.arrays)
                                          : WriteFile(file.path, file.arrays.front().content));
  }
  return absl::OkStatus();
}

}  // namespace rapt
