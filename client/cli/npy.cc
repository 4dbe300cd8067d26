#include "client/cli/npy.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/checked_math.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxRank = 32;  // NumPy's own limit up to version 1
constexpr size_t kHeaderAlignment = 64;
constexpr int kMaxLetters = 1 << 20;

absl::Status Unusable(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("not a usable .npy file: %s", what));
}

struct Header {
  std::string_view descr;
  bool fortran_order = false;
  Shape shape;
};

// Parses the header, a Python dictionary with three keys:
// {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : rest_(text) {}

  absl::StatusOr<Header> Parse() {
    Header header;
    bool has_descr = false, has_order = false, has_shape = false;
    if (!Accept('{')) return Unusable("its header is not a dictionary");
    while (!Accept('}')) {
      const std::optional<std::string_view> key = String();
      if (!key || !Accept(':')) return Unusable("its header is not a dictionary");
      if (*key == "descr") {
        const std::optional<std::string_view> descr = String();
        if (!descr) return Unusable("its elements are records; they must be plain numbers");
        header.descr = *descr;
        has_descr = true;
      } else if (*key == "fortran_order") {
        const std::optional<bool> order = Boolean();
        if (!order) return Unusable("fortran_order in its header is neither True nor False");
        header.fortran_order = *order;
        has_order = true;
      } else if (*key == "shape") {
        std::optional<Shape> shape = Tuple();
        if (!shape) return Unusable("shape in its header is not a tuple of sizes");
        header.shape = *std::move(shape);
        has_shape = true;
      } else {
        return Unusable("its header has an unknown key");
      }
      if (!Accept(',') && Peek() != '}') return Unusable("its header is not a dictionary");
    }
    if (!has_descr || !has_order || !has_shape) {
      return Unusable("its header lacks descr, fortran_order or shape");
    }
    return header;
  }

 private:
  char Peek() {
    const size_t start = rest_.find_first_not_of(" \t\n");
    rest_.remove_prefix(std::min(start, rest_.size()));
    return rest_.empty() ? '\0' : rest_.front();
  }
  bool Accept(char c) {
    if (Peek() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool AcceptWord(std::string_view word) {
    Peek();
    if (rest_.substr(0, word.size()) != word) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  std::optional<std::string_view> String() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return std::nullopt;
    const size_t end = rest_.find(quote, 1);
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view text = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return text;
  }
  std::optional<bool> Boolean() {
    if (AcceptWord("True")) return true;
    if (AcceptWord("False")) return false;
    return std::nullopt;
  }
  std::optional<int64_t> Size() {
    int64_t value = 0;
    size_t digits = 0;
    for (Peek(); digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9'; ++digits) {
      const std::optional<int64_t> shifted = CheckedMul(value, 10);
      const std::optional<int64_t> next =
          shifted ? CheckedAdd(*shifted, rest_[digits] - '0') : std::nullopt;
      if (!next) return std::nullopt;
      value = *next;
    }
    if (digits == 0) return std::nullopt;
    rest_.remove_prefix(digits);
    return value;
  }
  std::optional<Shape> Tuple() {
    Shape shape;
    if (!Accept('(')) return std::nullopt;
    while (!Accept(')')) {
      const std::optional<int64_t> size = Size();
      if (!size || shape.size() == kMaxRank) return std::nullopt;
      shape.push_back(*size);
      if (!Accept(',') && Peek() != ')') return std::nullopt;
    }
    return shape;
  }

  std::string_view rest_;
};

absl::StatusOr<NpyType> ParseType(std::string_view descr) {
  if (descr == "bfloat16") return NpyType{'V', 2};
  if (!descr.empty() && descr[0] == '>') {
    return Unusable("its elements are big-endian; save it with .astype(a.dtype.newbyteorder('<'))");
  }
  constexpr std::string_view kKnown[] = {"f2", "f4", "f8", "i1", "i2", "i4", "i8",
                                         "u1", "u2", "u4", "u8", "b1", "V2"};
  const bool has_order = !descr.empty() && (descr[0] == '<' || descr[0] == '|' || descr[0] == '=');
  const std::string_view type = descr.substr(has_order ? 1 : 0);
  int letters = 0;
  if (type.starts_with('U') &&
      absl::SimpleAtoi(absl::string_view(type.data() + 1, type.size() - 1), &letters) &&
      letters > 0 && letters <= kMaxLetters) {
    return NpyType{'U', 4 * letters};
  }
  if (std::find(std::begin(kKnown), std::end(kKnown), type) == std::end(kKnown)) {
    // Truncated, since the name may be hostile.
    return Unusable(
        absl::StrFormat("its elements are '%s'; they must be floats, integers, bools or text",
                        descr.substr(0, 16)));
  }
  return NpyType{type[0], type[1] - '0'};
}

// Converts column-major elements to row-major order.
std::string ToCOrder(absl::Span<const std::byte> elements, const Shape& shape, int item_bytes) {
  std::string out(elements.size(), '\0');
  if (out.empty()) return out;
  const size_t rank = shape.size();
  std::vector<int64_t> strides(rank, item_bytes);
  for (size_t axis = 1; axis < rank; ++axis) strides[axis] = strides[axis - 1] * shape[axis - 1];
  std::vector<int64_t> index(rank, 0);
  int64_t from = 0;
  for (size_t to = 0; to < out.size(); to += item_bytes) {
    std::memcpy(out.data() + to, elements.data() + from, item_bytes);
    for (size_t axis = rank; axis-- > 0;) {
      from += strides[axis];
      if (++index[axis] < shape[axis]) break;
      from -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
  return out;
}

// Returns the size of the elements, or nullopt if the product overflows.
std::optional<int64_t> ElementBytes(const Shape& shape, int item_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::optional<int64_t> bytes = item_bytes;
  for (const int64_t size : shape) {
    bytes = CheckedMul(*bytes, size);
    if (!bytes) return std::nullopt;
  }
  return bytes;
}

struct ParsedHeader {
  NpyArray array;  // without storage or file
  bool fortran_order = false;
};

// Parses and checks the header.
absl::StatusOr<ParsedHeader> ReadHeader(std::string_view text) {
  if (text.substr(0, kMagic.size()) != kMagic) return Unusable("it does not start with \\x93NUMPY");
  const auto byte = [text](size_t i) -> size_t { return static_cast<unsigned char>(text[i]); };
  if (text.size() < 10) return Unusable("it ends within its header");
  const size_t major = byte(6);
  if (major < 1 || major > 3) {
    return Unusable(absl::StrFormat("its format version is %d; it must be 1 to 3", major));
  }
  const size_t header_start = major == 1 ? 10 : 12;
  if (text.size() < header_start) return Unusable("it ends within its header");
  const size_t header_bytes =
      byte(8) | byte(9) << 8 | (major == 1 ? 0 : byte(10) << 16 | byte(11) << 24);
  if (text.size() - header_start < header_bytes) return Unusable("it ends within its header");

  RAPT_ASSIGN_OR_RETURN(const Header header,
                        HeaderParser(text.substr(header_start, header_bytes)).Parse());
  RAPT_ASSIGN_OR_RETURN(const NpyType type, ParseType(header.descr));

  const std::optional<int64_t> expected = ElementBytes(header.shape, type.bytes);
  const size_t first_byte = header_start + header_bytes;
  const size_t actual = text.size() - first_byte;
  if (!expected || static_cast<size_t>(*expected) != actual) {
    return Unusable(
        absl::StrFormat("%s of shape %s does not match the %d bytes that follow the header",
                        ToString(type), ToString(header.shape), actual));
  }
  return ParsedHeader{{type, header.shape, {}, first_byte}, header.fortran_order};
}

// Converts the elements to C order if needed.
NpyArray InCOrder(ParsedHeader header) {
  NpyArray& array = header.array;
  if (header.fortran_order && array.shape.size() > 1) {
    array.storage = ToCOrder(array.bytes(), array.shape, array.type.bytes);
    array.first_byte = 0;
    array.file = nullptr;
  }
  return std::move(array);
}

}  // namespace

std::string ToString(NpyType type) {
  switch (type.kind) {
    case 'f':
      return absl::StrCat("float", type.bytes * 8);
    case 'i':
      return absl::StrCat("int", type.bytes * 8);
    case 'u':
      return absl::StrCat("uint", type.bytes * 8);
    case 'b':
      return "bool";
    case 'U':
      return "text";
    default:
      return absl::StrCat("V", type.bytes);
  }
}

int64_t NpyArray::size() const { return static_cast<int64_t>(bytes().size()) / type.bytes; }

absl::StatusOr<NpyArray> ParseNpy(std::string file) {
  RAPT_ASSIGN_OR_RETURN(ParsedHeader header, ReadHeader(file));
  header.array.storage = std::move(file);
  return InCOrder(std::move(header));
}

absl::StatusOr<NpyArray> ParseNpy(std::shared_ptr<const MappedFile> file) {
  RAPT_ASSIGN_OR_RETURN(ParsedHeader header, ReadHeader(file->content()));
  header.array.file = std::move(file);
  return InCOrder(std::move(header));
}

std::string FormatNpy(NpyType type, const Shape& shape, absl::Span<const std::byte> elements) {
  const char order = type.bytes == 1 ? '|' : '<';
  std::string header = absl::StrFormat(
      "{'descr': '%c%c%d', 'fortran_order': False, 'shape': (%s%s), }", order, type.kind,
      type.bytes, absl::StrJoin(shape, ", "), shape.size() == 1 ? "," : "");
  const size_t unpadded = kMagic.size() + 4 + header.size() + 1;
  header.append((kHeaderAlignment - unpadded % kHeaderAlignment) % kHeaderAlignment, ' ');
  header.push_back('\n');
  std::string file(kMagic);
  file.append(
      {'\1', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)});
  file.append(header);
  file.append(reinterpret_cast<const char*>(elements.data()), elements.size());
  return file;
}

}  // namespace rapt
