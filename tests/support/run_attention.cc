#include "tests/support/run_attention.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <utility>
#include <variant>

#include "attention/attributes.h"
#include "attention/backend.h"
#include "base/aligned_buffer.h"
#include "base/mutex.h"
#include "base/thread_pool.h"

namespace rapt::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr size_t kOutputGuardBytes = 256;
// Wide enough that an array that begins beyond the end still begins in the guard.
constexpr size_t kGuardBytes = 1 << 16;
constexpr std::byte kNanByte{0xFF};

// Pools live as long as the process, so that tests do not pay for threads. Thread-safe.
ThreadPool& PoolOf(int workers) {
  static Mutex mutex;
  static std::map<int, std::unique_ptr<ThreadPool>> pools;
  MutexLock lock(mutex);
  std::unique_ptr<ThreadPool>& pool = pools[workers];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(workers);
  return *pool;
}

// Exactly `bytes` between two guards, all of it NaN.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(size_t bytes) : bytes_(bytes), buffer_(bytes + 2 * kGuardBytes) {
    std::fill_n(buffer_.data(), buffer_.size(), kNanByte);
  }

  absl::Span<std::byte> span() { return {buffer_.data() + kGuardBytes, bytes_}; }

  bool GuardsIntact() const {
    const auto intact = [](const std::byte* guard) {
      return std::all_of(guard, guard + kGuardBytes, [](std::byte b) { return b == kNanByte; });
    };
    return intact(buffer_.data()) && intact(buffer_.data() + kGuardBytes + bytes_);
  }

 private:
  size_t bytes_;
  AlignedBuffer buffer_;
};

TensorView MaskView(const Tensor& mask) {
  TensorView view = mask.View();
  for (int axis = 0; axis < 4; ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

Outputs MakeOutputs(const Problem& p, Storage storage) {
  const auto make = [&](DType dtype, const Dims& dims) {
    return Tensor(dtype, dims, storage, kOutputGuardBytes);
  };
  Outputs outputs;
  outputs.output = make(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size});
  if (p.wants_lse) outputs.lse = make(p.lse_dtype(), {p.batch, p.query_heads, p.query_length, 1});
  if (p.score_output) {
    outputs.scores = make(p.dtype, {p.batch, p.query_heads, p.query_length, p.total_keys()});
  }
  if (p.wants_present) {
    outputs.present_key = make(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.head_size});
    if (!p.values_in_keys) {
      outputs.present_value =
          make(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.value_head_size});
    }
  }
  return outputs;
}

Arguments MakeArguments(const Inputs& inputs, Outputs& outputs) {
  Arguments arguments;
  arguments.inputs[Role::kQ] = inputs.query.View();
  arguments.inputs[Role::kK] = inputs.key.View();
  arguments.inputs[Role::kV] = inputs.value.View();
  if (inputs.mask) arguments.inputs[Role::kMask] = MaskView(*inputs.mask);
  if (inputs.past_key) arguments.inputs[Role::kPastKey] = inputs.past_key->View();
  if (inputs.past_value) arguments.inputs[Role::kPastValue] = inputs.past_value->View();
  if (inputs.bias) arguments.inputs[Role::kBias] = MaskView(*inputs.bias);
  if (inputs.head_sink) arguments.inputs[Role::kHeadSink] = inputs.head_sink->View();
  if (inputs.alibi_slopes) arguments.inputs[Role::kAlibiSlopes] = MaskView(*inputs.alibi_slopes);
  if (inputs.bias_table) arguments.inputs[Role::kBiasTable] = inputs.bias_table->View();
  if (inputs.relative_bias) arguments.inputs[Role::kRelativeBias] = MaskView(*inputs.relative_bias);
  if (inputs.relative_keys) arguments.inputs[Role::kRelativeKeys] = MaskView(*inputs.relative_keys);
  if (inputs.relative_values) {
    arguments.inputs[Role::kRelativeValues] = MaskView(*inputs.relative_values);
  }
  if (inputs.relative_query) {
    arguments.inputs[Role::kRelativeQuery] = inputs.relative_query->View();
  }
  if (inputs.cos_cache) arguments.inputs[Role::kCosCache] = inputs.cos_cache->View();
  if (inputs.sin_cache) arguments.inputs[Role::kSinCache] = inputs.sin_cache->View();
  if (inputs.position_ids) arguments.inputs[Role::kPositionIds] = inputs.position_ids->View();
  if (inputs.key_position_ids) {
    arguments.inputs[Role::kKeyPositionIds] = inputs.key_position_ids->View();
  }
  if (inputs.additive_weight) {
    arguments.inputs[Role::kAdditiveWeight] = MaskView(*inputs.additive_weight);
  }
  if (inputs.head_alpha) arguments.inputs[Role::kHeadAlpha] = inputs.head_alpha->View();
  if (inputs.block_mask) arguments.inputs[Role::kBlockMask] = MaskView(*inputs.block_mask);
  if (inputs.selected) arguments.inputs[Role::kSelectedIndices] = MaskView(*inputs.selected);
  if (inputs.global_mask) arguments.inputs[Role::kGlobalMask] = MaskView(*inputs.global_mask);
  arguments.key_lengths = inputs.key_lengths;
  arguments.outputs[Role::kY] = outputs.output.MutableView();
  if (outputs.lse) arguments.outputs[Role::kLse] = outputs.lse->MutableView();
  if (outputs.scores) arguments.outputs[Role::kScores] = outputs.scores->MutableView();
  if (outputs.present_key) {
    arguments.outputs[Role::kPresentKey] = outputs.present_key->MutableView();
  }
  if (outputs.present_value) {
    arguments.outputs[Role::kPresentValue] = outputs.present_value->MutableView();
  }
  return arguments;
}

void ExpectGapsIntact(const Outputs& outputs) {
  EXPECT_TRUE(outputs.output.GapsIntact()) << "write outside the output";
  EXPECT_TRUE(!outputs.lse || outputs.lse->GapsIntact()) << "write outside lse";
  EXPECT_TRUE(!outputs.scores || outputs.scores->GapsIntact()) << "write outside the scores";
  EXPECT_TRUE(!outputs.present_key || outputs.present_key->GapsIntact())
      << "write outside present_key";
  EXPECT_TRUE(!outputs.present_value || outputs.present_value->GapsIntact())
      << "write outside present_value";
}

// " softcap=0.5"; "" for the default.
std::string TextOf(const AttributeInfo& info, const Problem& p) {
  const auto text = [&](const auto& field) -> std::string {
    if (field.problem == nullptr || p.*field.problem == Problem{}.*field.problem) return "";
    std::ostringstream out;
    out.precision(17);
    out << " " << info.c << "=";
    if constexpr (requires { *(p.*field.problem); }) {
      out << *(p.*field.problem);
    } else if constexpr (std::is_enum_v<std::decay_t<decltype(p.*field.problem)>>) {
      out << info.choices[static_cast<size_t>(p.*field.problem)];
    } else {
      out << p.*field.problem;
    }
    return out.str();
  };
  return std::visit(text, info.field);
}

Tensor RandomMask(const MaskShape& shape, Rng& rng, Storage storage) {
  Tensor mask(shape.dtype, shape.dims, storage);
  if (shape.dtype == DType::kBool) return mask.FillBool(rng, 2.0 / 3);
  mask.FillUniform(rng, -2, 2);
  for (int64_t n = 0; n < mask.size() / 8; ++n) {
    mask.Set(UniformInt(rng, 0, shape.dims[0] - 1), UniformInt(rng, 0, shape.dims[1] - 1),
             UniformInt(rng, 0, shape.dims[2] - 1), UniformInt(rng, 0, shape.dims[3] - 1), -kInf);
  }
  return mask;
}

// Different keys in any order, with some unused places.
Tensor RandomIndices(const Problem& p, Rng& rng) {
  Tensor indices(DType::kInt32, {p.batch, p.selected->heads, p.query_length, p.selected->count});
  std::vector<int64_t> keys(p.total_keys());
  std::iota(keys.begin(), keys.end(), 0);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.selected->heads; ++h) {
      for (int64_t i = 0; i < p.query_length; ++i) {
        int64_t used = 0;
        for (int64_t n = 0; n < p.selected->count; ++n) {
          const bool is_used = used < p.total_keys() && UniformInt(rng, 0, 7) > 0;
          if (is_used) std::swap(keys[used], keys[UniformInt(rng, used, p.total_keys() - 1)]);
          indices.Set(b, h, i, n, is_used ? static_cast<double>(keys[used++]) : -1);
        }
      }
    }
  }
  return indices;
}

}  // namespace

const std::vector<Target>& Targets() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> found;
    for (const Backend* backend : TargetBackends()) {
      if (!backend->Available().ok()) continue;
      const std::string name(backend->name());
      if (backend->instruction_sets().empty()) found.push_back({name, "auto"});
      for (const InstructionSet& set : backend->instruction_sets()) {
        if (set.available) found.push_back({name, std::string(set.name)});
      }
    }
    return found;
  }();
  return targets;
}

std::vector<std::string> MissingTargets() {
  std::vector<std::string> missing;
  for (const Backend* backend : TargetBackends()) {
    const std::string name(backend->name());
    if (!backend->Available().ok()) {
      missing.push_back(name + " (" + std::string(backend->Available().message()) + ")");
      continue;
    }
    for (const InstructionSet& set : backend->instruction_sets()) {
      if (!set.available) missing.push_back(name + "/" + std::string(set.name));
    }
  }
  return missing;
}

std::string ToText(const Problem& p) {
  std::ostringstream text;
  text.precision(17);
  text << "{" << NameOf(p.dtype) << " B=" << p.batch << " Hq=" << p.query_heads
       << " Hkv=" << p.kv_heads << " Sq=" << p.query_length << " Sk=" << p.key_length
       << " P=" << p.past_length << " D=" << p.head_size << " Dv=" << p.value_head_size;
  for (const AttributeInfo& info : Attributes()) text << TextOf(info, p);
  if (p.alignment == Alignment::kBottomRight) text << " bottom_right";
  if (p.alignment == Alignment::kOnnx) text << " onnx_alignment";
  if (p.mask) {
    text << " mask=" << NameOf(p.mask->dtype) << "[" << p.mask->dims[0] << "," << p.mask->dims[1]
         << "," << p.mask->dims[2] << "," << p.mask->dims[3] << "]";
  }
  if (p.has_key_lengths) text << " key_lengths";
  if (p.bias) {
    text << " bias=" << NameOf(p.bias->dtype) << "[" << p.bias->dims[0] << "," << p.bias->dims[1]
         << "," << p.bias->dims[2] << "," << p.bias->dims[3] << "]";
  }
  if (p.head_sink) text << " head_sink=" << NameOf(*p.head_sink);
  const auto vectors = [&](const char* name, const std::optional<RelativeVectors>& shape) {
    if (shape)
      text << " " << name << "=" << NameOf(shape->dtype) << "[" << shape->heads << ","
           << shape->length << "]";
  };
  vectors("relative_keys", p.relative_keys);
  vectors("relative_values", p.relative_values);
  if (p.has_relative_query) text << " relative_query";
  if (p.additive_weight) {
    text << " additive_weight=" << NameOf(p.additive_weight->dtype) << "["
         << p.additive_weight->heads << "]";
  }
  if (p.head_alpha) text << " head_alpha=" << NameOf(*p.head_alpha);
  if (p.block_mask) {
    const Dims& dims = *p.block_mask;
    text << " block_mask=[" << dims[0] << "," << dims[1] << "," << dims[2] << "," << dims[3] << "]";
  }
  if (p.selected) text << " selected=[" << p.selected->heads << "," << p.selected->count << "]";
  if (p.has_global_mask) text << " global_mask";
  if (p.softmax_in_fp64) text << " softmax_in_fp64";
  if (p.dropout) text << " dropout=" << p.dropout->probability << " seed " << p.dropout->seed;
  if (p.score_output) text << " score_output=" << static_cast<int>(*p.score_output);
  if (p.wants_lse) text << " lse";
  if (p.wants_present) text << " present";
  text << "}";
  return text.str();
}

Inputs RandomInputs(const Problem& p, Rng& rng, const Arrangement& arrangement, double magnitude) {
  const auto random = [&](const Dims& dims, Storage storage, double largest) {
    return Tensor(p.dtype, dims, storage).FillUniform(rng, -largest, largest);
  };
  const auto keys = [&](int64_t length, Storage storage) {
    return random({p.batch, p.kv_heads, length, p.head_size}, storage, magnitude);
  };
  const auto values = [&](int64_t length, Storage storage) {
    return random({p.batch, p.kv_heads, length, p.value_head_size}, storage, 1);
  };
  Inputs inputs;
  inputs.query =
      random({p.batch, p.query_heads, p.query_length, p.head_size}, arrangement.query, magnitude);
  inputs.key = keys(p.key_length, arrangement.key_value);
  inputs.value = values(p.key_length, arrangement.key_value);
  if (p.past_length > 0) {
    inputs.past_key = keys(p.past_length, arrangement.past);
    inputs.past_value = values(p.past_length, arrangement.past);
  }
  if (p.mask) inputs.mask = RandomMask(*p.mask, rng, arrangement.mask);
  if (p.has_key_lengths) {
    for (int64_t b = 0; b < p.batch; ++b) {
      inputs.key_lengths.push_back(UniformInt(rng, 0, p.key_length));
    }
  }
  if (p.bias) inputs.bias = RandomMask(*p.bias, rng, arrangement.mask);
  if (p.head_sink) {
    inputs.head_sink = Tensor(*p.head_sink, {p.query_heads, 1, 1, 1}).FillUniform(rng, -4, 4);
  }
  const auto table = [&](DType dtype, int64_t first, int64_t second) {
    return Tensor(dtype, {first, second, 1, 1}).FillUniform(rng, -2, 2);
  };
  if (p.alibi_slopes) {
    inputs.alibi_slopes = table(p.alibi_slopes->dtype, p.alibi_slopes->batch, p.query_heads);
  }
  if (p.bias_table) {
    inputs.bias_table = table(p.bias_table->dtype, p.bias_table->buckets, p.query_heads);
  }
  if (p.relative_bias) {
    inputs.relative_bias =
        table(p.relative_bias->dtype, p.relative_bias->heads, p.relative_bias->length);
  }
  const auto vectors = [&](const RelativeVectors& shape, int64_t size, double largest) {
    return Tensor(shape.dtype, {shape.heads, shape.length, size, 1}, arrangement.mask)
        .FillUniform(rng, -largest, largest);
  };
  if (p.relative_keys) {
    inputs.relative_keys = vectors(*p.relative_keys, p.head_size, magnitude);
  }
  if (p.relative_values) {
    inputs.relative_values = vectors(*p.relative_values, p.value_head_size, 1);
  }
  if (p.has_relative_query) {
    inputs.relative_query =
        random({p.batch, p.query_heads, p.query_length, p.head_size}, arrangement.query, magnitude);
  }
  const auto ids = [&](int64_t length) {
    Tensor positions(DType::kInt64, {p.batch, length, 1, 1});
    const int64_t last = p.rotary_cache ? p.rotary_cache->rows - 1 : 1000;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t s = 0; s < length; ++s) {
        positions.Set(b, s, 0, 0, static_cast<double>(UniformInt(rng, 0, last)));
      }
    }
    return positions;
  };
  if (p.rotary_cache) {
    // Not those of an angle, so that the cosines and sines are told apart.
    const RotaryCache& cache = *p.rotary_cache;
    const Dims dims = cache.by_position() ? Dims{cache.rows, cache.pairs, 1, 1}
                                          : Dims{*cache.batch, cache.rows, cache.pairs, 1};
    inputs.cos_cache = Tensor(cache.dtype, dims).FillUniform(rng, -1, 1);
    inputs.sin_cache = Tensor(cache.dtype, dims).FillUniform(rng, -1, 1);
  }
  if (p.has_position_ids) inputs.position_ids = ids(p.query_length);
  if (p.has_key_position_ids) inputs.key_position_ids = ids(p.key_length);
  if (p.additive_weight) {
    inputs.additive_weight = table(p.additive_weight->dtype, p.additive_weight->heads, p.head_size);
  }
  if (p.head_alpha) {
    inputs.head_alpha = Tensor(*p.head_alpha, {p.query_heads, 1, 1, 1}).FillUniform(rng, 1, 2);
  }
  if (p.block_mask) inputs.block_mask = Tensor(DType::kBool, *p.block_mask).FillBool(rng, 0.4);
  if (p.selected) inputs.selected = RandomIndices(p, rng);
  if (p.has_global_mask) {
    inputs.global_mask = Tensor(DType::kBool, {p.batch, p.total_keys(), 1, 1}).FillBool(rng, 0.1);
  }
  return inputs;
}

namespace {

// Problems that a device declines go to the next backend, as with "auto". The pool's threads may
// wait.
absl::StatusOr<Plan> PlanOrNext(const Problem& problem, PlanOptions options) {
  options.has_lanes = true;
  absl::StatusOr<Plan> plan = MakePlan(problem, options);
  if (!absl::IsUnimplemented(plan.status()) || options.backend != "cudnn") return plan;
  options.backend = "cpu";
  return MakePlan(problem, options);
}

}  // namespace

absl::StatusOr<Outputs> RunAttention(const Problem& problem, const Inputs& inputs,
                                     const PlanOptions& options, Storage output_storage,
                                     std::optional<int> workers,
                                     const std::function<void(Arguments&)>& change) {
  const absl::StatusOr<Plan> plan = PlanOrNext(problem, options);
  if (!plan.ok()) return plan.status();
  Outputs outputs = MakeOutputs(problem, output_storage);
  GuardedWorkspace workspace(plan->workspace_bytes());
  Arguments arguments = MakeArguments(inputs, outputs);
  if (change) change(arguments);
  const absl::Status status =
      Run(*plan, arguments, workspace.span(), PoolOf(workers.value_or(plan->threads)));
  if (!status.ok()) return status;
  EXPECT_TRUE(workspace.GuardsIntact()) << plan->Describe() << " wrote outside of its workspace of "
                                        << plan->workspace_bytes() << " bytes";
  ExpectGapsIntact(outputs);
  outputs.plan = plan->Describe();
  return outputs;
}

std::vector<Outputs> RunBatched(absl::Span<const Problem> problems, absl::Span<const Inputs> inputs,
                                const PlanOptions& options) {
  std::vector<Plan> plans;
  std::vector<Outputs> outputs;
  std::vector<Arguments> arguments;
  std::deque<GuardedWorkspace> workspaces;
  for (size_t n = 0; n < problems.size(); ++n) {
    plans.push_back(PlanOrNext(problems[n], options).value());
    outputs.push_back(MakeOutputs(problems[n], Storage::kRowMajor));
    outputs.back().plan = plans.back().Describe();
    workspaces.emplace_back(plans.back().workspace_bytes());
  }
  for (size_t n = 0; n < problems.size(); ++n) {
    arguments.push_back(MakeArguments(inputs[n], outputs[n]));
  }
  std::vector<bool> taken(problems.size(), false);
  for (size_t first = 0; first < problems.size(); ++first) {
    if (taken[first]) continue;
    std::vector<Backend::BatchMember> members;
    const BatchGroup* const group = plans[first].batch_group();
    double capacity = 1;
    for (size_t n = first; n < problems.size(); ++n) {
      const BatchGroup* const own = plans[n].batch_group();
      const bool fits = group && own && own->key == group->key && own->cost <= capacity;
      if (taken[n] || (n != first && !fits)) continue;
      taken[n] = true;
      if (own) capacity -= own->cost;
      members.push_back({&plans[n], &arguments[n]});
    }
    if (members.size() > 1) {
      plans[first].routing.backend->RunBatch(absl::MakeSpan(members), /*worker=*/0);
    }
    for (const Backend::BatchMember& member : members) {
      const size_t n = member.plan - plans.data();
      if (member.done) continue;
      EXPECT_TRUE(Run(plans[n], arguments[n], workspaces[n].span(), PoolOf(plans[n].threads)).ok());
    }
  }
  for (size_t n = 0; n < problems.size(); ++n) {
    EXPECT_TRUE(workspaces[n].GuardsIntact()) << outputs[n].plan;
    ExpectGapsIntact(outputs[n]);
  }
  return outputs;
}

::testing::AssertionResult SameBits(const Outputs& a, const Outputs& b) {
  ::testing::AssertionResult same = SameBits("output", a.output, b.output);
  const auto compare = [&](const char* name, const std::optional<Tensor>& left,
                           const std::optional<Tensor>& right) {
    if (same && left.has_value() != right.has_value()) {
      same = ::testing::AssertionFailure() << "only one has " << name;
    }
    if (same && left) same = SameBits(name, *left, *right);
  };
  compare("lse", a.lse, b.lse);
  compare("scores", a.scores, b.scores);
  compare("present_key", a.present_key, b.present_key);
  compare("present_value", a.present_value, b.present_value);
  return same;
}

void ExpectSameOutputs(const Problem& a, const Inputs& inputs_a, const Problem& b,
                       const Inputs& inputs_b) {
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs left = RunAttention(a, inputs_a, target.Options()).value();
    const Outputs right = RunAttention(b, inputs_b, target.Options()).value();
    if (!target.MayUseTiles(a.dtype)) {
      EXPECT_TRUE(SameBits(left, right));
      continue;
    }
    const Tolerance rounding{2 * ToleranceOf(a.dtype), {}};
    EXPECT_TRUE(AllClose("output", left.output, right.output.ToVector(), rounding));
  }
}

::testing::AssertionResult Matches(const Problem& problem, const Outputs& outputs,
                                   const Expected& expected) {
  // Larger scores lose relative precision in the exponential, in every type. The weights of other
  // normalizers have the absolute error of the scores, and vectors by distance add two terms, which
  // may cancel.
  const bool is_absolute = problem.normalizer != Normalizer::kSoftmax || problem.relative_keys;
  const double large_score = is_absolute ? 0 : 8;
  const double unit = problem.accumulator() == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  Tolerance tolerance{ToleranceOf(problem.dtype), {}};
  for (size_t row = 0; row < expected.row_max_score.size(); ++row) {
    const double score = expected.row_max_score[row];
    tolerance.row_slack.push_back((score > large_score ? 8 * unit * score : 0) +
                                  4 * unit * expected.row_weight_sum[row]);
  }
  ::testing::AssertionResult result =
      AllClose("output", outputs.output, expected.output, tolerance);
  if (result && outputs.lse) result = AllClose("lse", *outputs.lse, expected.lse, tolerance);
  if (result && outputs.scores) {
    result = AllClose("scores", *outputs.scores, expected.scores, tolerance);
  }
  const Tolerance exact;
  if (result && outputs.present_key) {
    const Tolerance of_keys{problem.rotates_keys() ? ToleranceOf(problem.dtype) : 0, {}};
    result = AllClose("present_key", *outputs.present_key, expected.present_key, of_keys);
  }
  if (result && outputs.present_value) {
    result = AllClose("present_value", *outputs.present_value, expected.present_value, exact);
  }
  return result;
}

void ExpectConforms(const Problem& problem, const Inputs& inputs, int threads,
                    Storage output_storage) {
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    const PlanOptions options = target.Options(threads);
    SCOPED_TRACE(target.Name() + " threads=" + std::to_string(threads) + " " + ToText(problem));
    const absl::StatusOr<Outputs> outputs = RunAttention(problem, inputs, options, output_storage);
    // A device may decline a problem; cpu and reference may not.
    if (absl::IsUnimplemented(outputs.status()) && target.backend != "cpu" &&
        target.backend != "reference") {
      continue;
    }
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_TRUE(Matches(problem, *outputs, expected)) << "plan " << outputs->plan;
  }
}

}  // namespace rapt::test
