#include "client/cli/zip.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/str_format.h"

namespace rapt {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kCentralHeader = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50;
constexpr uint32_t kZip64End = 0x06064b50;
constexpr uint32_t kZip64Locator = 0x07064b50;
constexpr uint16_t kZip64Extra = 0x0001;

constexpr size_t kEndBytes = 22;
constexpr size_t kZip64LocatorBytes = 20;
constexpr size_t kMaxCommentBytes = 0xffff;

constexpr uint16_t kStored = 0;
constexpr uint16_t kDeflated = 8;
constexpr uint16_t kEncryptedFlag = 1;

// Deflate can't do better than this, so a larger claim is a lie.
constexpr uint64_t kMaxDeflateRatio = 1032;

constexpr uint16_t kVersionZip64 = 45;
constexpr uint16_t kDate1980 = 0x21;  // 1 January 1980, so that the same arrays give the same bytes

absl::Status Damaged(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("damaged .npz archive: %s", what));
}

// Little-endian integers, front to back. Reading past the end gives zeros and sets failed().
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  uint16_t U16() { return static_cast<uint16_t>(Take(2)); }
  uint32_t U32() { return static_cast<uint32_t>(Take(4)); }
  uint64_t U64() { return Take(8); }
  void Skip(size_t count) { Bytes(count); }
  std::string_view Bytes(size_t count) {
    if (count > bytes_.size()) {
      failed_ = true;
      bytes_ = {};
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  bool failed() const { return failed_; }
  bool empty() const { return bytes_.empty(); }

 private:
  uint64_t Take(size_t count) {
    uint64_t value = 0;
    int shift = 0;
    for (const char byte : Bytes(count)) {
      value |= uint64_t{static_cast<unsigned char>(byte)} << shift;
      shift += 8;
    }
    return value;
  }

  std::string_view bytes_;
  bool failed_ = false;
};

class Writer {
 public:
  Writer& U16(uint16_t value) { return Put(value, 2); }
  Writer& U32(uint32_t value) { return Put(value, 4); }
  Writer& U64(uint64_t value) { return Put(value, 8); }
  Writer& Bytes(std::string_view bytes) {
    out_.append(bytes);
    return *this;
  }
  uint64_t size() const { return out_.size(); }
  std::string Take() { return std::move(out_); }

 private:
  Writer& Put(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) out_.push_back(static_cast<char>(value >> (8 * i)));
    return *this;
  }

  std::string out_;
};

uint32_t Crc32(std::string_view bytes) {
  return static_cast<uint32_t>(
      crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

struct Directory {
  uint64_t offset = 0;
  uint64_t entries = 0;
};

// The end record sits before a comment of unknown length: search backwards.
std::optional<size_t> FindEnd(std::string_view archive) {
  if (archive.size() < kEndBytes) return std::nullopt;
  const size_t last = archive.size() - kEndBytes;
  const size_t first = last > kMaxCommentBytes ? last - kMaxCommentBytes : 0;
  for (size_t at = last + 1; at-- > first;) {
    if (Reader(archive.substr(at)).U32() == kEnd) return at;
  }
  return std::nullopt;
}

absl::StatusOr<Directory> FindDirectory(std::string_view archive) {
  const std::optional<size_t> end = FindEnd(archive);
  if (!end) return Damaged("it has no directory; the file may be cut short");
  Reader reader(archive.substr(*end + 10));
  Directory directory;
  directory.entries = reader.U16();
  reader.Skip(4);
  directory.offset = reader.U32();

  if (*end < kZip64LocatorBytes) return directory;
  Reader locator(archive.substr(*end - kZip64LocatorBytes));
  if (locator.U32() != kZip64Locator) return directory;
  locator.Skip(4);
  const uint64_t zip64_end = locator.U64();
  if (zip64_end > archive.size()) return Damaged("its ZIP64 directory lies outside the file");
  Reader zip64(archive.substr(zip64_end));
  if (zip64.U32() != kZip64End) return Damaged("its ZIP64 directory has a wrong signature");
  zip64.Skip(28);
  directory.entries = zip64.U64();
  zip64.Skip(8);
  directory.offset = zip64.U64();
  if (zip64.failed()) return Damaged("its ZIP64 directory is cut short");
  return directory;
}

// Fields that don't fit into 32 bits are all ones and continue in an extra field, in this order.
void ApplyZip64(std::string_view extra, ZipMember* member) {
  constexpr uint64_t kElsewhere = 0xffffffff;
  for (Reader fields(extra); !fields.empty();) {
    const uint16_t tag = fields.U16();
    Reader field(fields.Bytes(fields.U16()));
    if (tag != kZip64Extra) continue;
    for (uint64_t* value : {&member->bytes, &member->stored_bytes, &member->offset}) {
      if (*value == kElsewhere) *value = field.U64();
    }
  }
}

absl::StatusOr<std::string> Inflate(std::string_view deflated, uint64_t bytes) {
  if (bytes / kMaxDeflateRatio > deflated.size()) {
    return Damaged("a member claims to be larger than its data can be");
  }
  std::string out(bytes, '\0');
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) return absl::InternalError("zlib did not start");
  constexpr size_t kMaxStep = std::numeric_limits<uInt>::max();
  size_t in_done = 0, out_done = 0;
  int result = Z_OK;
  while (result == Z_OK) {
    const size_t in_step = std::min(deflated.size() - in_done, kMaxStep);
    const size_t out_step = std::min(out.size() - out_done, kMaxStep);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(deflated.data() + in_done));
    stream.avail_in = static_cast<uInt>(in_step);
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + out_done);
    stream.avail_out = static_cast<uInt>(out_step);
    result = inflate(&stream, Z_NO_FLUSH);
    in_done += in_step - stream.avail_in;
    out_done += out_step - stream.avail_out;
  }
  inflateEnd(&stream);
  if (result != Z_STREAM_END || out_done != bytes) {
    return Damaged("a compressed member does not unpack to the size it claims");
  }
  return out;
}

}  // namespace

absl::StatusOr<std::vector<ZipMember>> ListZip(std::string_view archive) {
  const absl::StatusOr<Directory> directory = FindDirectory(archive);
  if (!directory.ok()) return directory.status();
  if (directory->offset > archive.size()) return Damaged("its directory lies outside the file");
  Reader reader(archive.substr(directory->offset));
  std::vector<ZipMember> members;
  for (uint64_t i = 0; i < directory->entries; ++i) {
    if (reader.U32() != kCentralHeader) return Damaged("its directory is cut short");
    ZipMember member;
    reader.Skip(4);
    const uint16_t flags = reader.U16();
    member.method = reader.U16();
    reader.Skip(4);
    member.crc32 = reader.U32();
    member.stored_bytes = reader.U32();
    member.bytes = reader.U32();
    const uint16_t name_bytes = reader.U16();
    const uint16_t extra_bytes = reader.U16();
    const uint16_t comment_bytes = reader.U16();
    reader.Skip(8);
    member.offset = reader.U32();
    member.name = reader.Bytes(name_bytes);
    ApplyZip64(reader.Bytes(extra_bytes), &member);
    reader.Skip(comment_bytes);
    if (reader.failed()) return Damaged("its directory is cut short");
    if (flags & kEncryptedFlag) return Damaged("its members are encrypted");
    members.push_back(std::move(member));
  }
  return members;
}

absl::StatusOr<std::string> ReadZipMember(std::string_view archive, const ZipMember& member) {
  if (member.offset > archive.size()) return Damaged("a member lies outside the file");
  Reader reader(archive.substr(member.offset));
  if (reader.U32() != kLocalHeader) return Damaged("a member has a wrong signature");
  reader.Skip(22);
  const uint16_t name_bytes = reader.U16();
  const uint16_t extra_bytes = reader.U16();
  reader.Skip(size_t{name_bytes} + extra_bytes);
  const std::string_view stored = reader.Bytes(member.stored_bytes);
  if (reader.failed()) return Damaged("a member is cut short");

  std::string content;
  if (member.method == kStored) {
    if (member.bytes != member.stored_bytes) return Damaged("a member's two sizes differ");
    content = stored;
  } else if (member.method == kDeflated) {
    absl::StatusOr<std::string> inflated = Inflate(stored, member.bytes);
    if (!inflated.ok()) return inflated.status();
    content = *std::move(inflated);
  } else {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the .npz archive uses compression method %d; stored (0) and deflate (8) are read",
        member.method));
  }
  if (Crc32(content) != member.crc32) return Damaged("a member's checksum is wrong");
  return content;
}

std::string WriteZip(absl::Span<const ZipContent> members) {
  constexpr uint32_t kElsewhere = 0xffffffff;
  Writer archive, directory;
  for (const ZipContent& member : members) {
    const uint64_t offset = archive.size();
    const uint32_t crc = Crc32(member.content);
    const uint64_t bytes = member.content.size();
    const uint16_t name_bytes = static_cast<uint16_t>(member.name.size());
    // Sizes always in the ZIP64 field, as numpy.savez does: no limit of 4 GiB to think of.
    archive.U32(kLocalHeader).U16(kVersionZip64).U16(0).U16(kStored).U16(0).U16(kDate1980);
    archive.U32(crc).U32(kElsewhere).U32(kElsewhere).U16(name_bytes).U16(20).Bytes(member.name);
    archive.U16(kZip64Extra).U16(16).U64(bytes).U64(bytes).Bytes(member.content);

    directory.U32(kCentralHeader).U16(kVersionZip64).U16(kVersionZip64).U16(0).U16(kStored);
    directory.U16(0).U16(kDate1980).U32(crc).U32(kElsewhere).U32(kElsewhere).U16(name_bytes);
    directory.U16(28).U16(0).U16(0).U16(0).U32(0).U32(kElsewhere).Bytes(member.name);
    directory.U16(kZip64Extra).U16(24).U64(bytes).U64(bytes).U64(offset);
  }
  const uint64_t directory_offset = archive.size();
  const uint64_t directory_bytes = directory.size();
  const uint64_t count = members.size();
  archive.Bytes(directory.Take());
  const uint64_t zip64_end = archive.size();
  archive.U32(kZip64End).U64(44).U16(kVersionZip64).U16(kVersionZip64).U32(0).U32(0);
  archive.U64(count).U64(count).U64(directory_bytes).U64(directory_offset);
  archive.U32(kZip64Locator).U32(0).U64(zip64_end).U32(1);
  archive.U32(kEnd).U16(0).U16(0).U16(0xffff).U16(0xffff).U32(kElsewhere).U32(kElsewhere).U16(0);
  return archive.Take();
}

}  // namespace rapt
