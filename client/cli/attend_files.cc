#include "client/cli/attend_files.h"

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/field_names.h"
#include "base/status_macros.h"
#include "client/cli/tensor_file.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

bool IsInteger(NpyType type) { return type.kind == 'i' || type.kind == 'u'; }

template <typename T>
int64_t Load(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return static_cast<int64_t>(value);
}

// Returns element `index` of an integer array. A uint64 beyond int64 becomes negative; both are
// invalid.
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

// Converts an integer mask of 0 and 1, as tutorials use, to a boolean mask.
absl::Status MakeBoolean(absl::string_view name, NpyArray& mask) {
  std::string flags(mask.size(), '\0');
  for (int64_t at = 0; at < mask.size(); ++at) {
    const int64_t value = IntegerAt(mask, at);
    if (value != 0 && value != 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the %s has type %s, so its elements must be 0 or 1; element %s is %d",
                          name, ToString(mask.type), PositionIn(mask.shape, at), value));
    }
    flags[at] = static_cast<char>(value);
  }
  mask = NpyArray{{'b', 1}, mask.shape, std::move(flags)};
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> ToLengths(absl::string_view name, const NpyArray& array) {
  if (!IsInteger(array.type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has type %s; it must have an integer type", name, ToString(array.type)));
  }
  if (array.shape.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s; it must be [B]", name, ToString(array.shape)));
  }
  std::vector<int64_t> lengths;
  for (int64_t at = 0; at < array.size(); ++at) lengths.push_back(IntegerAt(array, at));
  return lengths;
}

// Reads each input from the file of its flag, or from the archive by its name.
class SourceReader {
 public:
  explicit SourceReader(const CallSources& sources) : sources_(sources) {}

  absl::Status Open() {
    if (!sources_.archive) return absl::OkStatus();
    RAPT_ASSIGN_OR_RETURN(archive_, NpzArchive::Open(*sources_.archive));
    return absl::OkStatus();
  }

  absl::Status Read(Role role, std::optional<NpyArray>* out) const {
    const std::string name(NameOf(role));
    const std::optional<std::string>& file = sources_.files[role];
    absl::StatusOr<NpyArray> array = absl::NotFoundError("");
    if (file) {
      array = LoadArray(*file, name);
    } else if (sources_.arrays[role]) {
      array = *sources_.arrays[role];
    } else if (archive_ && role < kBackwardInputs.front() && archive_->Has(name)) {
      array = archive_->Read(name);
    } else {
      return absl::OkStatus();
    }
    if (!array.ok()) return array.status();
    *out = *std::move(array);
    return absl::OkStatus();
  }

 private:
  const CallSources& sources_;
  std::optional<NpzArchive> archive_;
};

absl::StatusOr<LoadedTensor> FloatTensor(absl::string_view name, NpyArray array,
                                         const std::string& dtype) {
  RAPT_ASSIGN_OR_RETURN(const DType type, FloatTypeOf(array, std::string(name), dtype));
  Shape shape = array.shape;
  return LoadedTensor{std::move(array), type, std::move(shape)};
}

// Only the mask of attention, or of a layer, may be added to the scores.
absl::StatusOr<LoadedTensor> MaskTensor(absl::string_view name, NpyArray array,
                                        const std::string& dtype) {
  if (IsInteger(array.type)) {
    RAPT_RETURN_IF_ERROR(MakeBoolean(name, array));
  }
  if (array.type.kind != 'b' && name != "mask" && name != "attn_mask") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has type %s; it must be bool, or integers 0 and 1", name, ToString(array.type)));
  }
  if (array.type.kind != 'b') return FloatTensor(name, std::move(array), dtype);
  Shape shape = array.shape;
  return LoadedTensor{std::move(array), client::DType::kBool, std::move(shape)};
}

// Indices of any integer type as INT32.
absl::StatusOr<LoadedTensor> IndexTensor(absl::string_view name, const NpyArray& array) {
  if (!IsInteger(array.type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has type %s; it must have an integer type", name, ToString(array.type)));
  }
  std::string bytes(array.size() * sizeof(int32_t), '\0');
  for (int64_t at = 0; at < array.size(); ++at) {
    const int64_t value = IntegerAt(array, at);
    const auto index = static_cast<int32_t>(value);
    if (index != value) {
      return absl::InvalidArgumentError(absl::StrFormat("%s%s is %d, which is not an INT32", name,
                                                        PositionIn(array.shape, at), value));
    }
    std::memcpy(bytes.data() + at * sizeof(index), &index, sizeof(index));
  }
  return LoadedTensor{NpyArray{{'i', 4}, array.shape, std::move(bytes)}, client::DType::kInt32,
                      array.shape};
}

// `usual` as in LoadTensor().
absl::StatusOr<LoadedTensor> TensorOf(absl::string_view name, DType usual, NpyArray array,
                                      const std::string& dtype) {
  switch (usual) {
    case DType::kBool:
      return MaskTensor(name, std::move(array), dtype);
    case DType::kInt64:
      return IntegerTensor(name, array);
    case DType::kInt32:
      return IndexTensor(name, array);
    default:
      return FloatTensor(name, std::move(array), dtype);
  }
}

void PrependOnes(Shape& shape, size_t rank) {
  while (shape.size() < rank) shape.insert(shape.begin(), 1);
}

// Changes [S, D] to [1, S, D], also of relative_query. Past keys and values and positions get
// leading axes of 1 as well.
void Widen2D(InputMap<std::optional<LoadedTensor>>& tensors) {
  for (Role role :
       {Role::kQ, Role::kK, Role::kV, Role::kPastKey, Role::kPastValue, Role::kRelativeQuery}) {
    if (tensors[role]) PrependOnes(tensors[role]->shape, InfoOf(role).has_layout ? 3 : 4);
  }
  for (Role role : {Role::kPositionIds, Role::kKeyPositionIds}) {
    if (tensors[role]) PrependOnes(tensors[role]->shape, 2);
  }
  for (Role role : kBackwardInputs) {
    if (tensors[role]) PrependOnes(tensors[role]->shape, 3);
  }
}

using InputArrays = InputMap<std::optional<NpyArray>>;

absl::Status CheckPresent(const CallSources& sources, const InputArrays& arrays) {
  if (!arrays[Role::kQ]) {
    return absl::InvalidArgumentError(
        sources.archive ? absl::StrCat(*sources.archive, " has no member q, and --q is not set")
                        : "no query given; set --q FILE or name an .npz archive with a member q");
  }
  if (!sources.values_in_keys && arrays[Role::kK].has_value() != arrays[Role::kV].has_value()) {
    return absl::InvalidArgumentError(arrays[Role::kK]
                                          ? "k is given without v; give both, or neither for "
                                            "self-attention"
                                          : "v is given without k; give both, or neither for "
                                            "self-attention");
  }
  return absl::OkStatus();
}

absl::StatusOr<InputArrays> ReadArrays(const CallSources& sources) {
  SourceReader reader(sources);
  InputArrays arrays;
  RAPT_RETURN_IF_ERROR(reader.Open());
  for (Role role : kAllInputs) RAPT_RETURN_IF_ERROR(reader.Read(role, &arrays[role]));
  RAPT_RETURN_IF_ERROR(CheckPresent(sources, arrays));
  return arrays;
}

absl::Status MakeTensors(InputArrays arrays, const std::string& dtype, LoadedCall* call) {
  for (Role role : kAllInputs) {
    if (!arrays[role] || role == Role::kKeyLengths) continue;
    RAPT_ASSIGN_OR_RETURN(call->tensors[role], TensorOf(NameOf(role), InfoOf(role).usual_dtype,
                                                        *std::move(arrays[role]), dtype));
  }
  const std::optional<NpyArray>& key_lengths = arrays[Role::kKeyLengths];
  if (!key_lengths) return absl::OkStatus();
  RAPT_ASSIGN_OR_RETURN(call->key_lengths, ToLengths("key_lengths", *key_lengths));
  return absl::OkStatus();
}

}  // namespace

absl::string_view NameOf(Role role) { return kNativeNames[role]; }

absl::StatusOr<LoadedTensor> IntegerTensor(absl::string_view name, const NpyArray& array) {
  if (!IsInteger(array.type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has type %s; it must have an integer type", name, ToString(array.type)));
  }
  std::string values(static_cast<size_t>(array.size()) * sizeof(int64_t), '\0');
  for (int64_t at = 0; at < array.size(); ++at) {
    const int64_t value = IntegerAt(array, at);
    std::memcpy(values.data() + at * int64_t{sizeof(value)}, &value, sizeof(value));
  }
  return LoadedTensor{NpyArray{{'i', 8}, array.shape, std::move(values)}, client::DType::kInt64,
                      array.shape};
}

absl::StatusOr<LoadedTensor> LoadTensor(const std::string& path, std::string_view name,
                                        const std::string& dtype, DType usual) {
  RAPT_ASSIGN_OR_RETURN(NpyArray array, LoadArray(path, name));
  return TensorOf({name.data(), name.size()}, usual, std::move(array), dtype);
}

absl::StatusOr<std::vector<int64_t>> LoadLengths(const std::string& path, std::string_view name) {
  RAPT_ASSIGN_OR_RETURN(const NpyArray array, LoadArray(path, name));
  return ToLengths(std::string(name), array);
}

client::AttendCall LoadedCall::call() const {
  client::AttendCall call = attributes;
  call.k = tensors[Role::kQ]->view();
  if (!call.v_head_size) call.v = call.k;
  for (Role role : kInputTensors) {
    if (!tensors[role]) continue;
    client::FindCallTensor(NameOf(role))->Set(call, tensors[role]->view());
  }
  call.key_lengths = key_lengths;
  return call;
}

client::BackwardCall LoadedCall::backward() const {
  client::BackwardCall backward = {.call = call(), .gradients = gradients};
  for (Role role : kBackwardInputs) {
    if (!tensors[role]) continue;
    client::FindBackwardTensor(NameOf(role))->Set(backward, tensors[role]->view());
  }
  return backward;
}

absl::StatusOr<LoadedCall> LoadCall(const CallSources& sources) {
  RAPT_ASSIGN_OR_RETURN(InputArrays arrays, ReadArrays(sources));
  LoadedCall loaded;
  RAPT_RETURN_IF_ERROR(MakeTensors(std::move(arrays), sources.dtype, &loaded));
  loaded.is_2d = loaded.tensors[Role::kQ]->shape.size() == 2;
  if (loaded.is_2d) Widen2D(loaded.tensors);
  return loaded;
}

absl::StatusOr<LoadedTensor> PaddingMask(const NpyArray& ids, int64_t pad_token, int64_t batch,
                                         int64_t keys) {
  if (!IsInteger(ids.type)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--pad-ids has type %s; it must have an integer type", ToString(ids.type)));
  }
  if (ids.shape != Shape{keys} && ids.shape != Shape{batch, keys}) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--pad-ids has shape %s; it must be [%d] or [%d, %d], a token per key",
                        ToString(ids.shape), keys, batch, keys));
  }
  const int64_t rows = ids.shape.size() == 1 ? 1 : batch;
  std::string visible;
  for (int64_t at = 0; at < ids.size(); ++at) {
    visible.push_back(static_cast<char>(IntegerAt(ids, at) != pad_token));
  }
  const Shape shape = {rows, 1, 1, keys};
  return LoadedTensor{NpyArray{{'b', 1}, shape, std::move(visible)}, client::DType::kBool, shape};
}

Shape ShapeInFile(const Shape& shape, HeadAxis head_axis, bool is_2d) {
  if (!is_2d) return shape;
  Shape squeezed(shape.begin() + 1, shape.end());
  if (head_axis == HeadAxis::kSecond && squeezed[0] == 1) squeezed.erase(squeezed.begin());
  return squeezed;
}

}  // namespace rapt
