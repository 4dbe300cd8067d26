#include "base/wire_format.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "base/invalid.h"

namespace rapt::wire {
namespace {

// The wire types.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

// The nesting limit of generated code.
constexpr int kMaxDepth = 100;

// Reads forward through the slices. Each read is bounded by the end of its message.
class Reader {
 public:
  explicit Reader(const SlicedBytes& bytes) : bytes_(bytes) { Enter(0); }

  int64_t position() const { return position_; }

  // Returns nullopt at `end`.
  std::optional<uint8_t> Byte(int64_t end) {
    if (position_ >= end) return std::nullopt;
    const uint8_t value = static_cast<uint8_t>(*Here());
    ++position_;
    return value;
  }

  // Reads at most `max_bytes` bytes. Drops bits beyond the 64th, as generated code does.
  std::optional<uint64_t> Varint(int64_t end, int max_bytes) {
    uint64_t value = 0;
    for (int n = 0; n < max_bytes; ++n) {
      const std::optional<uint8_t> byte = Byte(end);
      if (!byte) return std::nullopt;
      value |= static_cast<uint64_t>(*byte & 0x7F) << (7 * n);
      if (*byte < 0x80) return value;
    }
    return std::nullopt;
  }

  bool Skip(int64_t count, int64_t end) {
    if (count > end - position_) return false;
    position_ += count;
    return true;
  }

  void AppendTo(std::string& out, int64_t begin, int64_t end) const {
    const size_t old_size = out.size();
    out.resize(old_size + static_cast<size_t>(end - begin));
    bytes_.Copy(begin, end - begin, reinterpret_cast<std::byte*>(out.data() + old_size));
  }

 private:
  const std::byte* Here() {
    const int64_t p = bytes_.offset + position_;
    if (p < slice_->begin || p >= slice_->end) Enter(position_);
    return slice_->data + (p - slice_->begin);
  }

  void Enter(int64_t position) {
    const int64_t p = bytes_.offset + position;
    slice_ = std::partition_point(bytes_.slices.begin(), bytes_.slices.end(),
                                  [p](const ByteSlice& slice) { return slice.end <= p; });
  }

  const SlicedBytes& bytes_;
  int64_t position_ = 0;
  absl::Span<const ByteSlice>::const_iterator slice_;
};

class Splitter {
 public:
  Splitter(const SlicedBytes& message, int64_t size, const SplitLimits& limits)
      : reader_(message), size_(size), limits_(limits) {}

  absl::StatusOr<SplitMessage> Run(const MessageSchema& schema) {
    SplitMessage result;
    FieldPath path;
    if (SplitRange(schema, size_, path, 0, result.rest, result.payloads)) {
      if (result.payloads.empty()) reader_.AppendTo(result.rest, 0, size_);
      return result;
    }
    if (!beyond_limits_.ok()) return beyond_limits_;
    return Invalid("malformed Protocol Buffers message near byte ", reader_.position());
  }

 private:
  struct Tag {
    uint32_t number;
    uint32_t type;
  };

  std::optional<Tag> ReadTag(int64_t end) {
    const std::optional<uint64_t> tag = reader_.Varint(end, 5);
    if (!tag) return std::nullopt;
    const uint32_t bits = static_cast<uint32_t>(*tag);
    if (bits >> 3 == 0) return std::nullopt;
    return Tag{bits >> 3, bits & 7};
  }

  // Reads the length of a length-delimited field and returns where the field ends.
  std::optional<int64_t> ReadEnd(int64_t end) {
    const std::optional<uint64_t> length = reader_.Varint(end, 5);
    if (!length || *length > std::numeric_limits<int32_t>::max()) return std::nullopt;
    const int64_t field_end = reader_.position() + static_cast<int64_t>(*length);
    return field_end <= end ? std::optional<int64_t>(field_end) : std::nullopt;
  }

  // Reads a message that ends at `end`. `path` is the path to it and is restored on return. If the
  // message has payloads, appends everything else to `rest`, in ranges as long as possible;
  // otherwise appends nothing.
  bool SplitRange(const MessageSchema& schema, int64_t end, FieldPath& path, int index,
                  std::string& rest, Payloads& payloads) {
    absl::InlinedVector<int, 4> counts(schema.fields.size(), 0);
    const size_t payloads_before = payloads.size();
    int64_t range_begin = reader_.position();  // start of the next range
    while (reader_.position() < end) {
      const int64_t begin = reader_.position();
      const std::optional<Tag> tag = ReadTag(end);
      if (!tag) return false;
      const PayloadField* field = FindField(schema, *tag);
      if (field == nullptr) {
        if (!SkipField(*tag, begin, end, 0)) return false;
        continue;
      }
      if (path.empty()) index = counts[field - schema.fields.data()]++;
      const std::optional<int64_t> field_end = ReadEnd(end);
      if (!field_end) return false;
      path.push_back(field->number);
      if (field->message == nullptr) {
        if (!CountPayload(payloads.size() + 1)) return false;
        payloads.push_back({path, index, reader_.position(), *field_end - reader_.position()});
        reader_.Skip(*field_end - reader_.position(), *field_end);
        reader_.AppendTo(rest, range_begin, begin);
        range_begin = *field_end;
      } else {
        const size_t payloads_outside = payloads.size();
        std::string inner;
        if (!CountRest(reader_.position() - begin)) return false;
        if (!SplitRange(*field->message, *field_end, path, index, inner, payloads)) return false;
        if (payloads.size() > payloads_outside) {
          reader_.AppendTo(rest, range_begin, begin);
          AppendFieldHeader(field->number, static_cast<int64_t>(inner.size()), rest);
          rest += inner;
          range_begin = *field_end;
        }
      }
      path.pop_back();
    }
    if (payloads.size() > payloads_before) reader_.AppendTo(rest, range_begin, end);
    return true;
  }

  bool CountRest(int64_t bytes) {
    rest_bytes_ += bytes;
    if (rest_bytes_ <= limits_.rest_bytes) return true;
    beyond_limits_ = Invalid("the message without its tensors' bytes is larger than the allowed ",
                             limits_.rest_bytes, " bytes");
    return false;
  }

  bool CountPayload(size_t count) {
    if (count <= limits_.payloads) return true;
    beyond_limits_ =
        Invalid("the message has more than the allowed ", limits_.payloads, " tensors");
    return false;
  }

  static const PayloadField* FindField(const MessageSchema& schema, Tag tag) {
    if (tag.type != kLengthDelimited) return nullptr;
    const auto field = std::find_if(
        schema.fields.begin(), schema.fields.end(),
        [&](const PayloadField& f) { return static_cast<uint32_t>(f.number) == tag.number; });
    return field == schema.fields.end() ? nullptr : &*field;
  }

  // `begin` is the position of the tag. Bytes are counted at each field, also inside a group: a
  // group has no length and has to be walked through, but only until the limit is reached.
  bool SkipField(Tag tag, int64_t begin, int64_t end, int depth) {
    if (!SkipValue(tag, end) || !CountRest(reader_.position() - begin)) return false;
    return tag.type != kStartGroup || SkipGroup(tag.number, end, depth + 1);
  }

  // Does not skip the content of a group.
  bool SkipValue(Tag tag, int64_t end) {
    switch (tag.type) {
      case kVarint:
        return reader_.Varint(end, 10).has_value();
      case kFixed64:
        return reader_.Skip(8, end);
      case kFixed32:
        return reader_.Skip(4, end);
      case kLengthDelimited: {
        const std::optional<int64_t> field_end = ReadEnd(end);
        return field_end && reader_.Skip(*field_end - reader_.position(), end);
      }
      case kStartGroup:
        return true;
      default:
        return false;
    }
  }

  bool SkipGroup(uint32_t number, int64_t end, int depth) {
    if (depth > kMaxDepth) return false;
    for (;;) {
      const int64_t begin = reader_.position();
      const std::optional<Tag> tag = ReadTag(end);
      if (!tag) return false;
      if (tag->type == kEndGroup) {
        return tag->number == number && CountRest(reader_.position() - begin);
      }
      if (!SkipField(*tag, begin, end, depth)) return false;
    }
  }

  Reader reader_;
  const int64_t size_;
  const SplitLimits limits_;
  int64_t rest_bytes_ = 0;
  absl::Status beyond_limits_;
};

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

}  // namespace

absl::StatusOr<SplitMessage> Split(const SlicedBytes& message, int64_t size,
                                   const MessageSchema& schema, const SplitLimits& limits) {
  return Splitter(message, size, limits).Run(schema);
}

void AppendFieldHeader(int number, int64_t size, std::string& out) {
  AppendVarint(static_cast<uint64_t>(number) << 3 | kLengthDelimited, out);
  AppendVarint(static_cast<uint64_t>(size), out);
}

int64_t FieldHeaderSize(int number, int64_t size) {
  std::string header;
  AppendFieldHeader(number, size, header);
  return static_cast<int64_t>(header.size());
}

}  // namespace rapt::wire
