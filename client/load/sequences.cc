#include "client/load/sequences.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cpp/cache_codec.h"
#include "client/cpp/codec.h"
#include "client/cpp/deadline.h"
#include "client/cpp/unary_calls.h"
#include "client/load/call_data.h"
#include "proto/rapt/v1/cache.pb.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;
using Responses = std::vector<grpc::ByteBuffer>;

constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBatch = 1024;
// Of one call: a prompt is computed in chunks, so that others' steps are not held up.
constexpr int64_t kPromptRows = 512;

// A step has as many rows as new tokens.
int64_t StepRows(const CallShape& shape) { return shape.queries < shape.keys ? shape.queries : 1; }

CallShape StepShape(CallShape shape) {
  shape.queries = StepRows(shape);
  shape.causal = true;
  return shape;
}

// Not chosen by the load.
CallShape PromptShape(CallShape shape) {
  shape.batch = 1;
  shape.queries = shape.keys;
  shape.causal = true;
  shape.weight = 0;
  return shape;
}

CallShape NumbersOf(CallShape shape, int64_t tokens) {
  shape.batch = 1;
  shape.queries = shape.keys = tokens;
  return shape;
}

// The tokens of the sequences of a stream: those of the prompt, which all have, then for each step
// those of the items, one after the other. Immutable and therefore thread-safe.
class SequenceData {
 public:
  SequenceData(const CallShape& shape, int64_t steps, uint64_t seed)
      : shape_(StepShape(shape)),
        numbers_(NumbersOf(shape, shape.keys + steps * shape.batch * shape_.queries), seed) {}

  const CallShape& shape() const { return shape_; }
  int64_t prompt() const { return shape_.keys; }
  int64_t items() const { return shape_.batch; }
  int64_t rows() const { return shape_.queries; }
  // The first token of a step's item.
  int64_t FirstOf(int64_t step, int64_t item) const {
    return prompt() + (step * items() + item) * rows();
  }

  client::TensorView q(int64_t first, int64_t count) const {
    return TokensOf(numbers_.call().q, shape_.query_heads, first, count);
  }
  client::TensorView k(int64_t first, int64_t count) const {
    return TokensOf(numbers_.call().k, shape_.kv_heads, first, count);
  }
  client::TensorView v(int64_t first, int64_t count) const {
    return TokensOf(numbers_.call().v, shape_.kv_heads, first, count);
  }

  // Compares a step's y with the definition.
  absl::Status Check(int64_t step, const client::Tensor& y) const {
    const client::Shape shape = {items() * rows(), shape_.query_heads, shape_.head_size};
    if (y.shape() != shape) {
      return absl::InternalError(absl::StrFormat("the response to %s has y of shape %s",
                                                 Describe(shape_), client::ToString(y.shape())));
    }
    for (const int64_t item : std::set<int64_t>{0, items() / 2, items() - 1}) {
      RAPT_RETURN_IF_ERROR(CheckItem(step, item, y));
    }
    return absl::OkStatus();
  }

 private:
  // The numbers of a call, read as [tokens, heads, size].
  client::TensorView TokensOf(const client::TensorView& view, int64_t heads, int64_t first,
                              int64_t count) const {
    const auto row = static_cast<size_t>(heads * shape_.head_size * client::SizeOf(shape_.dtype));
    return {shape_.dtype,
            {count, heads, shape_.head_size},
            view.data.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(count) * row)};
  }

  absl::Status CheckItem(int64_t step, int64_t item, const client::Tensor& y) const {
    const Problem problem{.dtype = shape_.dtype,
                          .batch = 1,
                          .query_heads = shape_.query_heads,
                          .kv_heads = shape_.kv_heads,
                          .query_length = rows(),
                          .key_length = prompt() + (step + 1) * rows(),
                          .head_size = shape_.head_size,
                          .value_head_size = shape_.head_size,
                          .causal = true,
                          .alignment = Alignment::kBottomRight};
    const std::vector<std::byte> keys = Gather(&SequenceData::k, step, item);
    const std::vector<std::byte> values = Gather(&SequenceData::v, step, item);
    const client::TensorView queries = q(FirstOf(step, item), rows());
    Arguments arguments;
    arguments.inputs[Role::kQ] = View(queries.data.data(), shape_.query_heads, rows());
    arguments.inputs[Role::kK] = View(keys.data(), shape_.kv_heads, problem.key_length);
    arguments.inputs[Role::kV] = View(values.data(), shape_.kv_heads, problem.key_length);
    const auto offset = static_cast<size_t>(item) * queries.data.size();
    return CheckRows(problem, arguments,
                     View(y.bytes().data() + offset, shape_.query_heads, rows()), shape_);
  }

  // Of [tokens, heads, size].
  TensorView View(const std::byte* data, int64_t heads, int64_t tokens) const {
    const int64_t size = shape_.head_size;
    return {.data = data,
            .dtype = shape_.dtype,
            .dims = {1, heads, tokens, size},
            .strides = {0, size, heads * size, 1}};
  }

  // An item's tokens up to a step.
  std::vector<std::byte> Gather(client::TensorView (SequenceData::*tensor)(int64_t, int64_t) const,
                                int64_t step, int64_t item) const {
    const absl::Span<const std::byte> prompt_bytes = (this->*tensor)(0, prompt()).data;
    std::vector<std::byte> bytes(prompt_bytes.begin(), prompt_bytes.end());
    for (int64_t s = 0; s <= step; ++s) {
      const absl::Span<const std::byte> more = (this->*tensor)(FirstOf(s, item), rows()).data;
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }

  const CallShape shape_;
  const CallData numbers_;
};

// --- Calls ---------------------------------------------------------------------------------------

OutgoingCall CallOf(const char* method, const client::RequestMessage& message) {
  return {.method = absl::StrFormat("/rapt.v1.CacheService/%s", method),
          .encoded = std::make_shared<const EncodedCall>(
              EncodedCall{.messages = {ToByteBuffer(message)}, .message_bytes = message.size()}),
          .is_measured = false};
}

OutgoingCall CallOf(const char* method, const google::protobuf::MessageLite& request) {
  client::RequestMessage message;
  message.Append(request.SerializeAsString());
  return CallOf(method, message);
}

absl::Status SendNow(const OutgoingCall& call, const client::Connection& connection,
                     nanoseconds deadline, Responses& responses) {
  grpc::ClientContext context;
  context.set_deadline(client::Deadline::After(deadline).ToGrpc());
  const grpc::Status status =
      client::SendAndWait(connection, call.method.c_str(), context, call.encoded->messages.front(),
                          responses.emplace_back());
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// Returns an empty message if the response is malformed.
template <typename Message>
Message Parse(const Responses& responses) {
  Message message;
  grpc::ByteBuffer bytes = responses.empty() ? grpc::ByteBuffer() : responses.front();
  if (!grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok()) message.Clear();
  return message;
}

// What the streams of a load share.
struct Sequences {
  SequenceOptions options;
  std::vector<std::unique_ptr<const SequenceData>> data;
  std::vector<client::KnownItem> parents = {};  // of kSharedPrefix, one for each shape
};

class SequenceCalls final : public CallSource {
 public:
  // `items`: at most, in place of those of the shape.
  SequenceCalls(const Sequences& sequences, const client::Connection& connection,
                int64_t items = kMaxBatch)
      : sequences_(sequences), connection_(connection), most_items_(items) {}

  absl::Status Prepare(size_t shape) override {
    if (MeasuresPrompts()) return absl::OkStatus();
    while (!Next(shape).is_measured) {
      Responses responses;
      absl::Status status = SendNow(*pending_, connection_, sequences_.options.deadline, responses);
      OnDone(status, std::move(responses));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  OutgoingCall Next(size_t shape) override {
    if (!pending_) {
      if (items_.empty()) shape_ = shape;
      pending_ = Make();
    }
    return *pending_;
  }

  void OnDone(const absl::Status& status, Responses responses) override {
    pending_.reset();
    if (status.ok()) return Advance(std::move(responses));
    Go(phase_ == Phase::kEnd || items_.empty() ? Phase::kBegin : Phase::kEnd);
  }

  absl::Status Check() const override {
    if (!last_) return absl::NotFoundError("no successful step");
    const SequenceData& data = *sequences_.data[last_->shape];
    auto result = client::Decode(static_cast<size_t>(last_->items), {},
                                 Parse<v1::AttendCachedResponse>(last_->responses));
    return result.ok() ? data.Check(last_->step, result->y) : result.status();
  }

  void Release() override {
    if (items_.empty()) return;
    Responses responses;
    SendNow(Close(), connection_, sequences_.options.deadline, responses).IgnoreError();
    items_.clear();
  }

  // REQUIRES: Prepare() has succeeded.
  const client::KnownItem& first() const { return items_.front(); }

 private:
  enum class Phase : uint8_t { kBegin, kPrompt, kSteps, kTruncate, kEnd };

  const SequenceData& data() const { return *sequences_.data[shape_]; }
  int64_t Items() const { return std::min(most_items_, data().items()); }
  bool MeasuresPrompts() const {
    return sequences_.options.scenario == CacheScenario::kPrefillDecode;
  }
  // The next tokens of a prompt.
  int64_t Chunk() const { return std::min(kPromptRows, data().prompt() - items_[item_].at); }

  OutgoingCall Make() const {
    switch (phase_) {
      case Phase::kBegin:
        return sequences_.parents.empty() ? Create() : Fork();
      case Phase::kPrompt:
        return MeasuresPrompts() ? Prefill() : Append();
      case Phase::kSteps:
        return Step();
      case Phase::kTruncate:
        return Truncate();
      case Phase::kEnd:
        break;
    }
    return Close();
  }

  OutgoingCall Create() const {
    const CallShape& shape = data().shape();
    client::CacheOptions options;
    options.shapes = {{.kv_heads = shape.kv_heads, .head_size = shape.head_size}};
    options.dtype = shape.dtype;
    return CallOf("Create", client::Encode(options));
  }

  OutgoingCall Fork() const {
    const client::KnownItem& parent = sequences_.parents[shape_];
    v1::ForkRequest request;
    request.set_cache(parent.cache);
    request.set_generation(parent.generation);
    request.set_length(parent.at);
    return CallOf("Fork", request);
  }

  OutgoingCall Append() const {
    const client::KnownItem& item = items_[item_];
    const client::CacheTokens tokens{0, data().k(item.at, Chunk()), data().v(item.at, Chunk())};
    return CallOf("Append", *client::EncodeAppend({tokens}, {item}, kMaxMessageBytes));
  }

  // Appends tokens and attends with as many rows.
  OutgoingCall Attend(absl::Span<const client::KnownItem> items, int64_t rows, int64_t first,
                      size_t shape) const {
    const int64_t count = static_cast<int64_t>(items.size()) * rows;
    const std::vector<client::CacheItem> parts(
        items.size(),
        {.rows = static_cast<int32_t>(rows), .new_tokens = static_cast<int32_t>(rows)});
    const client::CacheAttendCall call{
        .q = data().q(first, count), .k = data().k(first, count), .v = data().v(first, count)};
    OutgoingCall outgoing =
        CallOf("Attend", *client::EncodeCachedAttend(parts, items, call, kMaxMessageBytes));
    outgoing.shape = shape;
    outgoing.is_measured = true;
    return outgoing;
  }

  OutgoingCall Prefill() const {
    return Attend({&items_[item_], 1}, Chunk(), items_[item_].at, sequences_.data.size() + shape_);
  }

  OutgoingCall Step() const {
    return Attend(items_, data().rows(), data().FirstOf(step_, 0), shape_);
  }

  OutgoingCall Truncate() const {
    v1::TruncateRequest request;
    request.set_cache(items_[item_].cache);
    request.set_generation(items_[item_].generation);
    request.set_length(data().prompt());
    return CallOf("Truncate", request);
  }

  OutgoingCall Close() const {
    v1::Ids ids;
    for (const client::KnownItem& item : items_) ids.add_caches(item.cache);
    return CallOf("Close", ids);
  }

  void Go(Phase phase) {
    phase_ = phase;
    item_ = 0;
    step_ = 0;
    if (phase == Phase::kBegin) items_.clear();
  }

  void Advance(Responses responses) {
    switch (phase_) {
      case Phase::kBegin: {
        const auto cache = Parse<v1::Cache>(responses);
        const bool is_fork = !sequences_.parents.empty();
        items_.push_back({cache.id(), cache.generation(), is_fork ? data().prompt() : 0});
        if (static_cast<int64_t>(items_.size()) == Items()) {
          Go(is_fork ? Phase::kSteps : Phase::kPrompt);
        }
        return;
      }
      case Phase::kPrompt:
        items_[item_].at += Chunk();
        if (items_[item_].at == data().prompt() && ++item_ == items_.size()) Go(Phase::kSteps);
        return;
      case Phase::kSteps:
        last_ = {shape_, step_, Items(), std::move(responses)};
        for (client::KnownItem& item : items_) item.at += data().rows();
        if (++step_ == sequences_.options.steps) {
          Go(MeasuresPrompts() ? Phase::kEnd : Phase::kTruncate);
        }
        return;
      case Phase::kTruncate:
        items_[item_].generation = Parse<v1::Cache>(responses).generation();
        items_[item_].at = data().prompt();
        if (++item_ == items_.size()) Go(Phase::kSteps);
        return;
      case Phase::kEnd:
        return Go(Phase::kBegin);
    }
  }

  struct LastStep {
    size_t shape;
    int64_t step;
    int64_t items;
    Responses responses;
  };

  const Sequences& sequences_;
  const client::Connection& connection_;
  const int64_t most_items_;
  size_t shape_ = 0;
  Phase phase_ = Phase::kBegin;
  std::vector<client::KnownItem> items_;
  size_t item_ = 0;   // of phases that treat one after the other
  int64_t step_ = 0;  // since the prompt
  std::optional<OutgoingCall> pending_;
  std::optional<LastStep> last_;
};

class SequenceWorkload final : public Workload {
 public:
  SequenceWorkload(const SequenceOptions& options, const std::vector<CallShape>& shapes) {
    sequences_.options = options;
    for (size_t n = 0; n < shapes.size(); ++n) {
      sequences_.data.push_back(
          std::make_unique<const SequenceData>(shapes[n], options.steps, options.seed + n));
      shapes_.push_back(StepShape(shapes[n]));
    }
    if (options.scenario != CacheScenario::kPrefillDecode) return;
    for (const CallShape& shape : shapes) shapes_.push_back(PromptShape(shape));
  }

  ~SequenceWorkload() override {
    for (const auto& parent : parents_) parent->Release();
  }

  const std::vector<CallShape>& shapes() const override { return shapes_; }

  absl::StatusOr<std::unique_ptr<CallSource>> NewSource(
      const client::Connection* connection) override {
    const bool has_parents = sequences_.options.scenario == CacheScenario::kSharedPrefix;
    if (has_parents && parents_.empty()) {
      RAPT_RETURN_IF_ERROR(MakeParents(*connection));
    }
    return std::make_unique<SequenceCalls>(sequences_, *connection);
  }

 private:
  absl::Status MakeParents(const client::Connection& connection) {
    std::vector<client::KnownItem> known;
    for (size_t shape = 0; shape < sequences_.data.size(); ++shape) {
      SequenceCalls& parent = *parents_.emplace_back(
          std::make_unique<SequenceCalls>(sequences_, connection, /*items=*/1));
      RAPT_RETURN_IF_ERROR(parent.Prepare(shape));
      known.push_back(parent.first());
    }
    sequences_.parents = std::move(known);
    return absl::OkStatus();
  }

  Sequences sequences_;
  std::vector<CallShape> shapes_;
  std::vector<std::unique_ptr<SequenceCalls>> parents_;
};

absl::Status CheckShape(const CallShape& shape) {
  if (shape.mask != MaskKind::kNone || shape.ragged) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has a mask or ragged lengths; caches have neither", Describe(shape)));
  }
  if (shape.batch <= kMaxBatch) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has a batch of %d; a call on caches has at most %d", Describe(shape),
                      shape.batch, kMaxBatch));
}

}  // namespace

absl::StatusOr<CacheScenario> ParseCacheScenario(std::string_view text) {
  if (text == "decode") return CacheScenario::kDecode;
  if (text == "prefill-decode") return CacheScenario::kPrefillDecode;
  if (text == "shared-prefix") return CacheScenario::kSharedPrefix;
  return absl::InvalidArgumentError(
      absl::StrFormat("'%s'; it takes decode, prefill-decode or shared-prefix", text));
}

absl::StatusOr<std::unique_ptr<Workload>> KeepSequences(const SequenceOptions& options,
                                                        const std::vector<CallShape>& shapes) {
  for (const CallShape& shape : shapes) {
    RAPT_RETURN_IF_ERROR(CheckShape(shape));
  }
  return std::make_unique<SequenceWorkload>(options, shapes);
}

}  // namespace rapt::load
