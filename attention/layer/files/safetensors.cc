#include "attention/layer/files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/strict_json.h"

namespace rapt {
namespace {

constexpr size_t kLengthBytes = 8;  // of the index, little-endian, at the start of a file
constexpr char kMetadata[] = "__metadata__";
constexpr size_t kMaxNameBytes = 1024;

constexpr size_t kMaxTypeBytes = 32;

// A type of the format, and the library's if it has one. The format may get others, whose tensors
// have any number of bytes.
struct TypeInfo {
  absl::string_view name;
  int64_t bytes;
  std::optional<DType> dtype = std::nullopt;
};

constexpr TypeInfo kTypes[] = {
    {"F32", 4, DType::kFloat32},
    {"F16", 2, DType::kFloat16},
    {"BF16", 2, DType::kBFloat16},
    {"F64", 8, DType::kFloat64},
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"I16", 2},
    {"U16", 2},
    {"I32", 4},
    {"U32", 4},
    {"I64", 8},
    {"U64", 8},
};

const TypeInfo* FindType(absl::string_view name) {
  const auto type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                 [&](const TypeInfo& info) { return info.name == name; });
  return type == std::end(kTypes) ? nullptr : type;
}

// A tensor as the index describes it.
struct Entry {
  std::string name;
  std::string type;
  std::optional<Shape> shape = std::nullopt;
  std::optional<Shape> offsets = std::nullopt;  // [begin, end), from the end of the index
};

// Reads the index: an object with an object for each tensor, whose arrays have integers.
class IndexReader final : public JsonHandler {
 public:
  absl::StatusOr<std::vector<Entry>> Read(absl::string_view json) {
    if (!ReadStrictJson(json, *this)) return status_;
    return std::move(entries_);
  }

 private:
  enum class Place : uint8_t { kFile, kTensors, kMetadata, kTensor, kArray };

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a bool"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not whole or has more than 64 bits");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kArray) return Unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail("tensor ", name(), " has ", value, " in ", key_, "; at most 2^63 - 1 is allowed");
    }
    if (array_->size() == Safetensors::kMaxRank) {
      return Fail("tensor ", name(), " has more than ", Safetensors::kMaxRank, " numbers in ",
                  key_);
    }
    array_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || key_ != "dtype") return Unexpected("a string");
    std::string& type = entries_.back().type;
    if (value.empty() || value.size() > kMaxTypeBytes) {
      return Fail("tensor ", name(), " has a dtype of ", value.size(), " bytes; it must have 1 to ",
                  kMaxTypeBytes);
    }
    type = std::move(value);
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kFile && !has_begun_) {
      has_begun_ = true;
      place_ = Place::kTensors;
      return true;
    }
    if (place_ != Place::kTensors) return Unexpected("an object");
    place_ = key_ == kMetadata ? Place::kMetadata : Place::kTensor;
    if (place_ == Place::kMetadata) return true;
    if (entries_.size() == Safetensors::kMaxTensors) {
      return Fail("there are more than ", Safetensors::kMaxTensors, " tensors");
    }
    entries_.emplace_back().name = key_;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensors) {
      place_ = Place::kFile;
      return true;
    }
    const bool is_tensor = place_ == Place::kTensor;
    place_ = Place::kTensors;
    const Entry* const entry = is_tensor ? &entries_.back() : nullptr;
    if (entry == nullptr || (!entry->type.empty() && entry->shape && entry->offsets)) return true;
    return Fail("tensor ", name(), " needs dtype, shape and data_offsets");
  }

  bool key(string_t& value) override {
    if (value.size() > kMaxNameBytes) {
      return Fail("a name has ", value.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
    }
    key_ = std::move(value);
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor) return Unexpected("an array");
    Entry& entry = entries_.back();
    if (key_ != "shape" && key_ != "data_offsets") return Unexpected("an array");
    array_ = &(key_ == "shape" ? entry.shape : entry.offsets).emplace();
    place_ = Place::kArray;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    if (key_ == "shape" || array_->size() == 2) return true;
    return Fail("tensor ", name(), " has ", array_->size(), " data_offsets; it must have 2");
  }

  void OnInvalid(absl::string_view why) override { Fail("the index is invalid JSON: ", why); }

  const std::string& name() const { return entries_.back().name; }

  bool Unexpected(absl::string_view what) {
    const std::string where =
        place_ == Place::kFile ? "the index" : absl::StrCat("field ", key_.substr(0, 64));
    const std::string tensor = place_ == Place::kTensor || place_ == Place::kArray
                                   ? absl::StrCat("tensor ", name(), ": ")
                                   : "";
    return Fail(tensor, where, " has ", what,
                "; the index is an object of tensors, each with dtype, shape and data_offsets");
  }

  template <typename... Parts>
  bool Fail(const Parts&... parts) {
    status_ = Invalid(parts...);
    return false;
  }

  absl::Status status_;
  std::vector<Entry> entries_;
  Place place_ = Place::kFile;
  bool has_begun_ = false;
  std::string key_;
  Shape* array_ = nullptr;
};

// A file, and the tensors that the index says are in it.
struct Shard {
  std::string file;
  std::vector<std::string> tensors;
};

// Reads the index file of shards: an object whose weight_map has the shard of each tensor.
class WeightMapReader final : public JsonHandler {
 public:
  absl::StatusOr<std::vector<Shard>> Read(absl::string_view json) {
    if (!ReadStrictJson(json, *this)) return status_;
    if (shards_.empty()) return Invalid("weight_map is missing or empty");
    return std::move(shards_);
  }

 private:
  bool null() override { return Other("null"); }
  bool boolean(bool) override { return Other("a bool"); }
  bool number_integer(number_integer_t) override { return Other("a number"); }
  bool number_unsigned(number_unsigned_t) override { return Other("a number"); }
  bool number_float(number_float_t, const string_t&) override { return Other("a number"); }

  bool string(string_t& file) override {
    if (!in_map_) return Other("a string");
    if (file.empty() || file.size() > kMaxShardBytes || file[0] == '.' ||
        absl::StrContains(file, '/')) {
      return Fail("tensor ", key_, " is in '", file.substr(0, kMaxShardBytes),
                  "'; it must be in a file of the same folder");
    }
    if (++tensors_ > Safetensors::kMaxTensors) {
      return Fail("weight_map has more than ", Safetensors::kMaxTensors, " tensors");
    }
    auto shard = std::find_if(shards_.begin(), shards_.end(),
                              [&](const Shard& known) { return known.file == file; });
    if (shard == shards_.end()) {
      if (shards_.size() == Safetensors::kMaxShards) {
        return Fail("weight_map has more than ", Safetensors::kMaxShards, " shards");
      }
      shard = shards_.insert(shard, Shard{.file = std::move(file), .tensors = {}});
    }
    shard->tensors.push_back(key_);
    return true;
  }

  bool start_object(std::size_t) override {
    if (in_map_) return Other("an object");
    in_map_ = ++depth_ == 2 && key_ == kWeightMap;
    return true;
  }
  bool end_object() override {
    --depth_;
    in_map_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (!Other("an array")) return false;
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (name.size() > kMaxNameBytes) {
      return Fail("a name has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
    }
    key_ = std::move(name);
    return true;
  }
  void OnInvalid(absl::string_view why) override { Fail("invalid JSON: ", why); }

  // A value that is no name of a shard. An error in weight_map, ignored elsewhere.
  bool Other(absl::string_view what) {
    if (depth_ == 0) return Fail("the file is no object");
    return !in_map_ || Fail("tensor ", key_, " is in ", what, "; it must be in a file");
  }

  template <typename... Parts>
  bool Fail(const Parts&... parts) {
    status_ = Invalid(parts...);
    return false;
  }

  static constexpr char kWeightMap[] = "weight_map";
  static constexpr size_t kMaxShardBytes = 255;

  absl::Status status_;
  std::vector<Shard> shards_;
  size_t tensors_ = 0;  // of all shards
  std::string key_;
  int depth_ = 0;
  bool in_map_ = false;  // the next value is of a member of weight_map
};

absl::Status InShard(const std::string& shard, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(shard, ": ", status.message()));
}

absl::Status CheckEntry(const Entry& entry, int64_t data_bytes) {
  const auto [begin, end] = std::pair((*entry.offsets)[0], (*entry.offsets)[1]);
  if (begin > end || end > data_bytes) {
    return Invalid("tensor ", entry.name, " has data_offsets ", ToString(*entry.offsets),
                   "; they must ascend within the ", data_bytes, " bytes of data");
  }
  const TypeInfo* const type = FindType(entry.type);
  if (type == nullptr) return absl::OkStatus();
  std::optional<int64_t> bytes = CheckedProduct(*entry.shape);
  if (bytes) bytes = CheckedMul(*bytes, type->bytes);
  if (bytes == end - begin) return absl::OkStatus();
  return Invalid("tensor ", entry.name, " has ", end - begin, " bytes; its shape ",
                 ToString(*entry.shape), " of ", entry.type, " needs ",
                 bytes ? absl::StrCat(*bytes) : "more than 2^63");
}

// Sorts the entries by place and checks that they follow each other from 0 to the end of the data.
absl::Status CheckTiling(std::vector<Entry>& entries, int64_t data_bytes) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return *a.offsets < *b.offsets; });
  int64_t end = 0;
  for (const Entry& entry : entries) {
    const int64_t begin = entry.offsets->front();
    if (begin != end) {
      return Invalid("tensor ", entry.name, " begins at byte ", begin, " of the data, ",
                     begin < end ? "within another one" : "behind a hole", "; it must begin at ",
                     end);
    }
    end = entry.offsets->back();
  }
  if (end == data_bytes) return absl::OkStatus();
  return Invalid("the tensors have ", end, " bytes; the file has ", data_bytes, " bytes of data");
}

uint64_t LittleEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t n = 0; n < kLengthBytes; ++n) {
    value |= uint64_t{static_cast<unsigned char>(bytes[n])} << 8 * n;
  }
  return value;
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Parse(absl::string_view content) {
  if (content.size() < kLengthBytes) {
    return Invalid("the file has ", content.size(), " bytes; it must have at least ", kLengthBytes);
  }
  const uint64_t length = LittleEndian(content);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return Invalid("the index has ", length, " bytes; at most ", kMaxHeaderBytes, " are allowed");
  }
  if (length > content.size() - kLengthBytes) {
    return Invalid("the index has ", length, " bytes; the file has ", content.size(),
                   " and is truncated");
  }
  const absl::string_view json = content.substr(kLengthBytes, length);
  const absl::string_view data = content.substr(kLengthBytes + length);
  RAPT_ASSIGN_OR_RETURN(std::vector<Entry> entries, IndexReader().Read(json));
  const auto data_bytes = static_cast<int64_t>(data.size());
  for (const Entry& entry : entries) {
    RAPT_RETURN_IF_ERROR(CheckEntry(entry, data_bytes));
  }
  RAPT_RETURN_IF_ERROR(CheckTiling(entries, data_bytes));
  std::map<std::string, SavedTensor> tensors;
  const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
  for (Entry& entry : entries) {
    const auto [begin, end] = std::pair((*entry.offsets)[0], (*entry.offsets)[1]);
    const TypeInfo* const type = FindType(entry.type);
    SavedTensor tensor{std::move(entry.type), type == nullptr ? std::nullopt : type->dtype,
                       *std::move(entry.shape),
                       absl::MakeConstSpan(bytes + begin, static_cast<size_t>(end - begin))};
    tensors.emplace(std::move(entry.name), std::move(tensor));
  }
  return Safetensors(std::move(tensors));
}

absl::Status WhyUnreadable(const std::string& path) {
  std::error_code unknown;  // as if it existed
  return absl::NotFoundError(std::filesystem::status(path, unknown).type() ==
                                     std::filesystem::file_type::not_found
                                 ? "the file does not exist"
                                 : "the file can't be opened, is empty or is not a regular file");
}

absl::StatusOr<Safetensors> Safetensors::Open(const std::string& path) {
  std::shared_ptr<const MappedFile> file = MappedFile::Open(path);
  if (file == nullptr) return WhyUnreadable(path);
  absl::StatusOr<Safetensors> tensors = Parse({file->content().data(), file->content().size()});
  if (tensors.ok()) tensors->files_.push_back(std::move(file));
  return tensors;
}

absl::StatusOr<Safetensors> Safetensors::OpenShards(const std::string& index_path) {
  const std::shared_ptr<const MappedFile> index = MappedFile::Open(index_path);
  if (index == nullptr) return WhyUnreadable(index_path);
  if (index->content().size() > kMaxIndexBytes) {
    return Invalid("the file has ", index->content().size(), " bytes; at most ", kMaxIndexBytes,
                   " are allowed");
  }
  RAPT_ASSIGN_OR_RETURN(const std::vector<Shard> shards,
                        WeightMapReader().Read({index->content().data(), index->content().size()}));
  Tensors tensors;
  std::vector<std::shared_ptr<const MappedFile>> files;
  for (const auto& [file, names] : shards) {
    absl::StatusOr<Safetensors> opened =
        Open(std::filesystem::path(index_path).replace_filename(file));
    if (!opened.ok()) return InShard(file, opened.status());
    for (const std::string& name : names) {
      if (opened->Find(name) != nullptr) continue;
      return InShard(file, Invalid("tensor ", name, " of weight_map is missing"));
    }
    files.push_back(std::move(opened->files_.front()));
    for (const auto& [name, tensor] : opened->tensors()) {
      if (tensors.size() == kMaxTensors) {
        return Invalid("there are more than ", kMaxTensors, " tensors");
      }
      if (!tensors.emplace(name, tensor).second) {
        return InShard(file, Invalid("tensor ", name, " is in another shard, too"));
      }
    }
  }
  Safetensors all(std::move(tensors));
  all.files_ = std::move(files);
  return all;
}

bool Safetensors::unchanged() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const auto& file) { return file->unchanged(); });
}

const SavedTensor* Safetensors::Find(const std::string& name) const {
  const auto tensor = tensors_->find(name);
  return tensor == tensors_->end() ? nullptr : &tensor->second;
}

}  // namespace rapt
