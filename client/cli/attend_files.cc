#include "client/cli/attend_files.h"

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace rapt {
namespace {

bool IsInteger(NpyType type) { return type.kind == 'i' || type.kind == 'u'; }

template <typename T>
int64_t Load(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return static_cast<int64_t>(value);
}

// Element `index` of an integer array. uint64 beyond int64 comes out negative: no valid value
// either way.
int64_t IntegerAt(const NpyArray& array, int64_t index) {
  const std::byte* element = array.bytes().data() + index * array.type.bytes;
  const bool is_signed = array.type.kind == 'i';
  switch (array.type.bytes) {
    case 1:
      return is_signed ? Load<int8_t>(element) : Load<uint8_t>(element);
    case 2:
      return is_signed ? Load<int16_t>(element) : Load<uint16_t>(element);
    case 4:
      return is_signed ? Load<int32_t>(element) : Load<uint32_t>(element);
    default:
      return is_signed ? Load<int64_t>(element) : Load<uint64_t>(element);
  }
}

// "[0, 3]": where element `index` of a row-major array is.
std::string Position(const Shape& shape, int64_t index) {
  Shape position(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    position[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return ToString(position);
}

// The tutorials' masks of 0 and 1 mean boolean.
absl::Status MakeBoolean(NpyArray& mask) {
  std::string flags(mask.size(), '\0');
  for (int64_t at = 0; at < mask.size(); ++at) {
    const int64_t value = IntegerAt(mask, at);
    if (value != 0 && value != 1) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the mask holds %s, which means boolean, but element %s is %d; it must be 0 or 1",
          ToString(mask.type), Position(mask.shape, at), value));
    }
    flags[at] = static_cast<char>(value);
  }
  mask = NpyArray{{'b', 1}, mask.shape, std::move(flags), 0};
  return absl::OkStatus();
}

absl::Status MakeInt64(NpyArray& lengths) {
  if (!IsInteger(lengths.type)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("key_lengths holds %s; it must be integers", ToString(lengths.type)));
  }
  std::string values;
  for (int64_t at = 0; at < lengths.size(); ++at) {
    const int64_t value = IntegerAt(lengths, at);
    values.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  lengths = NpyArray{{'i', 8}, lengths.shape, std::move(values), 0};
  return absl::OkStatus();
}

// Finds each input by its name: in the file that was named for it, or in the archive.
class SourceReader {
 public:
  explicit SourceReader(const AttendSources& sources) : sources_(sources) {}

  absl::Status Open() {
    if (!sources_.archive) return absl::OkStatus();
    absl::StatusOr<NpzArchive> archive = NpzArchive::Open(*sources_.archive);
    if (archive.ok()) archive_ = *std::move(archive);
    return archive.status();
  }

  absl::Status Read(const char* name, const std::optional<std::string>& file,
                    std::optional<NpyArray>* out) const {
    absl::StatusOr<NpyArray> array = absl::NotFoundError("");
    if (file) {
      array = LoadArray(*file, name);
    } else if (archive_ && archive_->Has(name)) {
      array = archive_->Read(name);
    } else {
      return absl::OkStatus();
    }
    if (array.ok()) *out = *std::move(array);
    return array.status();
  }

 private:
  const AttendSources& sources_;
  std::optional<NpzArchive> archive_;
};

absl::StatusOr<TensorSpec> FloatSpec(const char* name, const NpyArray& array,
                                     const std::string& dtype) {
  const absl::StatusOr<DType> type = FloatTypeOf(array, name, dtype);
  if (!type.ok()) return type.status();
  return TensorSpec{*type, array.shape};
}

absl::StatusOr<TensorSpec> MaskSpec(NpyArray& mask, const std::string& dtype) {
  if (IsInteger(mask.type)) {
    if (absl::Status made = MakeBoolean(mask); !made.ok()) return made;
  }
  if (mask.type.kind == 'b') return TensorSpec{DType::kBool, mask.shape};
  return FloatSpec("mask", mask, dtype);
}

void LeadWithOnes(Shape& shape, size_t rank) {
  while (shape.size() < rank) shape.insert(shape.begin(), 1);
}

// [S, D] is [1, S, D]; a past beside it leads with axes of 1 as well.
void Widen2D(OperatorCall& call) {
  for (TensorSpec* spec : {&call.q, &call.k, &call.v}) LeadWithOnes(spec->shape, 3);
  if (call.past_key) LeadWithOnes(call.past_key->shape, 4);
  if (call.past_value) LeadWithOnes(call.past_value->shape, 4);
}

absl::Status ReadArrays(const AttendSources& sources, LoadedCall* loaded) {
  SourceReader reader(sources);
  std::optional<NpyArray> q;
  absl::Status status = reader.Open();
  if (status.ok()) status = reader.Read("q", sources.q, &q);
  if (status.ok()) status = reader.Read("k", sources.k, &loaded->k);
  if (status.ok()) status = reader.Read("v", sources.v, &loaded->v);
  if (status.ok()) status = reader.Read("mask", sources.mask, &loaded->mask);
  if (status.ok()) status = reader.Read("past_key", sources.past_key, &loaded->past_key);
  if (status.ok()) status = reader.Read("past_value", sources.past_value, &loaded->past_value);
  if (status.ok()) status = reader.Read("key_lengths", sources.key_lengths, &loaded->key_lengths);
  if (!status.ok()) return status;
  if (!q) {
    return absl::InvalidArgumentError(
        sources.archive ? absl::StrCat(*sources.archive, " has no member q, and there is no --q")
                        : "which query? --q FILE, or an .npz archive with a member q");
  }
  if (loaded->k.has_value() != loaded->v.has_value()) {
    return absl::InvalidArgumentError(loaded->k
                                          ? "there is a k but no v; give both, or neither for "
                                            "self-attention"
                                          : "there is a v but no k; give both, or neither for "
                                            "self-attention");
  }
  loaded->q = *std::move(q);
  return absl::OkStatus();
}

template <typename Spec>
absl::Status Store(absl::StatusOr<TensorSpec> spec, Spec* out) {
  if (spec.ok()) *out = *std::move(spec);
  return spec.status();
}

absl::Status DescribeTensors(const std::string& dtype, LoadedCall* loaded) {
  OperatorCall& call = loaded->call;
  absl::Status status = Store(FloatSpec("q", loaded->q, dtype), &call.q);
  call.k = call.v = call.q;
  if (status.ok() && loaded->k) status = Store(FloatSpec("k", *loaded->k, dtype), &call.k);
  if (status.ok() && loaded->v) status = Store(FloatSpec("v", *loaded->v, dtype), &call.v);
  if (status.ok() && loaded->mask) status = Store(MaskSpec(*loaded->mask, dtype), &call.attn_mask);
  if (status.ok() && loaded->past_key) {
    status = Store(FloatSpec("past_key", *loaded->past_key, dtype), &call.past_key);
  }
  if (status.ok() && loaded->past_value) {
    status = Store(FloatSpec("past_value", *loaded->past_value, dtype), &call.past_value);
  }
  if (status.ok() && loaded->key_lengths) {
    status = MakeInt64(*loaded->key_lengths);
    call.nonpad_kv_seqlen = {DType::kInt64, loaded->key_lengths->shape};
  }
  return status;
}

}  // namespace

AttentionInputs LoadedCall::inputs() const {
  AttentionInputs inputs;
  inputs.q = q.bytes();
  inputs.k = k ? k->bytes() : q.bytes();
  inputs.v = v ? v->bytes() : q.bytes();
  if (mask) inputs.mask = mask->bytes();
  if (past_key) inputs.past_key = past_key->bytes();
  if (past_value) inputs.past_value = past_value->bytes();
  if (key_lengths) inputs.key_lengths = key_lengths->bytes();
  return inputs;
}

absl::StatusOr<LoadedCall> LoadCall(const AttendSources& sources) {
  LoadedCall loaded;
  absl::Status status = ReadArrays(sources, &loaded);
  if (status.ok()) status = DescribeTensors(sources.dtype, &loaded);
  if (!status.ok()) return status;
  loaded.is_2d = loaded.q.shape.size() == 2;
  if (loaded.is_2d) Widen2D(loaded.call);
  return loaded;
}

Shape ShapeInFile(const Shape& shape, HeadAxis head_axis, bool is_2d) {
  if (!is_2d) return shape;
  Shape squeezed(shape.begin() + 1, shape.end());
  if (head_axis == HeadAxis::kSecond && squeezed[0] == 1) squeezed.erase(squeezed.begin());
  return squeezed;
}

}  // namespace rapt
