// The only file that includes cuDNN's C++ frontend, which takes most of a minute to compile.
#include "attention/cudnn/library.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where the frontend looks up cuDNN's functions
}

namespace rapt::cudnn {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::graph::Tensor_attributes;

// --- Loading -------------------------------------------------------------------------------------

// Opens the library from the first directory that has it and sets `path` to its path.
void* OpenLibrary(const char* name, absl::string_view directories, std::string& path) {
  for (absl::string_view directory : absl::StrSplit(directories, ':')) {
    path = directory.empty() ? name : absl::StrCat(directory, "/", name);
    if (void* handle = dlopen(path.c_str(), RTLD_NOW)) return handle;
  }
  return nullptr;
}

// Each library resolves against those opened before it. The compiler's builtins are not a declared
// dependency, but compiling fails without them.
absl::Status OpenAll(absl::string_view directories, void*& runtime) {
  std::string path;
  void* handle = nullptr;
  for (const char* name :
       {"libcudart.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.so.13", "libcudnn.so.9"}) {
    handle = OpenLibrary(name, directories, path);
    if (handle == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("cannot load ", name));
    }
    // Otherwise the frontend prefers CUDA 12's runtime if that is installed, too.
    if (absl::StartsWith(name, "libcudart")) {
      runtime = handle;
      setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", path.c_str(), /*replace=*/1);
    }
  }
  fe::cudnn_dlhandle = handle;
  return absl::OkStatus();
}

// --- Graphs --------------------------------------------------------------------------------------

fe::DataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return fe::DataType_t::HALF;
    case DType::kBFloat16:
      return fe::DataType_t::BFLOAT16;
    case DType::kFloat32:
      return fe::DataType_t::FLOAT;
    default:
      RAPT_CHECK(false, "Supports() rejects this type");
  }
}

std::vector<int64_t> Dims(const std::array<int64_t, 4>& dims) { return {dims.begin(), dims.end()}; }

Tensor_attributes Packed(TensorId id, fe::DataType_t type, const std::array<int64_t, 4>& dims) {
  return Tensor_attributes()
      .set_uid(static_cast<int64_t>(id))
      .set_dim(Dims(dims))
      .set_stride(Dims(RowMajorStrides(dims)))
      .set_data_type(type);
}

// Q, K, V or O. In a ragged graph, the heads of a token are adjacent.
Tensor_attributes Rows(const SdpaGraph& g, fe::graph::Graph& graph, TensorId id, TensorId offsets,
                       const std::array<int64_t, 4>& dims) {
  Tensor_attributes rows = Packed(id, TypeOf(g.dtype), dims);
  if (!g.ragged) return rows;
  const auto [batch, heads, length, size] = dims;
  return rows.set_stride({length * heads * size, size, heads * size, 1})
      .set_ragged_offset(
          graph.tensor(Packed(offsets, fe::DataType_t::INT64, {batch + 1, 1, 1, 1})));
}

// The keys or values of all pages.
Tensor_attributes Pages(const SdpaGraph& g, TensorId id, int64_t head_size) {
  const int64_t page_size = PageBytes(g) / SizeOf(g.dtype);
  return Packed(id, TypeOf(g.dtype), {g.pages->count, g.kv_heads, g.pages->rows, head_size})
      .set_stride({page_size, g.pages->rows * head_size, head_size, 1});
}

using ScoreModifier = std::function<TensorPtr(std::shared_ptr<fe::graph::Graph>, TensorPtr)>;

struct Lengths {
  TensorPtr queries;
  TensorPtr keys;
};

// In cuDNN the softcap is a custom score modifier, which must also apply everything that hides
// keys.
ScoreModifier SoftcapAndBounds(const SdpaGraph& g, const Lengths& lengths) {
  namespace modifiers = fe::graph::attn::score_modifiers;
  return [g, lengths](const std::shared_ptr<fe::graph::Graph>& graph, TensorPtr scores) {
    modifiers::Softcap softcap;
    scores = softcap.forward(graph, scores,
                             std::make_shared<Tensor_attributes>(static_cast<float>(g.softcap)));
    if (g.has_lengths) {
      scores = modifiers::padding_mask(graph, scores, lengths.keys, lengths.queries);
    }
    if (!g.left_bound && !g.right_bound) return scores;
    return modifiers::sliding_window_mask(
        graph, scores,
        g.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT,
        g.left_bound, g.right_bound, g.query_length, g.key_length, lengths.queries, lengths.keys);
  };
}

template <typename Attributes>
void SetBounds(const SdpaGraph& g, const Lengths& lengths, Attributes& sdpa) {
  sdpa.set_diagonal_alignment(g.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                             : fe::DiagonalAlignment_t::TOP_LEFT);
  if (g.left_bound) sdpa.set_diagonal_band_left_bound(static_cast<int>(*g.left_bound));
  if (g.right_bound) sdpa.set_diagonal_band_right_bound(static_cast<int>(*g.right_bound));
  if (g.has_lengths) {
    sdpa.set_padding_mask(true).set_seq_len_q(lengths.queries).set_seq_len_kv(lengths.keys);
  }
}

struct Inputs {
  TensorPtr q;
  TensorPtr k;
  TensorPtr v;
  TensorPtr scale;
  TensorPtr bias;  // or null
  Lengths lengths;
};

// FP32 is exact: cuDNN's FP32 attention engines use no TF32.
Inputs DefineInputs(const SdpaGraph& g, fe::graph::Graph& graph) {
  graph.set_io_data_type(TypeOf(g.dtype))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto rows = [&](TensorId id, TensorId offsets, const std::array<int64_t, 4>& dims) {
    return Rows(g, graph, id, offsets, dims);
  };
  Inputs in;
  in.q = graph.tensor(rows(TensorId::kQuery, TensorId::kQueryOffsets,
                           {g.batch, g.query_heads, g.query_length, g.head_size}));
  in.k = graph.tensor(g.pages ? Pages(g, TensorId::kKey, g.head_size)
                              : rows(TensorId::kKey, TensorId::kKeyOffsets,
                                     {g.batch, g.kv_heads, g.key_length, g.head_size}));
  in.v = graph.tensor(g.pages ? Pages(g, TensorId::kValue, g.value_head_size)
                              : rows(TensorId::kValue, TensorId::kValueOffsets,
                                     {g.batch, g.kv_heads, g.key_length, g.value_head_size}));
  in.scale = graph.tensor(
      Packed(TensorId::kScale, fe::DataType_t::FLOAT, {1, 1, 1, 1}).set_is_pass_by_value(true));
  if (g.has_lengths) {
    const std::array<int64_t, 4> dims = {g.batch, 1, 1, 1};
    in.lengths.queries = graph.tensor(Packed(TensorId::kQueryLengths, fe::DataType_t::INT32, dims));
    in.lengths.keys = graph.tensor(Packed(TensorId::kKeyLengths, fe::DataType_t::INT32, dims));
  }
  if (g.bias) {
    in.bias = graph.tensor(Packed(TensorId::kBias, TypeOf(g.bias->dtype), g.bias->dims));
  }
  return in;
}

void Write(const TensorPtr& to, Tensor_attributes packed) {
  to->set_output(true)
      .set_uid(packed.get_uid())
      .set_dim(packed.get_dim())
      .set_stride(packed.get_stride())
      .set_data_type(packed.get_data_type())
      .set_ragged_offset(packed.get_ragged_offset());
}

void DefineForward(const SdpaGraph& g, fe::graph::Graph& graph) {
  const Inputs in = DefineInputs(g, graph);
  auto sdpa = fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(true).set_attn_scale(
      in.scale);
  if (in.bias) sdpa.set_bias(in.bias);
  if (g.pages) {
    const std::array<int64_t, 4> dims = {g.batch, 1, g.key_length / g.pages->rows, 1};
    const auto table = [&](TensorId id) {
      return graph.tensor(Packed(id, fe::DataType_t::INT32, dims));
    };
    sdpa.set_paged_attention_k_table(table(TensorId::kKeyPages))
        .set_paged_attention_v_table(table(TensorId::kValuePages))
        .set_paged_attention_max_seq_len_kv(static_cast<int>(g.key_length));
  }
  if (g.softcap > 0) {
    sdpa.set_score_mod(SoftcapAndBounds(g, in.lengths));
  } else {
    SetBounds(g, in.lengths, sdpa);
  }

  auto [output, lse] = graph.sdpa(in.q, in.k, in.v, std::move(sdpa));
  Write(output, Rows(g, graph, TensorId::kOutput, TensorId::kOutputOffsets,
                     {g.batch, g.query_heads, g.query_length, g.value_head_size}));
  // Never ragged: with a single query per row, cuDNN 9.26 writes a ragged LSE only for the first
  // head of each group.
  Write(lse,
        Packed(TensorId::kLse, fe::DataType_t::FLOAT, {g.batch, g.query_heads, g.query_length, 1}));
}

void DefineBackward(const SdpaGraph& g, fe::graph::Graph& graph) {
  const fe::DataType_t type = TypeOf(g.dtype);
  const Inputs in = DefineInputs(g, graph);
  const std::array<int64_t, 4> rows = {g.batch, g.query_heads, g.query_length, g.value_head_size};
  const TensorPtr output = graph.tensor(Packed(TensorId::kOutput, type, rows));
  const TensorPtr output_gradient = graph.tensor(Packed(TensorId::kOutputGradient, type, rows));
  const TensorPtr lse = graph.tensor(
      Packed(TensorId::kLse, fe::DataType_t::FLOAT, {g.batch, g.query_heads, g.query_length, 1}));

  auto sdpa = fe::graph::SDPA_backward_attributes()
                  .set_name("sdpa_backward")
                  .set_deterministic_algorithm(true)
                  .set_attn_scale(in.scale);
  if (in.bias) sdpa.set_bias(in.bias);
  SetBounds(g, in.lengths, sdpa);

  auto [dq, dk, dv] =
      graph.sdpa_backward(in.q, in.k, in.v, output, output_gradient, lse, std::move(sdpa));
  Write(dq, Packed(TensorId::kQueryGradient, type,
                   {g.batch, g.query_heads, g.query_length, g.head_size}));
  Write(dk, Packed(TensorId::kKeyGradient, type, {g.batch, g.kv_heads, g.key_length, g.head_size}));
  Write(dv, Packed(TensorId::kValueGradient, type,
                   {g.batch, g.kv_heads, g.key_length, g.value_head_size}));
}

bool Has(const SdpaGraph& g, TensorId id) {
  switch (id) {
    case TensorId::kBias:
      return g.bias.has_value();
    case TensorId::kQueryLengths:
    case TensorId::kKeyLengths:
      return g.has_lengths;
    case TensorId::kQueryOffsets:
    case TensorId::kKeyOffsets:
    case TensorId::kValueOffsets:
    case TensorId::kOutputOffsets:
      return g.ragged;
    case TensorId::kKeyPages:
    case TensorId::kValuePages:
      return g.pages.has_value();
    case TensorId::kOutputGradient:
    case TensorId::kQueryGradient:
    case TensorId::kKeyGradient:
    case TensorId::kValueGradient:
      return g.backward;
    default:
      return true;
  }
}

absl::Status ToStatus(fe::error_t error) {
  if (error.is_good()) return absl::OkStatus();
  const absl::StatusCode code = error.get_code() == fe::error_code_t::GRAPH_NOT_SUPPORTED
                                    ? absl::StatusCode::kUnimplemented
                                    : absl::StatusCode::kInternal;
  return absl::Status(code, absl::StrCat("cuDNN: ", error.get_message()));
}

absl::StatusOr<CompiledPlan> CompileGraph(const SdpaGraph& g, absl::string_view properties) {
  auto device = std::make_shared<fe::DeviceProperties>();
  RAPT_RETURN_IF_ERROR(
      ToStatus(device->deserialize(std::vector<uint8_t>(properties.begin(), properties.end()))));
  const auto described = nlohmann::json::parse(properties.begin(), properties.end());
  fe::graph::Graph graph;
  // Set before nodes are added, which otherwise query the current device.
  graph.set_device_properties(device).set_sm_version(described.at("deviceVer").get<int>() / 10);
  g.backward ? DefineBackward(g, graph) : DefineForward(g, graph);
  CompiledPlan plan;
  for (const auto& step : std::initializer_list<std::function<fe::error_t()>>{
           [&] { return graph.validate(); }, [&] { return graph.build_operation_graph(); },
           [&] { return graph.create_execution_plans({fe::HeurMode_t::A}); },
           [&] { return graph.check_support(); }, [&] { return graph.build_plans(); },
           [&] { return graph.get_workspace_size(plan.workspace_bytes); },
           [&] { return graph.serialize(plan.bytes, /*serialize_structure=*/false); }}) {
    RAPT_RETURN_IF_ERROR(ToStatus(step()));
  }
  return plan;
}

// The frontend throws if a library lacks a function.
template <typename Result, typename Call>
Result Caught(const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("cuDNN: ", error.what()));
  }
}

class FrontendStream final : public Stream {
 public:
  explicit FrontendStream(cudnnHandle_t handle) : handle_(handle) {}
  ~FrontendStream() override {
    loaded_.clear();
    fe::detail::destroy_handle(handle_);
  }

  absl::Status Run(const SdpaGraph& g, const CompiledPlan& plan, const ArenaLayout& layout,
                   std::byte* arena, std::byte* workspace, std::byte* pages) override {
    return Caught<absl::Status>([&] {
      RAPT_ASSIGN_OR_RETURN(fe::graph::Graph* const graph, Load(g, plan));
      const std::pair<TensorId, int64_t> places[] = {
          {TensorId::kQuery, layout.query},
          {TensorId::kKey, layout.key},
          {TensorId::kValue, layout.value},
          {TensorId::kBias, layout.bias},
          {TensorId::kQueryLengths, layout.query_lengths},
          {TensorId::kKeyLengths, layout.key_lengths},
          {TensorId::kQueryOffsets, layout.query_offsets},
          {TensorId::kKeyOffsets, layout.key_offsets},
          {TensorId::kValueOffsets, layout.value_offsets},
          {TensorId::kOutputOffsets, layout.output_offsets},
          {TensorId::kKeyPages, layout.page_table},
          {TensorId::kValuePages, layout.page_table},
          {TensorId::kOutput, layout.output},
          {TensorId::kLse, layout.lse},
          {TensorId::kOutputGradient, layout.output_gradient},
          {TensorId::kQueryGradient, layout.query_gradient},
          {TensorId::kKeyGradient, layout.key_gradient},
          {TensorId::kValueGradient, layout.value_gradient}};
      std::unordered_map<int64_t, void*> tensors;
      for (const auto& [id, place] : places) {
        if (Has(g, id)) tensors[static_cast<int64_t>(id)] = arena + place;
      }
      if (g.pages) {
        tensors[static_cast<int64_t>(TensorId::kKey)] = pages;
        tensors[static_cast<int64_t>(TensorId::kValue)] = pages + PageKeyBytes(g);
      }
      auto scale = static_cast<float>(g.scale);  // on the host; read before execute() returns
      tensors[static_cast<int64_t>(TensorId::kScale)] = &scale;
      return ToStatus(graph->execute(handle_, tensors, workspace));
    });
  }

 private:
  // Loaded plans hold device memory. A service with more shapes reloads some.
  static constexpr size_t kMaxLoaded = 256;

  absl::StatusOr<fe::graph::Graph*> Load(const SdpaGraph& g, const CompiledPlan& plan) {
    const std::string key = g.Key();
    if (const auto found = loaded_.find(key); found != loaded_.end()) return found->second.get();
    if (loaded_.size() == kMaxLoaded) loaded_.clear();
    auto graph = std::make_unique<fe::graph::Graph>();
    RAPT_RETURN_IF_ERROR(ToStatus(graph->deserialize(handle_, plan.bytes)));
    return (loaded_[key] = std::move(graph)).get();
  }

  cudnnHandle_t handle_;
  std::map<std::string, std::unique_ptr<fe::graph::Graph>> loaded_;
};

}  // namespace

absl::StatusOr<const Library*> Library::Load(absl::string_view directories) {
  static const absl::StatusOr<const Library*> library = [&]() -> absl::StatusOr<const Library*> {
    void* runtime = nullptr;
    RAPT_RETURN_IF_ERROR(OpenAll(directories, runtime));
    static const Library loaded(static_cast<int64_t>(fe::detail::get_backend_version()), runtime);
    return &loaded;
  }();
  return library;
}

absl::StatusOr<CompiledPlan> Library::Compile(const SdpaGraph& graph,
                                              absl::string_view properties) const {
  return Caught<absl::StatusOr<CompiledPlan>>([&] { return CompileGraph(graph, properties); });
}

absl::StatusOr<std::string> Library::Describe(int device) const {
  return Caught<absl::StatusOr<std::string>>([&]() -> absl::StatusOr<std::string> {
    fe::DeviceProperties properties;
    RAPT_RETURN_IF_ERROR(ToStatus(properties.set_device_id(device).build()));
    std::vector<uint8_t> json;
    RAPT_RETURN_IF_ERROR(ToStatus(properties.serialize(json)));
    return std::string(json.begin(), json.end());
  });
}

absl::StatusOr<std::unique_ptr<Stream>> Library::OpenStream(void* stream) const {
  return Caught<absl::StatusOr<std::unique_ptr<Stream>>>(
      [&]() -> absl::StatusOr<std::unique_ptr<Stream>> {
        cudnnHandle_t handle = nullptr;
        cudnnStatus_t status = fe::detail::create_handle(&handle);
        if (status != CUDNN_STATUS_SUCCESS) {
          return absl::FailedPreconditionError(
              absl::StrCat("cannot create a cuDNN handle: error ", status));
        }
        auto opened = std::make_unique<FrontendStream>(handle);
        status = fe::detail::set_stream(handle, static_cast<cudaStream_t>(stream));
        if (status == CUDNN_STATUS_SUCCESS) return opened;
        return absl::InternalError(absl::StrCat("cannot set the cuDNN stream: error ", status));
      });
}

void* Library::RuntimeFunction(const char* name) const { return dlsym(runtime_, name); }

}  // namespace rapt::cudnn
