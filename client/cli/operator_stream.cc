#include "client/cli/operator_stream.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "client/cli/progress_bar.h"

namespace rapt {
namespace {

using client::ModelCall;
using client::ModelResult;
using client::TensorView;

constexpr int64_t kUsualChunkBytes = 8 << 20;

const TensorSchema& RowOf(absl::Span<const TensorSchema> rows, absl::string_view name) {
  return *absl::c_find_if(rows, [&](const TensorSchema& row) { return row.name == name; });
}

bool HasTokens(const TensorSchema& row) { return row.per_token && row.slot != Role::kKeyLengths; }

// Tokens [begin, begin + count) of a tensor [B, T, ...].
std::string TokensOf(const TensorView& tensor, int64_t begin, int64_t count) {
  const int64_t rows = tensor.shape[0] * tensor.shape[1];
  const size_t token = tensor.data.size() / static_cast<size_t>(std::max<int64_t>(1, rows));
  std::string bytes;
  for (int64_t b = 0; b < tensor.shape[0]; ++b) {
    const size_t first = static_cast<size_t>(b * tensor.shape[1] + begin) * token;
    bytes.append(reinterpret_cast<const char*>(tensor.data.data()) + first,
                 static_cast<size_t>(count) * token);
  }
  return bytes;
}

// How many of the tokens [begin, begin + count) count.
std::string LengthsOf(const TensorView& lengths, int64_t begin, int64_t count) {
  std::vector<int64_t> values(lengths.data.size() / sizeof(int64_t));
  std::memcpy(values.data(), lengths.data.data(), lengths.data.size());
  for (int64_t& length : values) length = std::clamp<int64_t>(length - begin, 0, count);
  return {reinterpret_cast<const char*>(values.data()), lengths.data.size()};
}

// The part of a call with the tokens [begin, begin + count).
class Part {
 public:
  Part(const OperatorSchema& schema, const ModelCall& whole, int64_t begin, int64_t count,
       bool is_last) {
    for (const auto& [name, view] : whole.inputs) {
      const TensorSchema& row = RowOf(schema.inputs, name);
      TensorView part = view;
      if (row.per_token) {
        bytes_.push_back((HasTokens(row) ? TokensOf : LengthsOf)(view, begin, count));
        part.data = {reinterpret_cast<const std::byte*>(bytes_.back().data()),
                     bytes_.back().size()};
        if (HasTokens(row)) part.shape[1] = count;
      } else if (begin > 0) {
        continue;  // the server keeps it
      }
      call.inputs.emplace_back(name, std::move(part));
    }
    if (begin == 0) call.parameters = whole.parameters;
    for (const std::string& name : whole.outputs) {
      if (is_last || !RowOf(schema.outputs, name).next_input) call.outputs.push_back(name);
    }
  }

  ModelCall call;  // refers to this object

 private:
  std::deque<std::string> bytes_;
};

// Joins outputs [B, T, E] of consecutive tokens.
class Outputs {
 public:
  void Add(const client::Tensor& output) {
    const Shape& shape = output.shape();
    rows_.resize(static_cast<size_t>(shape[0]));
    const size_t row = output.bytes().size() / std::max<size_t>(1, rows_.size());
    for (size_t b = 0; b < rows_.size(); ++b) {
      rows_[b].append(reinterpret_cast<const char*>(output.bytes().data()) + b * row, row);
    }
    dtype_ = output.dtype();
    shape_ = {shape[0], shape_.empty() ? shape[1] : shape_[1] + shape[1], shape[2]};
  }

  client::Tensor Join() const {
    std::string bytes;
    for (const std::string& row : rows_) bytes += row;
    return {dtype_, shape_, std::move(bytes)};
  }

 private:
  std::vector<std::string> rows_;  // of each batch row
  client::DType dtype_ = client::DType::kFloat32;
  Shape shape_;
};

}  // namespace

absl::StatusOr<ModelResult> StreamTokens(const OperatorSchema& schema, const ModelCall& call,
                                         const CallerFlags& flags, client::Client& server) {
  RAPT_CHECK(schema.method == "LinearAttend", "the operator has a stream");
  int64_t length = 0;
  int64_t bytes = 0;
  for (const auto& [name, view] : call.inputs) {
    if (!HasTokens(RowOf(schema.inputs, name))) continue;
    length = view.shape[1];
    bytes += static_cast<int64_t>(view.data.size());
  }
  const int64_t token_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, length));
  const int64_t chunk = flags.chunk.value_or(std::max<int64_t>(1, kUsualChunkBytes / token_bytes));
  const std::unique_ptr<client::ModelStream> stream = server.LinearAttendStream();
  const std::string output(schema.outputs.front().name);
  ProgressBar bar;
  Outputs outputs;
  ModelResult last;
  int64_t begin = 0;
  do {
    const int64_t count = std::min(chunk, length - begin);
    const Part part(schema, call, begin, count, begin + count == length);
    RAPT_ASSIGN_OR_RETURN(last, stream->Infer(part.call));
    outputs.Add(last.outputs[output]);
    begin += count;
    bar.Show(begin * token_bytes, bytes);
  } while (begin < length);
  RAPT_RETURN_IF_ERROR(stream->Finish());
  last.outputs[output] = outputs.Join();
  return last;
}

}  // namespace rapt
